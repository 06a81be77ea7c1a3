// y[m, n] = sum over k of x[m, k] * w[n, k], each output accumulated in the order of k.
//
// Weights are stored in panels of 32 outputs, two inputs side by side, [N / 32][K / 2][32][2], so that a vector holds a
// pair of inputs of 16 outputs and a pair of x is broadcast. An output is accumulated in the same order for 1 row or
// 1000, which makes a row's bits independent of the other rows (laws 2, 3, 7).
//
// A product is exact (x float32, float32 multiply-adds) or rounded: x is rounded to bf16 and pairs of products are
// added in float32. Tensor cores do the same, and it halves the instructions on a CPU that multiplies bf16 pairs.
#pragma once
#include <algorithm>
#include <vector>

#include "pool.h"
#include "vec.h"

constexpr int PANEL = 32;
constexpr int STEP = 32;  // inputs; every K is a multiple

#if defined(__AVX512BF16__)
#define REDLINE_BF16_PAIRS 1
#endif

// The index of input k of output i of panel n, for K inputs.
inline int64_t place_in_panels(int n, int k, int i, int K) {
    return ((int64_t)n * K + k / 2 * 2) * PANEL + 2 * i + k % 2;
}

struct Nothing {};

// Two inputs of 32 outputs.
struct Inputs2 {
    Pair even, odd;
};

// The same for as many outputs as one register holds; a panel has REGISTERS_OF_PANEL of these.
struct Lanes2 {
    lanes even, odd;
};
typedef uint32_t lanes_u32 __attribute__((vector_size(sizeof(lanes))));
constexpr int REGISTERS_OF_PANEL = PANEL / LANES;

// GROUP of a panel: the number of inputs that share a scale, if the format has scales.

// One panel of bf16 weights: [K / 2][32][2].
struct Bf16Panel {
    static constexpr int GROUP = STEP;
    const bf16* data;
    const bf16* at(int k) const { return data + (int64_t)k * PANEL; }
    Nothing scale(int) const { return {}; }
    Inputs2 two(int k, Nothing) const {  // k even
        u32x16 a = load<u32x16>(at(k)), b = load<u32x16>(at(k) + PANEL);
        return {{(f32x16)(a << 16), (f32x16)(b << 16)}, {(f32x16)(a & 0xffff0000u), (f32x16)(b & 0xffff0000u)}};
    }
    Nothing scale_of(int, int) const { return {}; }
    Lanes2 two_of(int k, int r, Nothing) const {
        lanes_u32 u = load<lanes_u32>(at(k) + 2 * r * LANES);
        return {(lanes)(u << 16), (lanes)(u & 0xffff0000u)};
    }
};

// One panel of float32 values: [K][32] (keys and values while prefilling).
struct F32Panel {
    static constexpr int GROUP = STEP;
    const float* data;
    Nothing scale(int) const { return {}; }
    Inputs2 two(int k, Nothing) const {
        const float* p = data + (int64_t)k * PANEL;
        return {{load<f32x16>(p), load<f32x16>(p + 16)}, {load<f32x16>(p + 32), load<f32x16>(p + 48)}};
    }
    Nothing scale_of(int, int) const { return {}; }
    Lanes2 two_of(int k, int r, Nothing) const {
        const float* p = data + (int64_t)k * PANEL + r * LANES;
        return {load<lanes>(p), load<lanes>(p + PANEL)};
    }
};

