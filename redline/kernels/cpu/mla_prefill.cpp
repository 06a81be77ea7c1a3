// Expanded latent attention for one chunk of one prompt: keys and values are computed from the cached latents, head by
// head; then causal attention runs in blocks of 64 context tokens from position 0, with a running maximum.
//
// A row's blocks do not depend on the chunk or on the rows that are processed with it, and a masked score adds exactly
// zero; so the bits depend on the row's own position and context alone (law 2).
#include <cmath>

#include "core/gemm.h"
#include "core/kernels.h"
#include "core/pages.h"
#include "core/watch.h"

namespace {

constexpr int PAGE = 64, BLOCK = 64;
#if defined(__AVX512F__)
constexpr int Q_ROWS = 12;
#else
constexpr int Q_ROWS = 3;
#endif

struct Shape {
    int H, Nn, P, R, V;
    int width() const { return R + P; }
    int head() const { return Nn + P; }
};

// The products of a chunk, and the computation of a head's keys [S / 32][head][32] and values [V / 32][S][32] from the
// latents.
//
// Exact, for any page format: latents as rows [S][R] and as panels [S / 32][R][32].
template <class KV> struct Arithmetic {
    typedef float Element, Number, Packed;  // of latents; of keys and values; of what is multiplied by these
    static constexpr int STEP = 1;          // latent values in an element

    static void gather(const KV* from, float* row, int R) {
        for (int c = 0; c < R; c++) row[c] = from ? to_float(from[c]) : 0.0f;
    }

    // W_UK of one head as rows [Nn][R], extracted from the panels of W_UK^T.
    static void key_rows(const bf16* packed, Shape s, float* rows) {
        for (int n = 0; n < s.R / 32; n++)
            for (int d = 0; d < s.Nn; d++)
                for (int i = 0; i < 32; i++)
                    rows[(int64_t)d * s.R + n * 32 + i] = to_float(packed[place_in_panels(n, d, i, s.Nn)]);
    }

    static void keys(const float* rows, const float* columns, int first, int last, Shape s, float* keys) {
        product([&](int m) { return rows + (int64_t)m * s.R; }, 0, s.Nn, s.R,
                [&](int n) { return F32Panel{columns + (int64_t)n * s.R * 32}; }, first, last, false,
                [&](int m, int n, Pair v) { store_pair(keys + ((int64_t)n * s.head() + m) * 32, v); });
    }

    static void values(const float* latents, const bf16* packed, int first, int last, int64_t S, Shape s, float* values) {
        product([&](int m) { return latents + (int64_t)m * s.R; }, first, last, s.R,
                [&](int n) { return Bf16Panel{packed + (int64_t)n * s.R * PANEL}; }, 0, s.V / 32, false,
                [&](int m, int n, Pair v) { store_pair(values + (n * S + m) * 32, v); });
    }

    // A reference to number `row` of column i of a panel.
    static float& number(float* panel, int row, int i) { return panel[(int64_t)row * 32 + i]; }

    template <int M, class Row> static const float* pack(const Row& row, int K, std::vector<float>& buffer) {
        return ::pack<M>(row, 0, K, false, buffer);
    }
    template <int M> static void multiply(const float* x, const float* panel, int K, Pair (&acc)[M][1]) {
        F32Panel w[1] = {{panel}};
        tile<M, 1>(x, w, K, acc);
    }
};

#if defined(REDLINE_BF16_PAIRS)
// bf16 pairs, float32 sums. Latents times weights are exact; queries, keys, probabilities and values are rounded, as on
// a GPU.
template <class KV> struct PairArithmetic {
    typedef uint32_t Element, Packed;
    typedef bf16 Number;
    static constexpr int STEP = 2;

    static void gather(const KV* from, uint32_t* row, int R) {
        if (!from) {
            memset(row, 0, R * sizeof(bf16));
        } else if constexpr (std::is_same_v<KV, bf16>) {
            memcpy(row, from, R * sizeof(bf16));
        } else {
            for (int c = 0; c < R; c += 32) store(row + c / 2, widen_to_bf16(from + c));
            if (has_nan(from, R)) memset(row, 0xff, R * sizeof(bf16));
        }
    }

    static void key_rows(const bf16* packed, Shape s, uint32_t* rows) {
        bf16* r = (bf16*)rows;
        for (int n = 0; n < s.R / 32; n++)
            for (int d = 0; d < s.Nn; d++)
                for (int i = 0; i < 32; i++) r[(int64_t)d * s.R + n * 32 + i] = packed[place_in_panels(n, d, i, s.Nn)];
    }

    static void keys(const uint32_t* rows, const uint32_t* columns, int first, int last, Shape s, bf16* keys) {
        product_of_pairs([&](int m) { return rows + (int64_t)m * s.R / 2; }, 0, s.Nn, s.R,
                         [&](int n) { return Bf16Panel{(const bf16*)columns + (int64_t)n * s.R * 32}; }, first, last,
                         [&](int m, int n, Pair v) { store_row(keys + ((int64_t)n * s.head() + m) * 32, v); });
        for (int n = first; n < last; n++) pair_up(keys + (int64_t)n * s.head() * 32, s.Nn);
    }

    static void values(const uint32_t* latents, const bf16* packed, int first, int last, int64_t S, Shape s, bf16* values) {
        product_of_pairs([&](int m) { return latents + (int64_t)m * s.R / 2; }, first, last, s.R,
                         [&](int n) { return Bf16Panel{packed + (int64_t)n * s.R * PANEL}; }, 0, s.V / 32,
                         [&](int m, int n, Pair v) { store_row(values + (n * S + m) * 32, v); });
        for (int n = 0; n < s.V / 32; n++) pair_up(values + (n * S + first) * 32, last - first);
    }

    static void store_row(bf16* to, Pair v) {
        _mm512_storeu_si512(to, (__m512i)_mm512_cvtne2ps_pbh((__m512)v.b, (__m512)v.a));
    }

    // Interleaves two rows of 32, as in a panel, in place.
    static void pair_up(bf16* rows, int count) {
        alignas(64) uint16_t first[32], second[32];
        for (int i = 0; i < 32; i++) first[i] = i / 2 + i % 2 * 32, second[i] = first[i] + 16;
        const __m512i low = _mm512_load_si512(first), high = _mm512_load_si512(second);
        for (int r = 0; r < count; r += 2) {
            __m512i a = _mm512_loadu_si512(rows + r * 32), b = _mm512_loadu_si512(rows + r * 32 + 32);
            _mm512_storeu_si512(rows + r * 32, _mm512_permutex2var_epi16(a, low, b));
            _mm512_storeu_si512(rows + r * 32 + 32, _mm512_permutex2var_epi16(a, high, b));
        }
    }

    static bf16& number(bf16* panel, int row, int i) { return panel[(int64_t)row / 2 * 64 + 2 * i + row % 2]; }

    template <int M, class Row> static const uint32_t* pack(const Row& row, int K, std::vector<uint32_t>& buffer) {
        return pack_pairs<M>(row, 0, K, buffer);
    }
    template <int M> static void multiply(const uint32_t* x, const bf16* panel, int K, Pair (&acc)[M][1]) {
        Bf16Panel w[1] = {{panel}};
        tile_pairs<M, 1>(x, w, K, acc);
    }
};
template <> struct Arithmetic<bf16> : PairArithmetic<bf16> {};
template <> struct Arithmetic<e4m3> : PairArithmetic<e4m3> {};
#endif

// M rows [head] at positions [position, position + M) of one head, scaled. keys, values: S is a multiple of 64.
template <class KV, int M>
void rows(const float* q, int position, int skip, const typename Arithmetic<KV>::Number* keys,
          const typename Arithmetic<KV>::Number* values, int64_t S, Shape s, float* const* out) {
    typedef Arithmetic<KV> A;
    static thread_local std::vector<float> accumulators;
    static thread_local std::vector<typename A::Packed> query_buffer, weight_buffer;
    accumulators.assign((int64_t)M * s.V, 0.0f);
    float* acc = accumulators.data();
    const auto* query = A::template pack<M>([&](int m) { return q + m * s.head(); }, s.head(), query_buffer);
    float top[M], mass[M];
    for (int m = 0; m < M; m++) top[m] = -INFINITY, mass[m] = 0;
    float score[M][BLOCK];
    for (int first = 0; first < position + M; first += BLOCK) {
        for (int half = 0; half < 2; half++) {
            Pair v[M][1] = {};
            A::template multiply<M>(query, keys + ((int64_t)first / 32 + half) * s.head() * 32, s.head(), v);
            for (int m = 0; m < M; m++) store_pair(score[m] + 32 * half, v[m][0]);
        }
        float factor[M];
        for (int m = 0; m < M; m++) {
            for (int t = first; t < skip; t++) score[m][t] = -INFINITY;
            for (int t = std::max(0, position + m + 1 - first); t < BLOCK; t++) score[m][t] = -INFINITY;
            f32x16 high = load<f32x16>(score[m]);
            for (int t = 16; t < BLOCK; t += 16) high = vmax(high, load<f32x16>(score[m] + t));
            float h = std::max(top[m], largest(high));
            factor[m] = std::exp(top[m] - h);
            f32x16 total = {};
            for (int t = 0; t < BLOCK; t += 16) {
                f32x16 e = vexp(load<f32x16>(score[m] + t) - h);
                total += e;
                store(score[m] + t, e);
            }
            mass[m] = mass[m] * factor[m] + sum(total);
            top[m] = h;
        }
        const auto* weight = A::template pack<M>([&](int m) { return score[m]; }, BLOCK, weight_buffer);
        for (int d = 0; d < s.V / 32; d++) {
            Pair v[M][1];
            for (int m = 0; m < M; m++) {
                const float* a = acc + (int64_t)m * s.V + d * 32;
                v[m][0] = {load<f32x16>(a) * factor[m], load<f32x16>(a + 16) * factor[m]};
            }
            A::template multiply<M>(weight, values + (d * S + first) * 32, BLOCK, v);
            for (int m = 0; m < M; m++) store_pair(acc + (int64_t)m * s.V + d * 32, v[m][0]);
        }
    }
    for (int m = 0; m < M; m++) {
        float inverse = 1.0f / mass[m];
        for (int i = 0; i < s.V; i++) out[m][i] = acc[(int64_t)m * s.V + i] * inverse;
    }
}

// plane: call.plane with its type.
template <class KV> void prefill(const MlaPrefillCall& call, const KV* plane) {
    typedef Arithmetic<KV> A;
    typedef typename A::Element Element;
    static thread_local std::vector<Element> gathered, transposed, key_weights;
    static thread_local std::vector<typename A::Number> key_panels, value_panels;
    const Shape s{call.H, call.Nn, call.P, call.R, call.V};
    const int start = call.start, count = call.count, skip = call.skip;
    const float scale = call.scale;
    const int context = start + count, W = s.width(), E = s.R / A::STEP;  // elements of a latent row
    const int64_t S = (context + BLOCK - 1) / BLOCK * BLOCK, panels = S / 32;

    // The latents in two layouts: rows [S][E], for values, and panels [S / 32][E][32], for keys. Rows that are skipped
    // or beyond the context are zero. All heads share the rotated keys: rows [Nn, Nn + P) of every key panel.
    gathered.resize(S * E);
    transposed.resize(S * E);
    key_panels.resize(S * s.head());
    value_panels.resize(S * s.V);
    key_weights.resize((int64_t)s.Nn * E);
    Element *rows_ = gathered.data(), *columns = transposed.data(), *wk = key_weights.data();
    auto *keys = key_panels.data(), *values = value_panels.data();
    parallel((int)panels, [&](int panel) {
        for (int i = 0; i < 32; i++) {
            int t = panel * 32 + i;
            bool read = t >= skip && t < context;
            const KV* from = read ? plane + ((int64_t)call.pages[t / PAGE] * PAGE + t % PAGE) * W : nullptr;
            A::gather(from, rows_ + (int64_t)t * E, s.R);
            for (int c = 0; c < s.P; c++)
                from_float(from ? to_float(from[s.R + c]) : 0.0f,
                           A::number(keys + (int64_t)panel * s.head() * 32, s.Nn + c, i));
        }
        for (int c = 0; c < E; c++)
            for (int i = 0; i < 32; i++)
                columns[((int64_t)panel * E + c) * 32 + i] = rows_[(int64_t)(panel * 32 + i) * E + c];
    });

    for (int h = 0; h < s.H; h++) {
        const bf16* uv = call.w_uv + (int64_t)h * s.V * s.R;
        A::key_rows(call.w_uk + (int64_t)h * s.R * s.Nn, s, wk);
        const int groups = (int)((panels + 7) / 8);
        parallel(2 * groups, [&](int task) {
            int first = task / 2 * 8, last = (int)std::min<int64_t>(panels, first + 8);
            if (task % 2 == 0)
                A::keys(wk, columns, first, last, s, keys);
            else
                A::values(rows_, uv, first * 32, last * 32, S, s, values);
        });

        int blocks = (count + Q_ROWS - 1) / Q_ROWS;
        parallel(blocks, [&](int task) {
            static thread_local std::vector<float> scaled;
            scaled.resize(Q_ROWS * s.head());
            int first = (blocks - 1 - task) * Q_ROWS;  // longest contexts first
            auto run = [&](auto size, int at) {
                constexpr int M = decltype(size)::value;
                float* out[M];
                for (int m = 0; m < M; m++) {
                    const float* from = call.q + ((int64_t)(at + m) * s.H + h) * s.head();
                    for (int i = 0; i < s.head(); i++) scaled[m * s.head() + i] = from[i] * scale;
                    out[m] = call.y + ((int64_t)(at + m) * s.H + h) * s.V;
                }
                rows<KV, M>(scaled.data(), start + at, skip, keys, values, S, s, out);
            };
            int at = first, last = std::min(first + Q_ROWS, count);
            for (; at + Q_ROWS <= last; at += Q_ROWS) run(std::integral_constant<int, Q_ROWS>{}, at);
            for (; at + Q_ROWS / 3 <= last; at += Q_ROWS / 3) run(std::integral_constant<int, Q_ROWS / 3>{}, at);
            for (; at < last; at++) run(std::integral_constant<int, 1>{}, at);
        });
    }
}

}  // namespace

extern "C" void redline_mla_prefill(const MlaPrefillCall& call) {
    OpSpan span("mla_prefill");
    with_pages(call.plane, call.kv_type, [&](const auto* plane) { prefill(call, plane); });
}
