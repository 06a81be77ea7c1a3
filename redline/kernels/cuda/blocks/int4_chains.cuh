// INT4 records (records.py) times up to eight tokens at once: for experts_up, which keeps x in registers for many
// records.
//
// A lane holds its part of x as f16 fragments: lane 4g + t has inputs 8t to 8t + 7 of each group of 32, for token g %
// TOKENS. A chain of MMAs accumulates 8 / TOKENS groups: each group's x has its own columns and is zero in the others,
// so one set of accumulators holds the sums of as many groups as a token has columns, and a scale is applied once for
// all MMAs of the chain. `fold` adds the columns.
//
// Codes become f16 by bit operations alone: 1024 + u, or 1024 + 16 u for the higher nibble, for whose inputs x is
// divided by 16 (elements 2, 3, 6, 7 of each lane's eight). Since u = q + 8, each group's sum is too large by 1032
// times the sum of one half of x and 1152 times the sum of the other. `correct` computes this excess once for each x,
// negated, as three bf16 parts, which are multiplied by the scales; the record stores the scales as MMA fragments.
#pragma once
#include "chains.cuh"

template <u32 GROUPS>
struct Fragments {
    u32 x[GROUPS][4];
    u32 correction[6];
};

FN u32 code_low(u32 w) { return and_or<0x000f000f, 0x64006400>(w); }
FN u32 code_high(u32 w) { return and_or<0x00f000f0, 0x64006400>(w); }

// One group of 32 inputs: `upper` has the codes of row g, `lower` those of row g + 8.
FN void multiply_codes(float (&c)[4], u32 upper, u32 lower, const u32 (&x)[4]) {
    mma_f16(c, code_low(upper), code_low(lower), code_high(upper), code_high(lower), x[0], x[1]);
    upper >>= 8, lower >>= 8;
    mma_f16(c, code_low(upper), code_low(lower), code_high(upper), code_high(lower), x[2], x[3]);
}

// -(1032 sum of x's low half + 1152 sum of its high half) of one group, for two groups of a lane, in three bf16 parts.
FN void split_correction(u32 (&correction)[6], u32 half, float first, float second) {
#pragma unroll
    for (u32 part = 0; part < 3; part++) {
        u32 both = pack_bf16(first, second);
        correction[2 * part + half] = both;
        first -= bf16_lo(both), second -= bf16_hi(both);
    }
}

// For fragments of any number of tokens. One MMA of constants and x computes the sums of all groups, one row per group;
// the fragments of the correction need the transpose.
template <u32 GROUPS>
FN void correct(Fragments<GROUPS>& f) {
    u32 lane = forget(lane_index()), g = lane >> 2, t = lane & 3;
    float sums[4] = {};
#pragma unroll
    for (u32 i = 0; i < GROUPS; i++) {
        u32 low = g == i % 8 ? 0x64086408u : 0, high = g == i % 8 ? 0x64806480u : 0;  // 1032 and 1152
#pragma unroll
        for (u32 j = 0; j < 4; j += 2)
            mma_f16(sums, i < 8 ? low : 0, i < 8 ? 0 : low, i < 8 ? high : 0, i < 8 ? 0 : high, f.x[i][j], f.x[i][j + 1]);
    }
#pragma unroll
    for (u32 half = 0; half < 2; half++) {
        float of_group[2];
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
            u32 from = 4 * (2 * t + i) + g / 2;
            u32 even = shuffle(as_u32(sums[2 * half]), from), odd = shuffle(as_u32(sums[2 * half + 1]), from);
            of_group[i] = as_float(g % 2 ? odd : even);
        }
        split_correction(f.correction, half, -of_group[0], -of_group[1]);
    }
}

constexpr u32 LANE_INPUTS = 8;  // consecutive inputs of a lane

template <u32 TOKENS>
FN void load_group(u32 (&x)[4], u32 at, bool real, u32 i, u32 place) { load_eight<TOKENS>(x, at, real, i, place); }

// Applies the RMS norm and converts x from bf16 to the f16 that the codes are multiplied with.
template <u32 GROUPS>
FN void norm(Fragments<GROUPS>& f, float rstd) {
#pragma unroll
    for (u32 i = 0; i < GROUPS; i++)
#pragma unroll
        for (u32 j = 0; j < 4; j++) {
            float r = j % 2 ? rstd * 0.0625f : rstd;
            f.x[i][j] = pack_f16(bf16_lo(f.x[i][j]) * r, bf16_hi(f.x[i][j]) * r);
        }
    correct(f);
}

