// A thread pool whose threads spin between parallel regions: starting a region costs about a microsecond while they are
// awake.
//
// Threads claim one task at a time, so a core that is busy with other processes only runs fewer of them; results never
// depend on the thread that ran a task. A thread that slept through a region finds no task left, and the caller does
// not wait for it.
#pragma once
#include <atomic>
#include <cstdint>

class Pool {
public:
    typedef void (*Task)(void* context, int index);
    static Pool& get();
    void start(int threads);  // the caller counts as one; may be called again with more
    int threads() const { return threads_; }
    void run(int tasks, Task task, void* context);

private:
    void worker();
    bool claim_and_run(uint32_t epoch);

    int threads_ = 1;
    std::atomic<uint64_t> state_{0};  // epoch << 32 | tasks << 16 | next
    std::atomic<int> done_{0};
    std::atomic<int> sleepers_{0};
    Task task_ = nullptr;
    void* context_ = nullptr;
};

// Calls f(index) for index in [0, tasks), on all threads; returns when all calls have returned.
template <class F> inline void parallel(int tasks, F&& f) {
    if (tasks <= 1 || Pool::get().threads() == 1) {
        for (int i = 0; i < tasks; i++) f(i);
        return;
    }
    Pool::get().run(tasks, [](void* c, int i) { (*static_cast<std::remove_reference_t<F>*>(c))(i); }, (void*)&f);
}

// The contiguous part `index` of [0, n), which is divided into `tasks` parts.
struct Range {
    int begin, end;
};

inline Range share(int n, int tasks, int index) {
    return {(int)((int64_t)n * index / tasks), (int)((int64_t)n * (index + 1) / tasks)};
}
