// Shared by the chains of all formats: the placement of a token's x in the eight columns of an MMA.
//
// Each token has 8 / TOKENS columns; group i of its x is in column i % (8 / TOKENS) of these, and the others are zero.
#pragma once
#include "core.cuh"

// This lane's eight inputs of group i of 32, if they exist (`real`) and the lane's column among the token's columns
// (`place`) is the group's.
template <u32 TOKENS>
FN void load_eight(u32 (&x)[4], u32 at, bool real, u32 i, u32 place) {
    if (real && i % (8 / TOKENS) == place) {
        u32x4 v = load_shared_4(at);
        x[0] = v.x, x[1] = v.y, x[2] = v.z, x[3] = v.w;
    }
}

// Adds the columns of a token. Afterwards, as after an MMA of eight tokens: c0, c1 are row g and c2, c3 row g + 8 of
// tokens 2t and 2t + 1, if those are below TOKENS; for one token, c0 and c2 in every lane.
template <u32 TOKENS>
FN void fold(float (&c)[4]) {
    if constexpr (TOKENS == 1) {
        c[0] += c[1], c[2] += c[3];
        c[0] += shuffle_xor(c[0], 1), c[2] += shuffle_xor(c[2], 1);
        c[0] += shuffle_xor(c[0], 2), c[2] += shuffle_xor(c[2], 2);
    } else if constexpr (TOKENS == 4) {
#pragma unroll
        for (u32 i = 0; i < 4; i++) c[i] += shuffle_xor(c[i], 2);
    }
}
