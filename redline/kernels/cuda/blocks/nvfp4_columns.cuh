// NVFP4 records (records.py) times one token after another, for experts_down: the NVFP4 counterpart of
// int4_columns.cuh.
//
// Column g of an MMA's b operand is x of group g of eight groups of 16, of one token. An MMA with the codes of group i
// is right in column i and meaningless in the others; lanes with t = i / 2 keep it, and the block scales multiply each
// group's sums.
#pragma once
#include "columns.cuh"
#include "nvfp4.cuh"

struct Columns {
    u32 x[4][2];  // this lane's inputs of groups 8i + g
};

template <u32 GROUPS>
FN void load_columns(Columns& c, u32 x) {
    u32 lane = forget(lane_index()), g = lane >> 2, t = lane & 3;
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
        u32x2 v = {0, 0};
        if (8 * i + 8 <= 2 * GROUPS || 8 * i + g < 2 * GROUPS) v = load_shared_2(x + 32 * (8 * i + g) + 8 * t);
        c.x[i][0] = v.x, c.x[i][1] = v.y;
    }
}

// Rows g and g + 8 of the record times x, this lane's part. `release` is called after the last load of the record's
// codes.
template <u32 GROUPS, class Release>
FN void multiply_columns(u32 record, const Columns& c, float& upper, float& lower, Release release) {
    constexpr u32 BLOCKS = GROUPS / 2;
    u32 lane = forget(lane_index()), g = lane >> 2, t = lane & 3;
    u32 codes = record + lane * 16, scales = record + BLOCKS * BLOCK_CODES + g * 8 + t % 2 * 4;
    f32x2 whole = load_matrix_scales(record, 32 * GROUPS);
    float sums[4] = {};
#pragma unroll
    for (u32 i = 0; i < (BLOCKS + 1) / 2; i++) {  // eight groups of 16
        float y[4] = {};
        u32x4 v[2];
        v[0] = load_shared_4(codes + 2 * i * BLOCK_CODES);
        if (2 * i + 1 < BLOCKS) v[1] = load_shared_4(codes + (2 * i + 1) * BLOCK_CODES);
        u32 mine = 2 * i + t / 2, scale = mine < BLOCKS ? load_shared(scales + mine * BLOCK_SCALES) : 0;
        if (2 * i + 2 >= BLOCKS) release();
#pragma unroll
        for (u32 block = 0; block < 2; block++) {
            if (2 * i + block >= BLOCKS) continue;
            u32 w[4] = {v[block].x, v[block].y, v[block].z, v[block].w};
#pragma unroll
            for (u32 q = 0; q < 4; q++) {
                float p[4] = {}, keep = t == 2 * block + q / 2 ? 1.f : 0.f;
                multiply_codes(p, widen(w[q]), c.x[i][0], c.x[i][1]);
                y[q % 2] += keep * p[q % 2], y[2 + q % 2] += keep * p[2 + q % 2];
            }
        }
        add_scaled(sums, y, scale);
    }
    upper = (sums[0] + sums[1]) * whole.x, lower = (sums[2] + sums[3]) * whole.y;
}
