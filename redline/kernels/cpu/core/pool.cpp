#include "pool.h"

#include <condition_variable>
#include <mutex>
#include <thread>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {
// Never destroyed: threads still wait on these while the process exits.
std::mutex& mutex = *new std::mutex;
std::condition_variable& wake = *new std::condition_variable;
std::mutex& callers = *new std::mutex;  // one region at a time, because a process may run two models

inline void pause() {
#if defined(__x86_64__)
    _mm_pause();
#else
    std::this_thread::yield();
#endif
}
constexpr int SPINS = 4000;  // about 100 us, which is longer than the gap between two ops of a step
}  // namespace

Pool& Pool::get() {
    static Pool* pool = new Pool;  // never destroyed: its threads outlive main
    return *pool;
}

void Pool::start(int threads) {
    for (; threads_ < threads; threads_++) std::thread(&Pool::worker, this).detach();
}

bool Pool::claim_and_run(uint32_t epoch) {
    for (;;) {
        uint64_t s = state_.load(std::memory_order_acquire);
        uint32_t tasks = (s >> 16) & 0xffff, next = s & 0xffff;
        if ((uint32_t)(s >> 32) != epoch || next >= tasks) return false;
        if (!state_.compare_exchange_weak(s, s + 1, std::memory_order_acq_rel)) continue;
        // The claim succeeded, so the region has not ended: its caller waits for this task.
        task_(context_, (int)next);
        done_.fetch_add(1, std::memory_order_release);
    }
}

void Pool::worker() {
    uint32_t seen = 0;
    for (;;) {
        int spins = 0;
        while ((uint32_t)(state_.load(std::memory_order_acquire) >> 32) == seen) {
            if (++spins < SPINS) {
                pause();
                continue;
            }
            std::unique_lock<std::mutex> lock(mutex);
            sleepers_.fetch_add(1);
            wake.wait(lock, [&] { return (uint32_t)(state_.load() >> 32) != seen; });
            sleepers_.fetch_sub(1);
        }
        seen = (uint32_t)(state_.load(std::memory_order_acquire) >> 32);
        claim_and_run(seen);
    }
}

void Pool::run(int tasks, Task task, void* context) {
    std::lock_guard<std::mutex> region(callers);
    task_ = task;
    context_ = context;
    done_.store(0, std::memory_order_relaxed);
    uint32_t epoch = (uint32_t)(state_.load(std::memory_order_relaxed) >> 32) + 1;
    state_.store((uint64_t)epoch << 32 | (uint64_t)tasks << 16, std::memory_order_seq_cst);
    if (sleepers_.load()) {
        std::lock_guard<std::mutex> lock(mutex);
        wake.notify_all();
    }
    claim_and_run(epoch);
    for (int spins = 0; done_.load(std::memory_order_acquire) != tasks;) {
        if (++spins < SPINS) pause();
        else std::this_thread::yield();
    }
}

extern "C" void redline_start(int threads) { Pool::get().start(threads); }
