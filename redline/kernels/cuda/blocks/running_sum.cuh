// Prefix sums over the threads of a thread block.
#pragma once
#include "core.cuh"

// The sum of v over this thread and those before it; `total` gets the sum over all. totals: a word of shared memory per
// warp.
FN u32 running_sum(u32 v, u32 totals, u32& total) {
    u32 lane = lane_index(), warp = warp_index();
#pragma unroll
    for (u32 step = 1; step < 32; step *= 2) {
        u32 before = shuffle(v, (lane - step) & 31);
        if (lane >= step) v += before;
    }
    if (lane == 31) store_shared(totals + 4 * warp, v);
    sync_block();
    total = 0;
#pragma unroll
    for (u32 w = 0; w < THREADS / 32; w++) {
        u32 part = load_shared(totals + 4 * w);
        total += part;
        if (w < warp) v += part;
    }
    return v;
}
