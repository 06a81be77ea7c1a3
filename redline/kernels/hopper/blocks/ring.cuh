// The ring of stages through which a group of four warps gets its weights.
//
// Each holds what one or more bulk copies bring together; every warp reads its part, and the last of the four to let go of
// a stage fills it again. Nobody waits to fill. A stage is named by its address; its barrier and the count of warps that
// have let go of it lie behind it.
#pragma once
#include "core.cuh"

template <u32 DEPTH, u32 BYTES>
struct Ring {
    static constexpr u32 STRIDE = BYTES + 16, MEMORY = 4 * DEPTH * STRIDE;  // of a block's four groups

    u32 stage, last, parity = 0;

    __device__ __forceinline__ Ring(u32 memory, u32 group)
        : stage(memory + group * DEPTH * STRIDE), last(stage + (DEPTH - 1) * STRIDE) {}

    // By one thread of the group, which may fill stages at once; the others only after a block barrier.
    __device__ __forceinline__ void make() {
        for (u32 at = stage; at <= last; at += STRIDE) barrier_init(barrier(at)), store_shared(barrier(at) + 8, 0);
        barrier_init_done();
    }
    static __device__ __forceinline__ u32 barrier(u32 at) { return at + BYTES; }
    // The current stage, once it is full.
    __device__ __forceinline__ u32 wait() const {
        barrier_wait(barrier(stage), parity);
        return stage;
    }
    // By lane 0 of a warp that has read its part: whether the other three had before.
    static __device__ __forceinline__ bool is_last(u32 at) { return (add_shared(barrier(at) + 8, 1) & 3) == 3; }
    __device__ __forceinline__ void next() {
        if (stage == last)
            stage -= (DEPTH - 1) * STRIDE, parity ^= 1;
        else
            stage += STRIDE;
    }
};

// Filling a ring in the order of its work, of a group that has `ring`, `fetch` (what the next stage is for) below `end`,
// `fill(stage)`, and `filled()`, which goes on to what follows.

// All stages, before the first is read.
template <class Group>
FN void fill_stages(Group& group) {
    for (u32 stage = group.ring.stage; stage <= group.ring.last && group.fetch < group.end; stage += group.ring.STRIDE) {
        if (thread_index() % 128 == 0) group.fill(stage);
        group.filled();
    }
}
// The warp has read its part of the current stage.
template <class Group>
FN void release_stage(Group& group) {
    sync_warp();
    if (group.fetch < group.end) {
        if (lane_index() == 0 && group.ring.is_last(group.ring.stage)) group.fill(group.ring.stage);
        group.filled();
    }
    group.ring.next();
}
