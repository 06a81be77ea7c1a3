// Sixteen floats at a time, in GCC's vector extension: one source for AVX-512, AVX2 and anything else.
//
// Nothing here depends on how many rows, chunks or threads there are: a reduction has one order, written down.
#pragma once
#include <cstdint>
#include <cstring>
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

typedef float f32x16 __attribute__((vector_size(64)));
typedef float f32x8 __attribute__((vector_size(32)));
typedef float f32x4 __attribute__((vector_size(16)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));

struct Pair {
    f32x16 a, b;
};

template <class V> inline V load(const void* p) {
    V v;
    memcpy(&v, p, sizeof v);
    return v;
}

template <class V> inline void store(void* p, V v) { memcpy(p, &v, sizeof v); }

inline f32x16 splat(float x) { return x - f32x16{}; }

inline f32x16 vmax(f32x16 a, f32x16 b) { return a > b ? a : b; }

// ((l + l+8) + ...+4) + ...: a fixed tree.
inline float sum(f32x16 v) {
    f32x8 a = __builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7) + __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15);
    f32x4 b = __builtin_shufflevector(a, a, 0, 1, 2, 3) + __builtin_shufflevector(a, a, 4, 5, 6, 7);
    return (b[0] + b[2]) + (b[1] + b[3]);
}

// The sums of four, each as `sum` has it.
inline f32x4 sum4(f32x16 v, f32x16 w, f32x16 x, f32x16 y) {
    auto half = [](f32x16 p, f32x16 q) {  // 8 numbers of each
        return __builtin_shufflevector(p, q, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
               __builtin_shufflevector(p, q, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    };
    f32x16 a = half(v, w), b = half(x, y);
    f32x16 c = __builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
               __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
    f32x8 low = __builtin_shufflevector(c, c, 0, 1, 4, 5, 8, 9, 12, 13), high = __builtin_shufflevector(c, c, 2, 3, 6, 7, 10, 11, 14, 15);
    f32x8 d = low + high;  // (b[0] + b[2], b[1] + b[3]) of each
    return __builtin_shufflevector(d, d, 0, 2, 4, 6) + __builtin_shufflevector(d, d, 1, 3, 5, 7);
}

inline float largest(f32x16 v) {
    f32x8 a = __builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7), b = __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15);
    a = a > b ? a : b;
    f32x4 c = __builtin_shufflevector(a, a, 0, 1, 2, 3), d = __builtin_shufflevector(a, a, 4, 5, 6, 7);
    c = c > d ? c : d;
    float x = c[0] > c[2] ? c[0] : c[2], y = c[1] > c[3] ? c[1] : c[3];
    return x > y ? x : y;
}

// e^x, within 2 units in the last place; exactly 0 below -87, so that a masked score adds nothing.
// Cody-Waite reduction and the degree-5 polynomial of Cephes' expf.
inline f32x16 vexp(f32x16 x) {
    i32x16 alive = x > splat(-87.0f);
    x = alive ? x : splat(-87.0f);
    x = x < splat(88.0f) ? x : splat(88.0f);
    const f32x16 magic = splat(12582912.0f);
    f32x16 n = (x * 1.44269504088896341f + magic) - magic;
    f32x16 f = x - n * 0.693359375f;
    f = f + n * 2.12194440e-4f;
    f32x16 p = splat(1.9875691500e-4f);
    p = p * f + 1.3981999507e-3f;
    p = p * f + 8.3334519073e-3f;
    p = p * f + 4.1665795894e-2f;
    p = p * f + 1.6666665459e-1f;
    p = p * f + 5.0000001201e-1f;
    p = p * (f * f) + f + 1.0f;
    i32x16 e = (__builtin_convertvector(n, i32x16) + 127) << 23;
    f32x16 y = p * (f32x16)e;
    return alive ? y : f32x16{};
}

inline f32x16 silu(f32x16 x) { return x / (1.0f + vexp(-x)); }

struct bf16 {
    uint16_t bits;
};

inline float to_float(bf16 x) {
    uint32_t u = (uint32_t)x.bits << 16;
    float f;
    memcpy(&f, &u, 4);
    return f;
}

inline float to_float(float x) { return x; }

inline void from_float(float x, float& y) { y = x; }

// Round to nearest even, as torch does.
inline void from_float(float x, bf16& y) {
    uint32_t u;
    memcpy(&u, &x, 4);
    y.bits = (x != x) ? 0x7fc0 : (uint16_t)((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}

inline bf16 to_bf16(float x) {
    bf16 y;
    from_float(x, y);
    return y;
}

// 32 values, the first 16 and the last 16.
inline Pair widen32(const bf16* p) {
    typedef uint16_t u16x16 __attribute__((vector_size(32)));
    auto half = [](const bf16* from) {
        return (f32x16)(__builtin_convertvector(load<u16x16>(from), u32x16) << 16);
    };
    return {half(p), half(p + 16)};
}

// 32 stored values as two vectors. bf16 comes apart as (even, odd) elements, which costs a shift and a mask;
// float32 as (first 16, last 16). place(i) says where element i of 32 ends up: vector place / 16, lane place % 16.
inline Pair load32(const bf16* p) {
    u32x16 v = load<u32x16>(p);
    return {(f32x16)(v << 16), (f32x16)(v & 0xffff0000u)};
}

inline Pair load32(const float* p) { return {load<f32x16>(p), load<f32x16>(p + 16)}; }

inline int place(const bf16*, int i) { return (i & 1) * 16 + (i >> 1); }

inline int place(const float*, int i) { return i; }
