// y[m, n] = sum over k of x[m, k] * w[n, k], each output one chain of fused multiply-adds in the order of k.
//
// Weights lie in panels of 32 outputs, [N / 32][K][32], so that a vector holds 32 outputs at one k and x[m, k] is
// broadcast. The chain of an output is the same for 1 row or 1000, which is what makes a row's bits independent of its
// company (laws 2, 3, 7).
#pragma once
#include <algorithm>
#include <vector>

#include "pool.h"
#include "vec.h"

constexpr int PANEL = 32;

// Where output i of a panel is stored, so that load32 gives (outputs 0..15, outputs 16..31).
inline int slot_in_panel(int i) { return i < 16 ? 2 * i : 2 * (i - 16) + 1; }

// Panels give the scales of 32 inputs at a time.
constexpr int SCALED = 32;
struct Nothing {};

// One panel of bf16 weights: [K][32], element slot_in_panel(i).
struct Bf16Panel {
    const bf16* data;
    inline Nothing scale(int) const { return {}; }
    inline Pair at(int k, Nothing) const { return load32(data + (int64_t)k * PANEL); }
};

// One panel of float32 values: [K][32] in natural order (keys and values while prefilling).
struct F32Panel {
    const float* data;
    inline Nothing scale(int) const { return {}; }
    inline Pair at(int k, Nothing) const { return load32(data + (int64_t)k * PANEL); }
};

// One panel of INT4: codes [K][16 bytes], byte i = u of output i | u of output 16 + i << 4; scales bf16 [K / 32][32].
struct Int4Panel {
    const uint8_t* codes;
    const bf16* scales;
    inline Pair scale(int k) const { return load32(scales + (int64_t)(k >> 5) * PANEL); }
    inline Pair at(int k, const Pair& s) const {
#if defined(__AVX512F__)
        const __m512 value = _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7);
        __m512i u = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)(codes + (int64_t)k * 16)));
        // permutexvar reads the low four bits of each index only.
        f32x16 a = (f32x16)_mm512_permutexvar_ps(u, value);
        f32x16 b = (f32x16)_mm512_permutexvar_ps(_mm512_srli_epi32(u, 4), value);
#else
        typedef uint8_t u8x16 __attribute__((vector_size(16)));
        i32x16 u = __builtin_convertvector(load<u8x16>(codes + (int64_t)k * 16), i32x16);
        f32x16 a = __builtin_convertvector((u & 15) - 8, f32x16);
        f32x16 b = __builtin_convertvector((u >> 4) - 8, f32x16);
#endif
        return {a * s.a, b * s.b};
    }
};

#if defined(__AVX512F__)
constexpr int ROWS = 12;  // 24 accumulators of 32 registers
#else
constexpr int ROWS = 3;
#endif

// acc[m][p]: M rows by P panels. x is packed: x[k * M + m].
template <int M, int P, class W> inline void tile(const float* x, const W* w, int K, Pair (&acc)[M][P]) {
    for (int first = 0; first < K; first += SCALED) {
        decltype(w[0].scale(0)) scale[P];
        for (int p = 0; p < P; p++) scale[p] = w[p].scale(first);
        for (int k = first, last = std::min(first + SCALED, K); k < last; k++, x += M) {
#pragma GCC unroll 4
            for (int p = 0; p < P; p++) {
                Pair v = w[p].at(k, scale[p]);
#pragma GCC unroll 12
                for (int m = 0; m < M; m++) {
                    acc[m][p].a += x[m] * v.a;
                    acc[m][p].b += x[m] * v.b;
                }
            }
        }
    }
}

// M rows (packed) against panels [begin, end); out(row, panel, Pair) takes the sums.
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

// Packs rows [m][k] into [k][M]; one row needs no packing.
template <int M, class Row> inline const float* pack(const Row& row, int first, int K, std::vector<float>& buffer) {
    if (M == 1) return row(first);
    if ((int)buffer.size() < M * K) buffer.resize(M * K);
    for (int m = 0; m < M; m++) {
        const float* r = row(first + m);
        float* b = buffer.data() + m;
        for (int k = 0; k < K; k++) b[(int64_t)k * M] = r[k];
    }
    return buffer.data();
}

template <int M, int P, class Row, class Panels, class Out>
inline void block(const Row& row, int first, int K, const Panels& panels, int begin, int end, Out&& out) {
    static thread_local std::vector<float> buffer;
    const float* x = pack<M>(row, first, K, buffer);
    sweep<M, P>(x, K, panels, begin, end, [&](int m, int n, Pair v) { out(first + m, n, v); });
}