// One panel of INT4: codes [K / 4][32 half-words of four codes], half-word 2 o + i: inputs i and 2 + i of outputs o and
// 16 + o, lowest first (o, i), (16 + o, i), (o, 2 + i), (16 + o, 2 + i); scales bf16 [K / 32][32].
struct Int4Panel {
    static constexpr int GROUP = 32;
    // The values of codes, as bf16.
    static constexpr uint16_t VALUES[16] = {0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80,
                                            0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0};
    const uint8_t* codes;
    const bf16* scales;
    const uint8_t* at(int k) const { return codes + (int64_t)k * (PANEL / 2); }
    Pair scale(int k) const { return widen32(scales + (int64_t)k / GROUP * PANEL); }
    Inputs2 two(int k, const Pair& s) const {
        u32x16 u = load<u32x16>(at(k & ~3)) >> (k & 2 ? 8 : 0);
        auto value = [](u32x16 code, f32x16 scale) {
            return (__builtin_convertvector((i32x16)(code & 15u), f32x16) - 8.0f) * scale;
        };
        return {{value(u, s.a), value(u >> 4, s.b)}, {value(u >> 16, s.a), value(u >> 20, s.b)}};
    }
    lanes scale_of(int k, int r) const {
        typedef uint16_t lanes_u16 __attribute__((vector_size(2 * LANES)));
        const bf16* from = scales + (int64_t)k / GROUP * PANEL + r * LANES;
        return (lanes)(__builtin_convertvector(load<lanes_u16>(from), lanes_u32) << 16);
    }
    Lanes2 two_of(int k, int r, lanes s) const {
        typedef int32_t lanes_i32 __attribute__((vector_size(sizeof(lanes))));
        constexpr int HALF = REGISTERS_OF_PANEL / 2;  // registers of the first 16 outputs
        lanes_u32 u = load<lanes_u32>(at(k & ~3) + 4 * (r % HALF) * LANES) >> ((k & 2 ? 8 : 0) + (r < HALF ? 0 : 4));
        auto value = [&](lanes_u32 code) { return (__builtin_convertvector((lanes_i32)(code & 15u), lanes) - 8.0f) * s; };
        return {value(u), value(u >> 16)};
    }
};

// The values of e2m1 codes; bits above the lowest four are ignored.
inline f32x16 e2m1(u32x16 code) {
    const f32x16 values = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                           -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};
    return __builtin_shuffle(values, code);  // which takes an index modulo 16
}

#if defined(__AVX512F__)
constexpr float E2M1_UNIT = 1.0f;  // the unit of e2m1_lanes
inline lanes e2m1_lanes(lanes_u32 code) { return e2m1(code); }
#elif defined(__AVX2__)
// A signed byte, the highest of a word, holds twice the number: this takes one shuffle and one conversion.
constexpr float E2M1_UNIT = 1.0f / (1 << 25);
inline f32x8 e2m1_lanes(lanes_u32 code) {
    const __m256i doubled = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12));
    __m256i index = _mm256_and_si256(_mm256_slli_epi32((__m256i)code, 24), _mm256_set1_epi32(0x0f000000));
    return (f32x8)_mm256_cvtepi32_ps(_mm256_shuffle_epi8(doubled, index));
}
#else
constexpr float E2M1_UNIT = 0.5f;
inline lanes e2m1_lanes(lanes_u32 code) {
    typedef int32_t lanes_i32 __attribute__((vector_size(sizeof(lanes))));
    lanes_u32 size = code & 7u, doubled = size < 4u ? size : (2u + (size & 1u)) << ((size >> 1) - 1u);
    lanes value = __builtin_convertvector((lanes_i32)doubled, lanes);
    return (code & 8u) == 0u ? value : -value;
}
#endif

// One panel of NVFP4: codes as in INT4; scales e4m3 [K / 16][32], and one scale of the whole matrix.
struct Nvfp4Panel {
    static constexpr int GROUP = 16;
    // The values of codes, as bf16.
    static constexpr uint16_t VALUES[16] = {0x0000, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0,
                                            0x8000, 0xbf00, 0xbf80, 0xbfc0, 0xc000, 0xc040, 0xc080, 0xc0c0};
    const uint8_t* codes;
    const e4m3* scales;
    float whole;
    const uint8_t* at(int k) const { return codes + (int64_t)k * (PANEL / 2); }
    Pair scale(int k) const {
        u16x32 bits = widen_to_bf16(scales + (int64_t)k / GROUP * PANEL);
        Pair s = widen32((const bf16*)&bits);
        return {s.a * whole, s.b * whole};
    }
    Inputs2 two(int k, const Pair& s) const {
        u32x16 u = load<u32x16>(at(k & ~3)) >> (k & 2 ? 8 : 0);
        return {{e2m1(u) * s.a, e2m1(u >> 4) * s.b}, {e2m1(u >> 16) * s.a, e2m1(u >> 20) * s.b}};
    }
    lanes scale_of(int k, int r) const {
        return widen_lanes(scales + (int64_t)k / GROUP * PANEL + r * LANES) * (whole * E2M1_UNIT);
    }
    Lanes2 two_of(int k, int r, lanes s) const {
        constexpr int HALF = REGISTERS_OF_PANEL / 2;  // registers of the first 16 outputs
        lanes_u32 u = load<lanes_u32>(at(k & ~3) + 4 * (r % HALF) * LANES) >> ((k & 2 ? 8 : 0) + (r < HALF ? 0 : 4));
        return {e2m1_lanes(u) * s, e2m1_lanes(u >> 16) * s};
    }
};

