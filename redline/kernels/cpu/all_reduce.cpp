// All-reduce and all-gather among the ranks of one model on a CPU, which are processes that share memory.
//
// A rank that waits spins for a moment, then sleeps on the other rank's epoch (futex), because two cores may run eight
// ranks.
#include "core/kernels.h"

#include <atomic>
#include <chrono>
#include <cstring>
#if defined(__linux__)
#include <ctime>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#include <thread>
#endif

namespace {
using Clock = std::chrono::steady_clock;
constexpr int LOOKS = 500, APART = 16;  // APART: words between epochs

std::atomic<uint32_t>& epoch_of(const AllReduceCall& call, int rank) {
    return *reinterpret_cast<std::atomic<uint32_t>*>(call.epochs + rank * APART);
}

void sleep_on(std::atomic<uint32_t>& word, uint32_t seen, std::chrono::nanoseconds most) {
#if defined(__linux__)
    timespec time = {(time_t)(most.count() / 1000000000), (long)(most.count() % 1000000000)};
    syscall(SYS_futex, &word, FUTEX_WAIT, seen, &time, nullptr, 0);
#else
    std::this_thread::sleep_for(std::min<std::chrono::nanoseconds>(most, std::chrono::microseconds(50)));
#endif
}

void wake(std::atomic<uint32_t>& word) {
#if defined(__linux__)
    syscall(SYS_futex, &word, FUTEX_WAKE, 1 << 30, nullptr, nullptr, 0);
#endif
}

// Whether the rank has arrived at this call, or arrives before `until`.
bool has_come(const AllReduceCall& call, int rank, Clock::time_point until) {
    std::atomic<uint32_t>& word = epoch_of(call, rank);
    for (int looks = 0;; looks++) {
        uint32_t seen = word.load(std::memory_order_acquire);
        if ((int32_t)(seen - (uint32_t)call.epoch) >= 0) return true;
        if (looks < LOOKS) continue;
        auto left = until - Clock::now();
        if (left.count() <= 0) return false;
        sleep_on(word, seen, left);
    }
}
}  // namespace

void redline_all_reduce(const AllReduceCall& call) {
    int64_t turn = call.epoch % 2;
    float* rooms = call.rooms + turn * call.ranks * call.room;
    memcpy(rooms + call.rank * call.room, call.part, call.count * sizeof(float));
    epoch_of(call, call.rank).store((uint32_t)call.epoch, std::memory_order_release);
    wake(epoch_of(call, call.rank));
    Clock::time_point until = Clock::now() + std::chrono::nanoseconds(call.wait_ns);
    *call.missing = -1;
    for (int rank = 0; rank < call.ranks; rank++) {
        if (rank != call.rank && !has_come(call, rank, until)) {
            *call.missing = rank;
            return;
        }
        const float* from = rooms + rank * call.room;
        if (call.width) {
            for (int64_t row = 0; row < call.count / call.width; row++)
                memcpy(call.whole + (row * call.ranks + rank) * call.width, from + row * call.width, call.width * sizeof(float));
        } else if (rank == 0) {
            memcpy(call.whole, from, call.count * sizeof(float));
        } else {
            for (int64_t i = 0; i < call.count; i++) call.whole[i] += from[i];
        }
    }
}