// Rows [first, last) against panels [begin, end). row(m) -> const float*, panels(n) -> panel, out(m, n, Pair).
template <class Row, class Panels, class Out>
inline void product(const Row& row, int first, int last, int K, const Panels& panels, int begin, int end, Out&& out) {
    int m = first;
#if defined(__AVX512F__)
    for (; last - m >= 12; m += 12) block<12, 1>(row, m, K, panels, begin, end, out);
    if (last - m >= 8) block<8, 1>(row, m, K, panels, begin, end, out), m += 8;
    if (last - m >= 6) block<6, 2>(row, m, K, panels, begin, end, out), m += 6;
    if (last - m >= 4) block<4, 2>(row, m, K, panels, begin, end, out), m += 4;
    if (last - m == 3) block<3, 2>(row, m, K, panels, begin, end, out), m += 3;
    if (last - m == 2) block<2, 4>(row, m, K, panels, begin, end, out), m += 2;
    if (last - m == 1) block<1, 4>(row, m, K, panels, begin, end, out);
#else
    for (; last - m >= 3; m += 3) block<3, 1>(row, m, K, panels, begin, end, out);
    if (last - m == 2) block<2, 1>(row, m, K, panels, begin, end, out), m += 2;
    if (last - m == 1) block<1, 2>(row, m, K, panels, begin, end, out);
#endif
}

#if defined(__AVX512BF16__)
#define REDLINE_BF16_PAIRS 1
// The same product where both sides are bf16 already: two multiplications a lane, summed in float32, so nothing is
// rounded that was not. Elements 2k and 2k + 1 travel together: rows as [K / 2] pairs, panels as [K / 2][32] pairs.
template <int M, class Row, class Panels, class Out>
inline void pair_block(const Row& row, int first, int K2, const Panels& panels, int begin, int end, Out&& out) {
    static thread_local std::vector<uint32_t> buffer;
    if ((int)buffer.size() < M * K2) buffer.resize(M * K2);
    for (int m = 0; m < M; m++) {
        const uint32_t* r = row(first + m);
        for (int k = 0; k < K2; k++) buffer[(size_t)k * M + m] = r[k];
    }
    for (int n = begin; n < end; n++) {
        const uint32_t *x = buffer.data(), *w = panels(n);
        __m512 a[M], b[M];
        for (int m = 0; m < M; m++) a[m] = b[m] = _mm512_setzero_ps();
        for (int k = 0; k < K2; k++, x += M, w += PANEL) {
            __m512bh low = (__m512bh)_mm512_loadu_si512(w), high = (__m512bh)_mm512_loadu_si512(w + 16);
#pragma GCC unroll 12
            for (int m = 0; m < M; m++) {
                __m512bh v = (__m512bh)_mm512_set1_epi32((int)x[m]);
                a[m] = _mm512_dpbf16_ps(a[m], v, low);
                b[m] = _mm512_dpbf16_ps(b[m], v, high);
            }
        }
        for (int m = 0; m < M; m++) out(first + m, n, Pair{(f32x16)a[m], (f32x16)b[m]});
    }
}

template <class Row, class Panels, class Out>
inline void pair_product(const Row& row, int first, int last, int K2, const Panels& panels, int begin, int end, Out&& out) {
    int m = first;
    for (; last - m >= 12; m += 12) pair_block<12>(row, m, K2, panels, begin, end, out);
    for (; last - m >= 4; m += 4) pair_block<4>(row, m, K2, panels, begin, end, out);
    for (; m < last; m++) pair_block<1>(row, m, K2, panels, begin, end, out);
}
#endif

// Splits M rows by N panels into tasks: few rows -> shares of the panels; many -> tiles of 96 rows by 8 panels.
struct Grid {
    int rows, panels, row_tasks, panel_tasks;
    Grid(int rows, int panels) : rows(rows), panels(panels) {
        int wanted = rows <= 12 ? 2 * Pool::get().threads() : (panels + 7) / 8;
        panel_tasks = std::max(1, std::min(wanted, (panels + 1) / 2));
        row_tasks = std::max(1, std::min((rows + 95) / 96, 65535 / panel_tasks));  // the pool counts in 16 bits
    }
    int tasks() const { return row_tasks * panel_tasks; }
    Range row_range(int task) const { return share(rows, row_tasks, task / panel_tasks); }
    // In units of two panels, so that short sweeps keep several chains in flight.
    Range panel_range(int task) const {
        Range r = share((panels + 1) / 2, panel_tasks, task % panel_tasks);
        return {2 * r.begin, std::min(panels, 2 * r.end)};
    }
};

inline void store_pair(float* y, Pair v) {
    store(y, v.a);
    store(y + 16, v.b);
}
