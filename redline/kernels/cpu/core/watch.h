// Records the ops of a thread with their times, for a trace. Without a trace an op only checks a pointer.
#pragma once
#include <chrono>
#include <cstdint>

struct WatchCall {
    int64_t* times;  // [room, 3]: an op's name (address), begin and end in ns of the monotonic clock; null: no trace
    int64_t* count;  // [2]: recorded ops, and ops for which there was no room
    int64_t room;
};

extern "C" void redline_watch(const WatchCall& call);  // sets it for the calling thread, until the next call

extern __thread WatchCall redline_watching;

// Records one op, from the construction of this object to the end of its scope.
class OpSpan {
public:
    explicit OpSpan(const char* name) : name_(name), began_(redline_watching.times ? now() : 0) {}
    ~OpSpan() {
        const WatchCall& w = redline_watching;
        if (!began_ || !w.times) return;
        if (w.count[0] == w.room) {
            w.count[1]++;
            return;
        }
        int64_t* at = w.times + 3 * w.count[0]++;
        at[0] = (int64_t)name_, at[1] = began_, at[2] = now();
    }

private:
    static int64_t now() {
        return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
            .count();
    }

    const char* name_;
    int64_t began_;
};