// The correction of one token whose x is in shared memory: `group` is the address of this lane's part of group g.
template <u32 GROUPS>
FN void correct_one(Fragments<GROUPS>& f, u32 group) {
    u32 lane = forget(lane_index()), g = lane >> 2, t = lane & 3;
#pragma unroll
    for (u32 half = 0; half < 2; half++) {
        float sum = 0;
        if (8 * half + g < GROUPS) {
            u32x4 v = load_shared_4(group + 8 * half * 64);
            f32x2 l0 = unpack_f16(v.x), h0 = unpack_f16(v.y), l1 = unpack_f16(v.z), h1 = unpack_f16(v.w);
            sum = 1032.f * (l0.x + l0.y + l1.x + l1.y) + 1152.f * (h0.x + h0.y + h1.x + h1.y);
        }
        sum += shuffle_xor(sum, 1);
        sum += shuffle_xor(sum, 2);  // of group 8 half + g, which column g has
        bool mine = g / 2 == t;
        split_correction(f.correction, half, mine && g % 2 == 0 ? -sum : 0.f, mine && g % 2 ? -sum : 0.f);
    }
}

// acc += record times x. For the columns of acc see `fold`.
template <u32 GROUPS, u32 TOKENS>
FN void multiply_record(u32 record, const Fragments<GROUPS>& f, float (&acc)[4]) {
    static_assert(TOKENS == 1 || TOKENS == 4 || TOKENS == 8, "one, four or eight tokens");
    constexpr u32 BLOCKS = GROUPS / 2;
    u32 lane = forget(lane_index()), g = lane >> 2, t = lane & 3;
    u32 codes = record + lane * 16, scales = record + BLOCKS * 512 + g * 8;
    u32x2 s0 = {0, 0}, s1 = {0, 0};  // groups 2t, 2t + 1 and 2t + 8, 2t + 9: x is row g, y is row g + 8
    if (t < BLOCKS) s0 = load_shared_2(scales + t * 64);
    if (t + 4 < BLOCKS) s1 = load_shared_2(scales + (t + 4) * 64);
#pragma unroll
    for (u32 part = 0; part < 3; part++)
        mma_bf16(acc, s0.x, s0.y, s1.x, s1.y, f.correction[2 * part], f.correction[2 * part + 1]);

    if constexpr (TOKENS == 1) {
        float c[2][4] = {};  // two independent chains of MMAs
#pragma unroll
        for (u32 n = 0; n < 8; n++) {
            const u32 j = n / 2 + n % 2 * 4;
            if (j >= BLOCKS) continue;
            u32x4 w = load_shared_4(codes + j * 512);
            multiply_codes(c[j / 4], w.x, w.y, f.x[2 * j]);
            multiply_codes(c[j / 4], w.z, w.w, f.x[2 * j + 1]);
        }
        acc[0] += bf16_lo(s0.x) * c[0][0], acc[1] += bf16_hi(s0.x) * c[0][1];
        acc[2] += bf16_lo(s0.y) * c[0][2], acc[3] += bf16_hi(s0.y) * c[0][3];
        acc[0] += bf16_lo(s1.x) * c[1][0], acc[1] += bf16_hi(s1.x) * c[1][1];
        acc[2] += bf16_lo(s1.y) * c[1][2], acc[3] += bf16_hi(s1.y) * c[1][3];
    } else {
#pragma unroll
        for (u32 j = 0; j < BLOCKS; j++) {
            u32x4 w = load_shared_4(codes + j * 512);
            u32x2 s = load_shared_2(scales + j * 64);
            if constexpr (TOKENS == 4) {
                float c[4] = {};
                multiply_codes(c, w.x, w.y, f.x[2 * j]);
                multiply_codes(c, w.z, w.w, f.x[2 * j + 1]);
                u32 shift = t < 2 ? 16 : 0;  // columns 0 to 3 are the first group's, 4 to 7 the second's
                float upper = as_float(s.x << shift & 0xffff0000u), lower = as_float(s.y << shift & 0xffff0000u);
                acc[0] += upper * c[0], acc[1] += upper * c[1], acc[2] += lower * c[2], acc[3] += lower * c[3];
            } else {
                float c[4] = {}, d[4] = {};
                multiply_codes(c, w.x, w.y, f.x[2 * j]);
                multiply_codes(d, w.z, w.w, f.x[2 * j + 1]);
                acc[0] += bf16_lo(s.x) * c[0], acc[1] += bf16_lo(s.x) * c[1];
                acc[2] += bf16_lo(s.y) * c[2], acc[3] += bf16_lo(s.y) * c[3];
                acc[0] += bf16_hi(s.x) * d[0], acc[1] += bf16_hi(s.x) * d[1];
                acc[2] += bf16_hi(s.y) * d[2], acc[3] += bf16_hi(s.y) * d[3];
            }
        }
    }
}
