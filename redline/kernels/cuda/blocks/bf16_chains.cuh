// BF16 records times up to eight tokens at once, for experts_up: the BF16 counterpart of int4_chains.cuh.
//
// Weights need no unpacking and have no scales, so one chain of MMAs accumulates all groups. x is not normalised; the
// factor of the RMS norm is applied to the sums.
#pragma once
#include "chains.cuh"

template <u32 GROUPS>
struct Fragments {
    u32 x[GROUPS][4];
};

constexpr u32 LANE_INPUTS = 8;  // consecutive inputs of a lane

template <u32 TOKENS>
FN void load_group(u32 (&x)[4], u32 at, bool real, u32 i, u32 place) { load_eight<TOKENS>(x, at, real, i, place); }

// acc += UNITS tiles of 16 rows x 32 inputs times the groups of x from `first` on.
template <u32 GROUPS, u32 UNITS>
FN void multiply_tiles(u32 tiles, const Fragments<GROUPS>& f, u32 first, float (&acc)[4]) {
    u32 at = tiles + forget(lane_index()) * 16;
#pragma unroll
    for (u32 i = 0; i < UNITS; i++) {
        u32x4 upper = load_shared_4(at + i * 1024), lower = load_shared_4(at + i * 1024 + 512);
        const u32(&x)[4] = f.x[first + i];
        mma_bf16(acc, upper.x, lower.x, upper.y, lower.y, x[0], x[1]);
        mma_bf16(acc, upper.z, lower.z, upper.w, lower.w, x[2], x[3]);
    }
}
