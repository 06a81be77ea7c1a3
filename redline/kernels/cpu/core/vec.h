// Vectors of sixteen floats, in GCC's vector extension: one source for AVX-512, AVX2 and other instruction sets.
//
// No result depends on the number of rows, chunks or threads: each reduction has one fixed order.
#pragma once
#include <cstdint>
#include <cstring>
#if defined(__AVX2__)
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

// As many floats as one register holds. A compiler keeps wider vectors in memory if a loop accumulates into many of
// them.
#if defined(__AVX512F__)
typedef f32x16 lanes;
constexpr int SUMS = 24;  // registers for sums; the others hold operands
#elif defined(__AVX__)
typedef f32x8 lanes;
constexpr int SUMS = 8;
#else
typedef f32x4 lanes;
constexpr int SUMS = 8;
#endif
constexpr int LANES = sizeof(lanes) / sizeof(float), REGISTERS = 16 / LANES;  // that hold 16 floats

struct Sixteen {
    lanes r[REGISTERS];
};

template <class V> inline V load(const void* p) {
    V v;
    memcpy(&v, p, sizeof v);
    return v;
}

template <class V> inline void store(void* p, V v) { memcpy(p, &v, sizeof v); }

template <class V = f32x16> inline V splat(float x) { return x - V{}; }

template <class V> inline V vmax(V a, V b) { return a > b ? a : b; }

// A fixed tree: lanes l and l + 8, then + 4, then + 2, then + 1.
inline float sum(f32x4 v) { return (v[0] + v[2]) + (v[1] + v[3]); }

inline float sum(f32x8 v) { return sum(__builtin_shufflevector(v, v, 0, 1, 2, 3) + __builtin_shufflevector(v, v, 4, 5, 6, 7)); }

inline float sum(f32x16 v) {
    return sum(__builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7) + __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15));
}

inline float sum(const Sixteen& v) {
    if constexpr (REGISTERS == 1) return sum(v.r[0]);
    else if constexpr (REGISTERS == 2) return sum(v.r[0] + v.r[1]);
    else return sum((v.r[0] + v.r[2]) + (v.r[1] + v.r[3]));
}

// The sums of four vectors, each in the order of `sum`.
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

inline float largest(f32x4 v) {
    float x = v[0] > v[2] ? v[0] : v[2], y = v[1] > v[3] ? v[1] : v[3];
    return x > y ? x : y;
}

inline float largest(f32x8 v) {
    return largest(vmax(__builtin_shufflevector(v, v, 0, 1, 2, 3), __builtin_shufflevector(v, v, 4, 5, 6, 7)));
}

inline float largest(f32x16 v) {
    return largest(vmax(__builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7), __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15)));
}

// e^x, with an error of at most 2 units in the last place; exactly 0 below -87, so that a masked score adds nothing.
// Cody-Waite reduction and the degree-5 polynomial of Cephes' expf.
template <class V> inline V vexp(V x) {
    typedef int32_t I __attribute__((vector_size(sizeof(V))));
    I alive = x > splat<V>(-87.0f);
    x = alive ? x : splat<V>(-87.0f);
    x = x < splat<V>(88.0f) ? x : splat<V>(88.0f);
    const V magic = splat<V>(12582912.0f);
    V n = (x * 1.44269504088896341f + magic) - magic;
    V f = x - n * 0.693359375f;
    f = f + n * 2.12194440e-4f;
    V p = splat<V>(1.9875691500e-4f);
    p = p * f + 1.3981999507e-3f;
    p = p * f + 8.3334519073e-3f;
    p = p * f + 4.1665795894e-2f;
    p = p * f + 1.6666665459e-1f;
    p = p * f + 5.0000001201e-1f;
    p = p * (f * f) + f + 1.0f;
    I e = (__builtin_convertvector(n, I) + 127) << 23;
    V y = p * (V)e;
    return alive ? y : V{};
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

// Four exponent bits, three mantissa bits, no infinity; all ones are NaN.
struct e4m3 {
    uint8_t bits;
};

// Round to nearest even, as torch does; saturating.
inline void from_float(float x, e4m3& y) {
    uint32_t u;
    memcpy(&u, &x, 4);
    const uint32_t sign = u >> 24 & 0x80, size = u & 0x7fffffff, most = 0x43e00000;  // 448
    float least;  // below the normal numbers steps are 2^-9, as a float's steps are from 2^14 on
    memcpy(&least, &size, 4);
    least += 16384.0f;
    uint32_t small;
    memcpy(&small, &least, 4);
    const uint32_t bound = size < most ? size : most, normal = ((bound + 0x7ffff + (bound >> 20 & 1)) >> 20) - (120 << 3);
    y.bits = (uint8_t)(sign | (size > 0x7f800000 ? 0x7f : size < 0x3c800000 ? small & 15 : normal));
}

inline float to_float(e4m3 x) {
    static const struct Table {
        float of[256];
        Table() {
            for (int code = 0; code < 256; code++) {
                const int exponent = code >> 3 & 15, mantissa = code & 7;
                float size = exponent ? (float)(8 + mantissa) * (float)(1 << exponent) / 1024.0f : (float)mantissa / 512.0f;
                of[code] = (code & 127) == 127 ? __builtin_nanf("") : code & 128 ? -size : size;
            }
        }
    } table;
    return table.of[x.bits];
}

typedef uint16_t u16x32 __attribute__((vector_size(64)));

// 32 values as bf16, exact except for NaN, which becomes 480.
inline u16x32 widen_to_bf16(const e4m3* p) {
    // Numbers below the normal range: multiples of 2^-9.
    const u16x32 small = {0x0000, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60};
#if defined(__AVX512BW__)
    __m512i x = _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)p));  // the sign in all higher bits
    __m512i size = (__m512i)(((u16x32)x << 4 & 0x07f0) + 0x3c00);
    size = _mm512_mask_permutexvar_epi16(size, _mm512_testn_epi16_mask(x, _mm512_set1_epi16(0x78)), x, (__m512i)small);
    return (u16x32)size | ((u16x32)x & 0x8000);
