// NVFP4 records (records.py), for all kernels that multiply them: bit operations that widen codes and block scales.
//
// A word has the four values of a lane for one MMA of 16 inputs, for rows g and g + 8. Half a word holds four e2m1
// codes, placed so that a code's three magnitude bits, shifted below f16's sign and its higher exponent bits, are the
// value times 2^-14; that is exact, also for 0.5. All shifts are left shifts, which need not use the pipe with the
// lowest throughput.
#pragma once
#include "core.cuh"

constexpr float ONE = 16384.f;  // sums are in units of 2^-14
constexpr u32 BLOCK_INPUTS = 64, BLOCK_CODES = 512, BLOCK_SCALES = 64;  // of a record's block: inputs, and bytes

struct Codes4 { u32 v[4]; };  // an a operand of mma.sync or wgmma

FN u32 merge_code(u32 sign, u32 magnitude) { return (sign & 0x80008000u) | (magnitude & 0x0e000e00u); }
FN Codes4 widen(u32 w) {
    constexpr u32 BOTH = 0x8e008e00u;
    return {{w & BOTH, w << 3 & BOTH, merge_code(w << 1, w << 6), merge_code(w << 2, w << 9)}};
}

// The scales of two neighbouring groups of 16, for row g and for row g + 8, from the word that contains them.
struct Scales { u32 upper, lower; };  // pairs of f16

FN Scales widen_scales(u32 w) { return {widen_e4m3((u16)w), widen_e4m3((u16)(w >> 16))}; }

// acc += scale times c, for the two columns of a lane that have these groups.
FN void add_scaled(float (&acc)[4], const float (&c)[4], u32 scales) {
    Scales s = widen_scales(scales);
    f32x2 upper = unpack_f16(s.upper), lower = unpack_f16(s.lower);
    acc[0] += upper.x * c[0], acc[1] += upper.y * c[1];
    acc[2] += lower.x * c[2], acc[3] += lower.y * c[3];
}

// The values of group `group` of two, multiplied by its scales: exact, since the product is a multiple of 2^-24 with
// six bits.
FN Codes4 scaled(Codes4 a, Scales s, u32 group) {
    u32 upper = group ? s.upper >> 16 | (s.upper & 0xffff0000u) : (s.upper & 0xffff) | s.upper << 16;
    u32 lower = group ? s.lower >> 16 | (s.lower & 0xffff0000u) : (s.lower & 0xffff) | s.lower << 16;
    return {{multiply_f16(a.v[0], upper), multiply_f16(a.v[1], lower), multiply_f16(a.v[2], upper), multiply_f16(a.v[3], lower)}};
}

FN void multiply_codes(float (&c)[4], const Codes4& a, u32 x0, u32 x1) { mma_f16(c, a.v[0], a.v[1], a.v[2], a.v[3], x0, x1); }

// The matrices' scales of rows g and g + 8, which are at the end of a record with this number of inputs.
FN f32x2 load_matrix_scales(u32 record, u32 inputs) {
    u32x2 v = load_shared_2(record + 9 * inputs);
    return {as_float(v.x), as_float(v.y)};
}