#if defined(__AVX512F__)
constexpr int ROWS = 12;  // 24 accumulators of 32 registers
#else
constexpr int ROWS = 6;
#endif

// acc[m][p] += M rows by P panels, exact. x is packed: x[k * M + m].
#if defined(__AVX512F__)
template <int M, int P, class W> inline void tile(const float* x, const W* w, int K, Pair (&acc)[M][P]) {
    for (int first = 0; first < K; first += W::GROUP) {
        decltype(w[0].scale(0)) scale[P];
        for (int p = 0; p < P; p++) scale[p] = w[p].scale(first);
        for (int k = first; k < first + W::GROUP; k += 2, x += 2 * M) {
#pragma GCC unroll 4
            for (int p = 0; p < P; p++) {
                Inputs2 v = w[p].two(k, scale[p]);
#pragma GCC unroll 12
                for (int m = 0; m < M; m++) {
                    acc[m][p].a += x[m] * v.even.a;
                    acc[m][p].b += x[m] * v.even.b;
                }
#pragma GCC unroll 12
                for (int m = 0; m < M; m++) {
                    acc[m][p].a += x[M + m] * v.odd.a;
                    acc[m][p].b += x[M + m] * v.odd.b;
                }
            }
        }
    }
}

#else
// With 16 registers: at most 12 hold sums, so for many rows a panel is processed in parts.
template <int M, int P, class W> inline void tile(const float* x, const W* w, int K, Pair (&acc)[M][P]) {
    constexpr int R = M * P * REGISTERS_OF_PANEL <= 12 ? REGISTERS_OF_PANEL : M <= 3 ? 4 : 2;  // registers at once
    for (int part = 0; part < REGISTERS_OF_PANEL; part += R) {
        lanes sum[M][P][R];
        for (int m = 0; m < M; m++)
            for (int p = 0; p < P; p++) memcpy(sum[m][p], (const float*)&acc[m][p] + part * LANES, sizeof sum[m][p]);
        const float* at = x;
        for (int first = 0; first < K; first += W::GROUP) {
            decltype(w[0].scale_of(0, 0)) scale[P][R];
            for (int p = 0; p < P; p++)
                for (int r = 0; r < R; r++) scale[p][r] = w[p].scale_of(first, part + r);
            for (int k = first; k < first + W::GROUP; k += 2, at += 2 * M) {
#pragma GCC unroll 2
                for (int p = 0; p < P; p++)
#pragma GCC unroll 8
                    for (int r = 0; r < R; r++) {
                        Lanes2 v = w[p].two_of(k, part + r, scale[p][r]);
#pragma GCC unroll 6
                        for (int m = 0; m < M; m++) sum[m][p][r] += at[m] * v.even;
#pragma GCC unroll 6
                        for (int m = 0; m < M; m++) sum[m][p][r] += at[M + m] * v.odd;
                    }
            }
        }
        for (int m = 0; m < M; m++)
            for (int p = 0; p < P; p++) memcpy((float*)&acc[m][p] + part * LANES, sum[m][p], sizeof sum[m][p]);
    }
}
#endif

// M rows (packed) times panels [begin, end); calls out(row, panel, Pair) with the sums.
template <int M, int P, class Panels, class Out>
inline void sweep(const float* x, int K, const Panels& panels, int begin, int end, Out&& out) {
    int n = begin;
    for (; n + P <= end; n += P) {
        decltype(panels(0)) w[P];
        for (int p = 0; p < P; p++) w[p] = panels(n + p);
        Pair acc[M][P] = {};
        tile<M, P>(x, w, K, acc);
        for (int m = 0; m < M; m++)
            for (int p = 0; p < P; p++) out(m, n + p, acc[m][p]);
    }
    if constexpr (P > 1) {
        if (n < end) sweep<M, P / 2>(x, K, panels, n, end, out);
    }
}

