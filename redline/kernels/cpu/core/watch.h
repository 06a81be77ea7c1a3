// Who watches: the ops of a thread are written down with their times, for a trace. Where nobody does, an op pays one look.
#pragma once
#include <chrono>
#include <cstdint>

struct WatchCall {
    int64_t* times;  // [room, 3]: address of an op's name, and its begin and end in ns of the monotonic clock; null: nobody
    int64_t* count;  // how many have been written, and how many have found no room
    int64_t room;
};

extern "C" void redline_watch(const WatchCall& call);  // the ops of the calling thread, until it is called again

extern __thread WatchCall redline_watching;

// One op, from here to the end of the block.
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
