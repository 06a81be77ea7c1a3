// A ring buffer of stages in shared memory, through which a group of four warps gets its weights.
//
// One or more bulk copies fill a stage; every warp reads its part of it, and the last of the four warps to release a
// stage starts the copies that refill it, so no warp waits to refill. A stage is identified by its address; its
// mbarrier and the count of warps that have released it are stored after its bytes.
#pragma once
#include "core.cuh"

template <u32 DEPTH, u32 BYTES>
struct Ring {
    static constexpr u32 STRIDE = BYTES + 16, MEMORY = 4 * DEPTH * STRIDE;  // for the four groups of a thread block

    u32 stage, last, parity = 0;

    __device__ __forceinline__ Ring(u32 memory, u32 group)
        : stage(memory + group * DEPTH * STRIDE), last(stage + (DEPTH - 1) * STRIDE) {}

    // Called by one thread of the group, which may start copies at once; other threads only after a block-wide barrier.
    __device__ __forceinline__ void make() {
        for (u32 at = stage; at <= last; at += STRIDE) barrier_init(barrier(at)), store_shared(barrier(at) + 8, 0);
        barrier_init_done();
    }
    static __device__ __forceinline__ u32 barrier(u32 at) { return at + BYTES; }
    // The current stage, once its copies have completed.
    __device__ __forceinline__ u32 wait() const {
        barrier_wait(barrier(stage), parity);
        return stage;
    }
    // Called by lane 0 of a warp that has read its part: whether the other three warps had released the stage before.
    static __device__ __forceinline__ bool is_last(u32 at) { return (add_shared(barrier(at) + 8, 1) & 3) == 3; }
    __device__ __forceinline__ void next() {
        if (stage == last)
            stage -= (DEPTH - 1) * STRIDE, parity ^= 1;
        else
            stage += STRIDE;
    }
};

// Functions that fill a ring in the order of its work. A group has `ring`, `fetch` (the next stage's work item) below
// `end`, `fill(stage)`, and `filled()`, which advances `fetch`.

// Fills all stages, before the first one is read.
template <class Group>
FN void fill_stages(Group& group) {
    for (u32 stage = group.ring.stage; stage <= group.ring.last && group.fetch < group.end; stage += group.ring.STRIDE) {
        if (thread_index() % 128 == 0) group.fill(stage);
        group.filled();
    }
}
// Called when the warp has read its part of the current stage.
template <class Group>
FN void release_stage(Group& group) {
    sync_warp();
    if (group.fetch < group.end) {
        if (lane_index() == 0 && group.ring.is_last(group.ring.stage)) group.fill(group.ring.stage);
        group.filled();
    }
    group.ring.next();
}