// Packs rows [m][k] into [k][M]; a single row that is not rounded needs no packing.
template <int M, class Row>
inline const float* pack(const Row& row, int first, int K, bool rounded, std::vector<float>& buffer) {
    if (M == 1 && !rounded) return row(first);
    if ((int)buffer.size() < M * K) buffer.resize(M * K);
    for (int m = 0; m < M; m++) {
        const float* r = row(first + m);
        float* b = buffer.data() + m;
        for (int k = 0; k < K; k++) b[(int64_t)k * M] = rounded ? to_float(to_bf16(r[k])) : r[k];
    }
    return buffer.data();
}

struct Multiply {
    bool rounded;
    template <int M, int P, class Row, class Panels, class Out>
    void block(const Row& row, int first, int K, const Panels& panels, int begin, int end, Out&& out) const {
        static thread_local std::vector<float> buffer;
        const float* x = pack<M>(row, first, K, rounded, buffer);
        sweep<M, P>(x, K, panels, begin, end, [&](int m, int n, Pair v) { out(first + m, n, v); });
    }
};

#if defined(REDLINE_BF16_PAIRS)
template <int M> constexpr int STRIDE = M == 1 ? 1 : (M + 3) / 4 * 4;

// Inputs [k, k + 32) of a row, as 16 pairs.
inline __m512i pairs_at(const float* row, int k) {
    return (__m512i)_mm512_cvtne2ps_pbh(_mm512_loadu_ps(row + k + 16), _mm512_loadu_ps(row + k));
}
inline __m512i pairs_at(const uint32_t* row, int k) { return _mm512_loadu_si512(row + k / 2); }

// Packs rows [m][k] into pairs [k / 2][STRIDE<M>].
template <int M, class Row>
inline const uint32_t* pack_pairs(const Row& row, int first, int K, std::vector<uint32_t>& buffer) {
    constexpr int S = STRIDE<M>;
    if ((int)buffer.size() < S * K / 2) buffer.resize(S * K / 2);
    uint32_t* b = buffer.data();
    for (int k = 0; k < K; k += 32, b += 16 * S) {
        if constexpr (M == 1) {
            _mm512_storeu_si512(b, pairs_at(row(first), k));
        } else {
            for (int g = 0; g < S; g += 4) {
                __m512i r[4];
                for (int i = 0; i < 4; i++) r[i] = pairs_at(row(first + std::min(g + i, M - 1)), k);
                __m512i a = _mm512_unpacklo_epi32(r[0], r[1]), c = _mm512_unpackhi_epi32(r[0], r[1]);
                __m512i d = _mm512_unpacklo_epi32(r[2], r[3]), e = _mm512_unpackhi_epi32(r[2], r[3]);
                __m512i of[4] = {_mm512_unpacklo_epi64(a, d), _mm512_unpackhi_epi64(a, d), _mm512_unpacklo_epi64(c, e),
                                 _mm512_unpackhi_epi64(c, e)};  // lane l of of[j]: the four rows at pair 4 l + j
                for (int j = 0; j < 4; j++) {
                    uint32_t* to = b + j * S + g;
                    _mm_storeu_si128((__m128i*)to, _mm512_castsi512_si128(of[j]));
                    _mm_storeu_si128((__m128i*)(to + 4 * S), _mm512_extracti32x4_epi32(of[j], 1));
                    _mm_storeu_si128((__m128i*)(to + 8 * S), _mm512_extracti32x4_epi32(of[j], 2));
                    _mm_storeu_si128((__m128i*)(to + 12 * S), _mm512_extracti32x4_epi32(of[j], 3));
                }
            }
        }
    }
    return buffer.data();
}

inline __m512 multiply_pairs(__m512 sum, __m512i w, uint32_t x) {
    return _mm512_dpbf16_ps(sum, (__m512bh)w, (__m512bh)_mm512_set1_epi32((int)x));
}

