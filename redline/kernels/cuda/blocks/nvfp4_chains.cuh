// NVFP4 records times up to eight tokens at once, for experts_up: the NVFP4 counterpart of int4_chains.cuh.
//
// A lane holds its part of x as f16: lane 4g + t has inputs 4t to 4t + 3 of each 16. For one token, eight groups of 16
// share a chain of MMAs, each group's x in its own column, and the block scales multiply the sums. For several tokens
// the scales multiply the codes, which is exact, and all groups share one chain; with four tokens two columns hold a
// token's halves.
#pragma once
#include "chains.cuh"
#include "nvfp4.cuh"

template <u32 GROUPS>
struct Fragments {
    u32 x[GROUPS][4];
};

constexpr u32 LANE_INPUTS = 4;  // consecutive inputs of a lane

// This lane's part of group i of 32 inputs, if it exists (`real`) and the lane's column among the token's columns
// (`place`) is the group's.
template <u32 TOKENS>
FN void load_group(u32 (&x)[4], u32 at, bool real, u32 i, u32 place) {
#pragma unroll
    for (u32 half = 0; half < 2; half++)
        if (real && (TOKENS == 1 ? (2 * i + half) % 8 : i % (8 / TOKENS)) == place) {
            u32x2 v = load_shared_2(at + 32 * half);
            x[2 * half] = v.x, x[2 * half + 1] = v.y;
        }
}

template <u32 GROUPS>
FN void norm(Fragments<GROUPS>& f, float rstd) {
#pragma unroll
    for (u32 i = 0; i < GROUPS; i++)
#pragma unroll
        for (u32 j = 0; j < 4; j++) f.x[i][j] = pack_f16(bf16_lo(f.x[i][j]) * rstd, bf16_hi(f.x[i][j]) * rstd);
}

// acc = record times x. For the columns of acc see `fold`.
template <u32 GROUPS, u32 TOKENS>
FN void multiply_record(u32 record, const Fragments<GROUPS>& f, float (&acc)[4]) {
    constexpr u32 BLOCKS = GROUPS / 2;
    u32 lane = forget(lane_index()), g = lane >> 2, t = lane & 3;
    u32 codes = record + lane * 16, scales = record + BLOCKS * BLOCK_CODES + g * 8;
    float c[4] = {};
#pragma unroll
    for (u32 j = 0; j < BLOCKS; j++) {
        u32x4 v = load_shared_4(codes + j * BLOCK_CODES);
        u32 w[4] = {v.x, v.y, v.z, v.w};
        if constexpr (TOKENS == 1) {
#pragma unroll
            for (u32 q = 0; q < 4; q++)
                multiply_codes(c, widen(w[q]), f.x[2 * j + q / 2][q % 2 * 2], f.x[2 * j + q / 2][q % 2 * 2 + 1]);
            if (j % 2 || j + 1 == BLOCKS) {  // this lane's columns have groups 2t and 2t + 1 of the chain's eight
                u32 mine = j / 2 * 2 + t / 2;
                add_scaled(acc, c, mine < BLOCKS ? load_shared(scales + mine * BLOCK_SCALES + t % 2 * 4) : 0);
#pragma unroll
                for (u32 i = 0; i < 4; i++) c[i] = 0;
            }
        } else {
            u32x2 s = load_shared_2(scales + j * BLOCK_SCALES);
            Scales pairs[2] = {widen_scales(s.x), widen_scales(s.y)};
#pragma unroll
            for (u32 q = 0; q < 4; q++)
                multiply_codes(acc, scaled(widen(w[q]), pairs[q / 2], q % 2), f.x[2 * j + q / 2][q % 2 * 2],
                               f.x[2 * j + q / 2][q % 2 * 2 + 1]);
        }
    }
    f32x2 whole = load_matrix_scales(record, 32 * GROUPS);
    float upper = whole.x * ONE, lower = whole.y * ONE;
    acc[0] *= upper, acc[1] *= upper, acc[2] *= lower, acc[3] *= lower;
}