#else
    typedef int8_t i8x32 __attribute__((vector_size(32)));
    typedef int16_t i16x32 __attribute__((vector_size(64)));
    u16x32 x = (u16x32)__builtin_convertvector(load<i8x32>(p), i16x32);
    u16x32 size = (x << 4 & 0x07f0) + 0x3c00;
    size = (x & 0x78) == 0 ? (u16x32)__builtin_shuffle(small, x) : size;
    return size | (x & 0x8000);
#endif
}

// As many values as one register holds floats, exact except for NaN, which becomes 480.
inline lanes widen_lanes(const e4m3* p) {
#if defined(__F16C__) && defined(__AVX2__) && !defined(__AVX512F__)
    __m128i x = _mm_cvtepi8_epi16(_mm_loadl_epi64((const __m128i*)p));  // the sign in all higher bits
    __m128i bits = _mm_or_si128(_mm_and_si128(x, _mm_set1_epi16((short)0x8000)), _mm_and_si128(_mm_slli_epi16(x, 7), _mm_set1_epi16(0x3f80)));
    return (lanes)_mm256_cvtph_ps(bits) * 256.0f;  // the f16 with these bits is the number times 2^-8
#else
    lanes v;
    for (int i = 0; i < LANES; i++) v[i] = to_float(p[i]);
    return v;
#endif
}

// Whether any of n values, a multiple of 32, is NaN, which is lost when vectors of e4m3 are widened.
inline bool has_nan(const e4m3* p, int n) {
    typedef uint8_t u8x32 __attribute__((vector_size(32)));
    u8x32 most = {};
    for (int i = 0; i < n; i += 32) {
        u8x32 v = load<u8x32>(p + i) & 127;
        most = most > v ? most : v;
    }
    for (int i = 0; i < 32; i++)
        if (most[i] == 127) return true;
    return false;
}

template <class KV> inline bool has_nan(const KV*, int) { return false; }  // widening keeps their NaN

// Widens one half (0 or 1) of 32 stored values: for bf16 and e4m3 the even or the odd elements, which costs a shift and
// a mask; for float32 the first or the last 16. place(i) is the position of element i of 32: half place / 16, number
// place % 16. Results must be multiplied by `unit`, a power of two.
template <int H> inline Sixteen half(const bf16* p) {
    typedef uint32_t u32 __attribute__((vector_size(sizeof(lanes))));
    Sixteen v;
    for (int i = 0; i < REGISTERS; i++) {
        u32 pair = load<u32>(p + 2 * LANES * i);
        v.r[i] = (lanes)(H ? pair & 0xffff0000u : pair << 16);
    }
    return v;
}

template <int H> inline Sixteen half(const float* p) {
    Sixteen v;
    for (int i = 0; i < REGISTERS; i++) v.r[i] = load<lanes>(p + 16 * H + LANES * i);
    return v;
}

// Converts as f16 with the same bits, which is the number times 2^-8.
template <int H> inline Sixteen half(const e4m3* p) {
    Sixteen v;
#if defined(__F16C__) && defined(__AVX2__)
    __m256i pair = _mm256_loadu_si256((const __m256i*)p);
    if (!H) pair = _mm256_slli_epi16(pair, 8);
    pair = _mm256_and_si256(_mm256_srai_epi16(pair, 1), _mm256_set1_epi16((short)0xbf80));
#if defined(__AVX512F__)
    v.r[0] = (lanes)_mm512_cvtph_ps(pair);
#else
    v.r[0] = (lanes)_mm256_cvtph_ps(_mm256_castsi256_si128(pair));
    v.r[1] = (lanes)_mm256_cvtph_ps(_mm256_extracti128_si256(pair, 1));
#endif
#else
    for (int i = 0; i < 16; i++) v.r[i / LANES][i % LANES] = to_float(p[2 * i + H]) / 256.0f;
#endif
    return v;
}

inline float unit(const e4m3*) { return 256.0f; }

template <class KV> inline float unit(const KV*) { return 1.0f; }

inline int place(const float*, int i) { return i; }

template <class KV> inline int place(const KV*, int i) { return (i & 1) * 16 + (i >> 1); }