// acc[m][p] += M rows by P panels.
template <int M, int P> inline void tile_pairs(const uint32_t* x, const Bf16Panel* w, int K, Pair (&acc)[M][P]) {
    __m512 sum[M][P][2];
    for (int m = 0; m < M; m++)
        for (int p = 0; p < P; p++) sum[m][p][0] = (__m512)acc[m][p].a, sum[m][p][1] = (__m512)acc[m][p].b;
    for (int k = 0; k < K; k += 2, x += STRIDE<M>) {
#pragma GCC unroll 4
        for (int p = 0; p < P; p++) {
            __m512i a = _mm512_loadu_si512(w[p].at(k)), b = _mm512_loadu_si512(w[p].at(k) + PANEL);
#pragma GCC unroll 12
            for (int m = 0; m < M; m++) {
                sum[m][p][0] = multiply_pairs(sum[m][p][0], a, x[m]);
                sum[m][p][1] = multiply_pairs(sum[m][p][1], b, x[m]);
            }
        }
    }
    for (int m = 0; m < M; m++)
        for (int p = 0; p < P; p++) acc[m][p] = {(f32x16)sum[m][p][0], (f32x16)sum[m][p][1]};
}

// acc[m][p] = M rows by P panels of codes: the sums of a group, which shares a scale, are scaled and added. With few
// registers a panel's outputs are processed in two halves.
template <int M, int P, int HALVES, int FIRST, class W>
inline void code_halves(const uint32_t* x, const W* w, int K, Pair (&acc)[M][P]) {
    const __m512i values = _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i*)W::VALUES));
    f32x16 total[M][P][HALVES] = {};
    for (int first = 0; first < K; first += W::GROUP) {
        __m512 sum[M][P][HALVES];
        for (int m = 0; m < M; m++)
            for (int p = 0; p < P; p++)
                for (int h = 0; h < HALVES; h++) sum[m][p][h] = _mm512_setzero_ps();
#pragma GCC unroll 2
        for (int k = first; k < first + W::GROUP; k += 4, x += 2 * STRIDE<M>) {
#pragma GCC unroll 4
            for (int p = 0; p < P; p++) {
                u16x32 codes = load<u16x32>(w[p].at(k));
#pragma GCC unroll 2
                for (int pair = 0; pair < 2; pair++)
#pragma GCC unroll 2
                    for (int h = 0; h < HALVES; h++) {
                        // permutexvar uses the low five bits of an index; the table has its 16 values twice.
                        __m512i index = (__m512i)(codes >> (8 * pair + 4 * (FIRST + h)));
                        __m512i v = _mm512_permutexvar_epi16(index, values);
#pragma GCC unroll 12
                        for (int m = 0; m < M; m++)
                            sum[m][p][h] = multiply_pairs(sum[m][p][h], v, x[pair * STRIDE<M> + m]);
                    }
            }
        }
        for (int p = 0; p < P; p++) {
            Pair scale = w[p].scale(first);
            for (int h = 0; h < HALVES; h++)
                for (int m = 0; m < M; m++)
                    total[m][p][h] += (f32x16)sum[m][p][h] * (FIRST + h ? scale.b : scale.a);
        }
    }
    for (int m = 0; m < M; m++)
        for (int p = 0; p < P; p++)
            for (int h = 0; h < HALVES; h++) (FIRST + h ? acc[m][p].b : acc[m][p].a) = total[m][p][h];
}

template <int M, int P, class W> inline void tile_pairs(const uint32_t* x, const W* w, int K, Pair (&acc)[M][P]) {
    if constexpr (4 * M * P <= 24) {
        code_halves<M, P, 2, 0>(x, w, K, acc);
    } else {
        code_halves<M, P, 1, 0>(x, w, K, acc);
        code_halves<M, P, 1, 1>(x, w, K, acc);
    }
}

template <int M, int P, class Panels, class Out>
inline void sweep_pairs(const uint32_t* x, int K, const Panels& panels, int begin, int end, Out&& out) {
    int n = begin;
    for (; n + P <= end; n += P) {
        decltype(panels(0)) w[P];
        for (int p = 0; p < P; p++) w[p] = panels(n + p);
        Pair acc[M][P] = {};
        tile_pairs<M, P>(x, w, K, acc);
        for (int m = 0; m < M; m++)
            for (int p = 0; p < P; p++) out(m, n + p, acc[m][p]);
    }
    if constexpr (P > 1) {
        if (n < end) sweep_pairs<M, P / 2>(x, K, panels, n, end, out);
    }
}

