// The slots of a step in shared memory, a word each: an expert and up to eight of its pairs, which end at the next
// slot's first pair. The choice of experts wrote them in an earlier grid, so loads bypass the SM's L1 cache.
#pragma once
#include "core.cuh"

struct Slot { u32 expert, first; };

FN Slot slot_of(u32 at, u32 slot) {
    u32 word = load_shared(shared_base() + at + 4 * slot);
    return {word & 1023, word >> 10};
}

// `count` words, at most MOST; all loads are issued before the first is waited for.
template <u32 MOST, class T>
FN void load_words(u32 to, const T* from, u32 count) {
    constexpr u32 EACH = (MOST + THREADS - 1) / THREADS;
    u32 word[EACH];
#pragma unroll
    for (u32 n = 0; n < EACH; n++) {
        u32 i = n * THREADS + thread_index();
        word[n] = i < count ? load_global_fresh(from + i) : 0;
    }
#pragma unroll
    for (u32 n = 0; n < EACH; n++) {
        u32 i = n * THREADS + thread_index();
        if (i < count) store_shared(to + 4 * i, word[n]);
    }
}

// `count` slots, at most MOST, and the end of the last one.
template <u32 MOST>
FN void load_slots(u32 at, const int* slot_expert, const int* slot_first, u32 count) {
    constexpr u32 EACH = (MOST + THREADS) / THREADS;
    u32 expert[EACH], first[EACH];
#pragma unroll
    for (u32 n = 0; n < EACH; n++) {
        u32 i = n * THREADS + thread_index();
        expert[n] = i < count ? load_global_fresh(slot_expert + i) : 0;
        first[n] = i <= count ? load_global_fresh(slot_first + i) : 0;
    }
#pragma unroll
    for (u32 n = 0; n < EACH; n++) {
        u32 i = n * THREADS + thread_index();
        if (i <= count) store_shared(shared_base() + at + 4 * i, expert[n] | first[n] << 10);
    }
}
