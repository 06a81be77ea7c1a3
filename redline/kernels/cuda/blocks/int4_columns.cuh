// INT4 records (records.py) times one token after another, with independent sums for all groups: for experts_down,
// whose x changes with every record.
//
// Codes become f16 by bit operations alone: u, which is q + 8, is the subnormal number u 2^-24, or 16 u 2^-24 for the
// higher nibble, for whose inputs x is divided by 16 (elements 2, 3, 6, 7 of each lane's eight). So sums are in units
// of 2^-24 (ONE is their reciprocal), and the sum of each group of 32 inputs is too large by 8 times the sum of x.
//
// Columns, for a few tokens: column g of an MMA's b operand is x of group g of one token, so lane 4g + t holds only its
// own eight inputs of two groups. An MMA with group i's codes is then right in column i and meaningless in the others;
// lanes with t = i / 2 keep it. All groups are independent of each other, and a token's sums do not depend on other
// tokens.
#pragma once
#include "columns.cuh"

constexpr float ONE = 16777216.f;

// ---- a lane's loads from a record of GROUPS / 2 blocks

template <u32 GROUPS>
FN void load_scales(u32x2 (&scales)[2], u32 record) {
    u32 lane = forget(lane_index()), g = lane >> 2, t = lane & 3, at = record + GROUPS / 2 * 512 + g * 8;
    scales[0] = scales[1] = {0, 0};
    if (t < GROUPS / 2) scales[0] = load_shared_2(at + t * 64);
    if (t + 4 < GROUPS / 2) scales[1] = load_shared_2(at + (t + 4) * 64);
}

// Codes of groups 8 half to 8 half + 7: of two groups, rows g and g + 8 each.
template <u32 GROUPS>
FN void load_codes(u32x4 (&w)[4], u32 record, u32 half) {
    u32 at = record + forget(lane_index()) * 16 + half * 2048;
#pragma unroll
    for (u32 i = 0; i < 4; i++)
        if (4 * half + i < GROUPS / 2) w[i] = load_shared_4(at + i * 512);
}

// One group of 32 inputs as the a operands of two MMAs.
struct Codes { u32 first[4], second[4]; };

FN Codes unpack_codes(u32 upper, u32 lower) {
    constexpr u32 LOW = 0x000f000f, HIGH = 0x00f000f0;
    u32 a = upper >> 8, b = lower >> 8;
    return {{upper & LOW, lower & LOW, upper & HIGH, lower & HIGH}, {a & LOW, b & LOW, a & HIGH, b & HIGH}};
}
FN void multiply_codes(float (&c)[4], const Codes& a, const u32 (&x)[4]) {
    mma_f16(c, a.first[0], a.first[1], a.first[2], a.first[3], x[0], x[1]);
    mma_f16(c, a.second[0], a.second[1], a.second[2], a.second[3], x[2], x[3]);
}

// ---- columns

struct Columns {
    u32 x[2][4];        // this lane's inputs of groups g and 8 + g
    float start[2][2];  // -8 times the sum of groups 2t and 2t + 1, and of 8 + 2t and 9 + 2t
};

FN void make_start(Columns& c) {
    constexpr u32 LOW = 0x80088008, HIGH = 0x80808080;  // pairs of -8 and -128
#pragma unroll
    for (u32 half = 0; half < 2; half++) {
        float sums[4] = {};  // the same in each row
        mma_f16(sums, LOW, LOW, HIGH, HIGH, c.x[half][0], c.x[half][1]);
        mma_f16(sums, LOW, LOW, HIGH, HIGH, c.x[half][2], c.x[half][3]);
        c.start[half][0] = sums[0], c.start[half][1] = sums[1];
    }
}

template <u32 GROUPS>
FN void load_columns(Columns& c, u32 x) {
    u32 lane = forget(lane_index()), g = lane >> 2, t = lane & 3;
#pragma unroll
    for (u32 half = 0; half < 2; half++) {
        u32x4 v = {0, 0, 0, 0};
        if (8 * half + 8 <= GROUPS || 8 * half + g < GROUPS) v = load_shared_4(x + 64 * (8 * half + g) + 16 * t);
        c.x[half][0] = v.x, c.x[half][1] = v.y, c.x[half][2] = v.z, c.x[half][3] = v.w;
    }
    make_start(c);
}

FN void exchange(Columns& a, Columns& b) {
    Columns c = a;
    a = b, b = c;
}

// Adds rows g and g + 8 of half a record times x. The result is this lane's part: the sum over lanes 4g to 4g + 3 is
// complete.
template <u32 GROUPS>
FN void multiply_half(const u32x4 (&w)[4], u32x2 scales, const Columns& c, u32 half, float& upper, float& lower) {
    u32 t = forget(lane_index()) & 3;
    float y[4] = {c.start[half][0], c.start[half][1], c.start[half][0], c.start[half][1]};
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
        if (4 * half + i >= GROUPS / 2) continue;
        float p[4] = {}, q[4] = {}, keep = t == i ? 1.f : 0.f;
        multiply_codes(p, unpack_codes(w[i].x, w[i].y), c.x[half]);
        multiply_codes(q, unpack_codes(w[i].z, w[i].w), c.x[half]);
        y[0] += keep * p[0], y[1] += keep * q[1];
        y[2] += keep * p[2], y[3] += keep * q[3];
    }
    upper += bf16_lo(scales.x) * y[0], upper += bf16_hi(scales.x) * y[1];
    lower += bf16_lo(scales.y) * y[2], lower += bf16_hi(scales.y) * y[3];
}

// Rows g and g + 8 of the record times x, this lane's part. `release` is called after the last load from the record,
// which is between the halves: loading all of the record first took 2 % longer in experts_down on an NVIDIA H200.
template <u32 GROUPS, class Release>
FN void multiply_columns(u32 record, const Columns& c, float& upper, float& lower, Release release) {
    u32x4 w[2][4];
    u32x2 scales[2];
    load_codes<GROUPS>(w[0], record, 0);
    load_scales<GROUPS>(scales, record);
    upper = lower = 0;
    multiply_half<GROUPS>(w[0], scales[0], c, 0, upper, lower);
    load_codes<GROUPS>(w[1], record, 1), release();
    multiply_half<GROUPS>(w[1], scales[1], c, 1, upper, lower);
}