struct MultiplyPairs {
    template <int M, int P, class Row, class Panels, class Out>
    void block(const Row& row, int first, int K, const Panels& panels, int begin, int end, Out&& out) const {
        static thread_local std::vector<uint32_t> buffer;
        const uint32_t* x = pack_pairs<M>(row, first, K, buffer);
        sweep_pairs<M, P>(x, K, panels, begin, end, [&](int m, int n, Pair v) { out(first + m, n, v); });
    }
};
#endif

template <class Multiply, class Row, class Panels, class Out>
inline void by_rows(const Multiply& by, const Row& row, int first, int last, int K, const Panels& panels, int begin,
                    int end, Out&& out) {
    int m = first;
#if defined(__AVX512F__)
    for (; last - m >= 12; m += 12) by.template block<12, 1>(row, m, K, panels, begin, end, out);
    if (last - m >= 8) by.template block<8, 1>(row, m, K, panels, begin, end, out), m += 8;
    if (last - m >= 6) by.template block<6, 2>(row, m, K, panels, begin, end, out), m += 6;
    if (last - m >= 4) by.template block<4, 2>(row, m, K, panels, begin, end, out), m += 4;
    if (last - m == 3) by.template block<3, 2>(row, m, K, panels, begin, end, out), m += 3;
    if (last - m == 2) by.template block<2, 4>(row, m, K, panels, begin, end, out), m += 2;
    if (last - m == 1) by.template block<1, 4>(row, m, K, panels, begin, end, out);
#else
    for (; last - m >= 6; m += 6) by.template block<6, 1>(row, m, K, panels, begin, end, out);
    if (last - m >= 4) by.template block<4, 1>(row, m, K, panels, begin, end, out), m += 4;
    if (last - m == 3) by.template block<3, 1>(row, m, K, panels, begin, end, out), m += 3;
    if (last - m == 2) by.template block<2, 1>(row, m, K, panels, begin, end, out), m += 2;
    if (last - m == 1) by.template block<1, 2>(row, m, K, panels, begin, end, out);
#endif
}

#if defined(REDLINE_BF16_PAIRS)
// row(m) -> const float*, which is rounded, or const uint32_t*, which has pairs of bf16.
template <class Row, class Panels, class Out>
inline void product_of_pairs(const Row& row, int first, int last, int K, const Panels& panels, int begin, int end,
                             Out&& out) {
    by_rows(MultiplyPairs{}, row, first, last, K, panels, begin, end, out);
}
#endif

// Rows [first, last) against panels [begin, end). row(m) -> const float*, panels(n) -> panel, out(m, n, Pair).
template <class Row, class Panels, class Out>
inline void product(const Row& row, int first, int last, int K, const Panels& panels, int begin, int end, bool rounded,
                    Out&& out) {
#if defined(REDLINE_BF16_PAIRS)
    if constexpr (!std::is_same_v<decltype(panels(0)), F32Panel>)
        if (rounded) return product_of_pairs(row, first, last, K, panels, begin, end, out);
#endif
    by_rows(Multiply{rounded}, row, first, last, K, panels, begin, end, out);
}

// Divides M rows by N panels into tasks: few rows -> parts of the panels; many -> tiles of 96 rows by 8 panels.
struct Grid {
    int rows, panels, row_tasks, panel_tasks;
    Grid(int rows, int panels) : rows(rows), panels(panels) {
        int wanted = rows <= 12 ? 2 * Pool::get().threads() : (panels + 7) / 8;
        panel_tasks = std::max(1, std::min(wanted, (panels + 1) / 2));
        row_tasks = std::max(1, std::min((rows + 95) / 96, 65535 / panel_tasks));  // the pool counts in 16 bits
    }
    int tasks() const { return row_tasks * panel_tasks; }
    Range row_range(int task) const { return share(rows, row_tasks, task / panel_tasks); }
    // In units of two panels, so that short sweeps have several independent sums.
    Range panel_range(int task) const {
        Range r = share((panels + 1) / 2, panel_tasks, task % panel_tasks);
        return {2 * r.begin, std::min(panels, 2 * r.end)};
    }
};

inline void store_pair(float* y, Pair v) {
    store(y, v.a);
    store(y + 16, v.b);
}
