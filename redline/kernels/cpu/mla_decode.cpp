// Absorbed latent attention over pages: each query token against the whole latent context of its slot.
//
// The context is divided into splits of 256 tokens, which any thread may compute. Within a split pages are processed in
// order with a running maximum; splits are combined in order. So the bits depend on the token's own position and
// context alone.
#include <cmath>

#include "core/gemm.h"
#include "core/kernels.h"
#include "core/pages.h"
#include "core/watch.h"

namespace {

constexpr int PAGE = 64, SPLIT = 256;

struct Shape {
    int H, Nn, P, R, V;  // heads, nope, rope, latent rank, value width
    int width() const { return R + P; }
    int head() const { return Nn + P; }
};

// `queries` consecutive queries of one slot, over one split: heads [heads, heads + group) of each. `record`: index of
// the first query's results, in units of `group` rows.
struct Item {
    int query, queries, heads, split, record;
};
constexpr int MOST_ROWS = 12;  // rows (heads of queries) multiplied together: 24 accumulators of 32 registers

// The products with one page: scores = q . rows, acc += p rows. Each implementation has its own order of dimensions in
// the prepared query and in the accumulators.
//
// float32 arithmetic, for any page format.
template <class KV> struct Arithmetic {
    typedef float Query;
    // 32 numbers in natural order -> the prepared query's order.
    static void prepare(const Pair& x, float* to) {
        float natural[32];
        store(natural, x.a);
        store(natural + 16, x.b);
        for (int i = 0; i < 32; i++) to[place((const KV*)nullptr, i)] = natural[i] * unit((const KV*)nullptr);
    }

    // 32 accumulators -> their numbers in natural order.
    static void natural(const float* acc, float factor, float* to) {
        for (int i = 0; i < 32; i++) to[i] = acc[place((const KV*)nullptr, i)] * (factor * unit((const KV*)nullptr));
    }

    // Numbers of rows of q, and of halves of 32 dimensions, that are accumulated at the same time: limited by
    // registers.
    template <int G> static constexpr int MANY = std::min(G, SUMS / REGISTERS);
    template <int G> static constexpr int TOGETHER = 2 * MANY<G> * REGISTERS <= SUMS ? 2 : 1;

    // sums [N][2], of HALVES halves from half H on: N rows of q times one row.
    template <int N, int H, int HALVES> static void dot(const float* q, const KV* row, int W, Sixteen (&sums)[N][2]) {
        lanes a[N][HALVES][REGISTERS] = {};
        for (int c = 0; c < W; c += 32) {
            Sixteen k[HALVES];
            k[0] = half<H>(row + c);
            if constexpr (HALVES == 2) k[1] = half<1>(row + c);
#pragma GCC unroll 12
            for (int g = 0; g < N; g++)
#pragma GCC unroll 2
                for (int h = 0; h < HALVES; h++)
#pragma GCC unroll 4
                    for (int i = 0; i < REGISTERS; i++)
                        a[g][h][i] += load<lanes>(q + g * W + c + 16 * (H + h) + LANES * i) * k[h].r[i];
        }
        for (int g = 0; g < N; g++)
            for (int h = 0; h < HALVES; h++)
                for (int i = 0; i < REGISTERS; i++) sums[g][H + h].r[i] = a[g][h][i];
    }

    // q [G][W], rows [n][W] -> score [G][PAGE]
    template <int G> static void dots(const float* q, const KV* rows, int n, int W, float (&score)[G][PAGE]) {
        constexpr int N = MANY<G>, HALVES = TOGETHER<G>;
        for (int t = 0; t < n; t++)
            for (int first = 0; first < G; first += N) {
                Sixteen sums[N][2];
                const KV* row = rows + (int64_t)t * W;
                dot<N, 0, HALVES>(q + first * W, row, W, sums);
                if constexpr (HALVES == 1) dot<N, 1, 1>(q + first * W, row, W, sums);
                for (int g = 0; g < N; g++) {
                    for (int i = 0; i < REGISTERS; i++) sums[g][0].r[i] += sums[g][1].r[i];
                    score[first + g][t] = sum(sums[g][0]);
                }
            }
    }

    // For HALVES halves from half H on, of 32 dimensions of N rows of acc: acc = acc * factor + p rows.
    template <int N, int H, int HALVES>
    static void weigh32(const float (*p)[PAGE], const float* factor, const KV* rows, int n, int W, int R, float* acc) {
        lanes a[N][HALVES][REGISTERS];
        auto each = [&](auto f) {
            for (int g = 0; g < N; g++)
                for (int h = 0; h < HALVES; h++)
                    for (int i = 0; i < REGISTERS; i++) f(g, a[g][h][i], acc + g * R + 16 * (H + h) + LANES * i);
        };
        each([&](int g, lanes& v, float* at) { v = load<lanes>(at) * factor[g]; });
        for (int t = 0; t < n; t++, rows += W) {
            Sixteen v[HALVES];
            v[0] = half<H>(rows);
            if constexpr (HALVES == 2) v[1] = half<1>(rows);
#pragma GCC unroll 12
            for (int g = 0; g < N; g++)
#pragma GCC unroll 2
                for (int h = 0; h < HALVES; h++)
#pragma GCC unroll 4
                    for (int i = 0; i < REGISTERS; i++) a[g][h][i] += p[g][t] * v[h].r[i];
        }
        each([&](int, lanes& v, float* at) { store(at, v); });
    }

    // acc [G][R] = acc * factor + p rows; `coming`: the next page's rows, for prefetching
    template <int G>
    static void weigh(const float (&p)[G][PAGE], const float (&factor)[G], const KV* rows, const KV*, int n, int W, int R,
                      float* acc) {
        constexpr int N = MANY<G>, HALVES = TOGETHER<G>;
        for (int c = 0; c < R; c += 32)
            for (int g = 0; g < G; g += N) {
                weigh32<N, 0, HALVES>(p + g, factor + g, rows + c, n, W, R, acc + g * R + c);
                if constexpr (HALVES == 1) weigh32<N, 1, 1>(p + g, factor + g, rows + c, n, W, R, acc + g * R + c);
            }
    }
};

#if defined(__AVX512BF16__)
// bf16 products with float32 sums, two multiplications per lane: the query and the probabilities are rounded to bf16,
// as on a GPU.
template <class KV> struct PairArithmetic {
    typedef bf16 Query;
    static void prepare(const Pair& x, bf16* to) {
        _mm512_storeu_si512(to, (__m512i)_mm512_cvtne2ps_pbh((__m512)x.b, (__m512)x.a));
    }

    // Interleaving two rows has put 4 of every 8 dimensions into each half.
    static void natural(const float* acc, float factor, float* to) {
        for (int i = 0; i < 32; i += 4) store(to + i, load<f32x4>(acc + (i & 4) * 4 + (i >> 3) * 4) * factor);
    }

    static __m512i row(const bf16* p) { return _mm512_loadu_si512(p); }
    static __m512i row(const e4m3* p) { return (__m512i)widen_to_bf16(p); }

    template <int G, int T> static void dots_of(const bf16* q, const KV* rows, int W, float* score) {
        __m512 sums[G][T];
        for (int g = 0; g < G; g++)
            for (int t = 0; t < T; t++) sums[g][t] = _mm512_setzero_ps();
        for (int c = 0; c < W; c += 32) {
            __m512bh k[T];
#pragma GCC unroll 4
            for (int t = 0; t < T; t++) k[t] = (__m512bh)row(rows + (int64_t)t * W + c);
#pragma GCC unroll 12
            for (int g = 0; g < G; g++) {
                __m512bh x = (__m512bh)row(q + g * W + c);
#pragma GCC unroll 4
                for (int t = 0; t < T; t++) sums[g][t] = _mm512_dpbf16_ps(sums[g][t], x, k[t]);
            }
        }
        auto sums4 = [&](int g, int t, int g1, int t1) {  // of (g, t) and the three next, which are (g1, t1) apart
            return sum4((f32x16)sums[g][t], (f32x16)sums[g + g1][t + t1], (f32x16)sums[g + 2 * g1][t + 2 * t1],
                        (f32x16)sums[g + 3 * g1][t + 3 * t1]);
        };
        if constexpr (T == 4) {
            for (int g = 0; g < G; g++) store(score + g * PAGE, sums4(g, 0, 0, 1));
        } else if constexpr (G % 4 == 0) {
            for (int g = 0; g < G; g += 4)
                for (int t = 0; t < T; t++) {
                    f32x4 v = sums4(g, t, 1, 0);
                    for (int i = 0; i < 4; i++) score[(g + i) * PAGE + t] = v[i];
                }
        } else {
            for (int g = 0; g < G; g++)
                for (int t = 0; t < T; t++) score[g * PAGE + t] = sum((f32x16)sums[g][t]);
        }
    }

    template <int G> static void dots(const bf16* q, const KV* rows, int n, int W, float (&score)[G][PAGE]) {
        constexpr int T = G <= 4 ? 4 : 2;
        int t = 0;
        for (; t + T <= n; t += T) dots_of<G, T>(q, rows + (int64_t)t * W, W, &score[0][t]);
        for (; t < n; t++) dots_of<G, 1>(q, rows + (int64_t)t * W, W, &score[0][t]);
    }

    template <int G>
    static void weigh(const float (&p)[G][PAGE], const float (&factor)[G], const KV* rows, const KV* coming, int n, int W, int R,
                      float* acc) {
        uint32_t pairs[G][PAGE / 2];
        for (int g = 0; g < G; g++)
            for (int t = 0; t < PAGE; t += 32)
                prepare({load<f32x16>(p[g] + t), load<f32x16>(p[g] + t + 16)}, (bf16*)&pairs[g][t / 2]);
        const char *fetched = (const char*)coming, *last = (const char*)(coming + PAGE * W);
        const int each = (PAGE * W * (int)sizeof(KV) / 64 + R - 1) / R;  // cache lines to prefetch for two rows by 32
        for (int c = 0; c < R; c += 32) {
            __m512 a[G], b[G];
            for (int g = 0; g < G; g++) {
                a[g] = (__m512)(load<f32x16>(acc + g * R + c) * factor[g]);
                b[g] = (__m512)(load<f32x16>(acc + g * R + c + 16) * factor[g]);
            }
            const KV* at = rows + c;
            for (int t = 0; t < n; t += 2, at += 2 * W) {
                // A page is larger than the L1 cache: the next 32 dimensions are prefetched while these are summed.
                _mm_prefetch((const char*)(at + 32), _MM_HINT_T0);
                _mm_prefetch((const char*)(at + W + 32), _MM_HINT_T0);
                for (int i = 0; i < each && fetched < last; i++, fetched += 64) _mm_prefetch(fetched, _MM_HINT_T1);
                __m512i one = row(at);
                // A page may hold anything beyond the context, but zero times it must be zero.
                __m512i two = t + 1 < n ? row(at + W) : _mm512_setzero_si512();
                __m512bh low = (__m512bh)_mm512_unpacklo_epi16(one, two), high = (__m512bh)_mm512_unpackhi_epi16(one, two);
#pragma GCC unroll 12
                for (int g = 0; g < G; g++) {
                    __m512bh x = (__m512bh)_mm512_set1_epi32((int)pairs[g][t / 2]);
                    a[g] = _mm512_dpbf16_ps(a[g], low, x);
                    b[g] = _mm512_dpbf16_ps(b[g], high, x);
                }
            }
            for (int g = 0; g < G; g++) {
                store(acc + g * R + c, (f32x16)a[g]);
                store(acc + g * R + c + 16, (f32x16)b[g]);
            }
        }
    }
};
template <> struct Arithmetic<bf16> : PairArithmetic<bf16> {};
template <> struct Arithmetic<e4m3> : PairArithmetic<e4m3> {};
#endif

// Q queries times G heads over the tokens of their context from `begin` on, each query up to its own end; `begin` is
// inside a page only after skipped tokens. Computes each row's running maximum, sum, and weighted latents [R] of this
// split. While one page is summed, the next is prefetched, up to `context`.
template <int Q, int G, class KV>
void attend(const typename Arithmetic<KV>::Query* q, const KV* plane, const int32_t* pages, int begin, const int* ends,
            int context, Shape s, float* top, float* mass, float* acc) {
    constexpr int N = Q * G;
    const int W = s.width(), last = *std::max_element(ends, ends + Q);
    float score[N][PAGE];
    for (int g = 0; g < N; g++) top[g] = -INFINITY, mass[g] = 0;
    std::fill(acc, acc + (int64_t)N * s.R, 0.0f);
    for (int first = begin, next; first < last; first = next) {
        next = (first / PAGE + 1) * PAGE;
        const KV* rows = plane + ((int64_t)pages[first / PAGE] * PAGE + first % PAGE) * W;
        const int n = std::min(next, last) - first;
        Arithmetic<KV>::template dots<N>(q, rows, n, W, score);
        float factor[N];
        for (int g = 0; g < N; g++) {
            for (int t = std::max(0, std::min(ends[g / G] - first, n)); t < PAGE; t++) score[g][t] = -INFINITY;
            lanes high = load<lanes>(score[g]);
            for (int t = LANES; t < PAGE; t += LANES) high = vmax(high, load<lanes>(score[g] + t));
            float m = std::max(top[g], largest(high));
            factor[g] = std::exp(top[g] - m);
            Sixteen total = {};
            for (int t = 0; t < PAGE; t += 16)
                for (int i = 0; i < REGISTERS; i++) {
                    lanes e = vexp(load<lanes>(score[g] + t + LANES * i) - m);
                    store(score[g] + t + LANES * i, e);
                    total.r[i] += e;
                }
            mass[g] = mass[g] * factor[g] + sum(total);
            top[g] = m;
        }
        if (has_nan(rows, n * W)) std::fill(mass, mass + N, NAN);
        const KV* coming = next < context ? plane + (int64_t)pages[next / PAGE] * PAGE * W : rows;
        Arithmetic<KV>::template weigh<N>(score, factor, rows, coming, n, W, s.R, acc);
    }
}

// plane: call.plane with its type.
template <class KV> void decode(const MlaDecodeCall& call, const KV* plane) {
    const Shape s{call.H, call.Nn, call.P, call.R, call.V};
    const int Q = call.Q;
    const float* q = call.q;
    const float scale = call.scale;
    const int32_t *tokens = call.tokens, *slots = call.slots, *lengths = call.lengths;
    // The calling thread's scratch; tasks on other threads access it through these references.
    static thread_local struct {
        std::vector<typename Arithmetic<KV>::Query> absorbed;
        std::vector<float> partial, latent;
        std::vector<Item> items;
        std::vector<int> first_place, record_of;
    } scratch;
    auto& absorbed = scratch.absorbed;
    std::vector<float>&partial = scratch.partial, &latent = scratch.latent;
    std::vector<Item>& items = scratch.items;
    std::vector<int>&first_place = scratch.first_place, &record_of = scratch.record_of;
    const int W = s.width(), group = s.H % 4 == 0 ? 4 : s.H % 2 == 0 ? 2 : 1, groups = s.H / group;
    constexpr bool rounded = !std::is_same_v<KV, float>;

    // q' = scale * [W_UK^T q_nope | q_rope], [H / group][Q][group][W].
    if ((int64_t)absorbed.size() < (int64_t)Q * s.H * W) absorbed.resize((int64_t)Q * s.H * W);
    auto* qa = absorbed.data();
    auto prepared = [&](int query, int h) { return qa + (((int64_t)h / group * Q + query) * group + h % group) * W; };
    const int per_head = s.R / PANEL, panel_tasks = std::min(per_head, Q <= 12 ? 4 : 2);
    parallel(s.H * panel_tasks, [&](int task) {
        int h = task / panel_tasks;
        Range panels = share(per_head, panel_tasks, task % panel_tasks);
        product([&](int m) { return q + ((int64_t)tokens[m] * s.H + h) * s.head(); }, 0, Q, s.Nn,
                [&](int n) { return Bf16Panel{call.w_uk + ((int64_t)h * per_head + n) * s.Nn * PANEL}; }, panels.begin,
                panels.end, rounded, [&](int m, int n, Pair v) {
                    Arithmetic<KV>::prepare({v.a * scale, v.b * scale}, prepared(m, h) + n * 32);
                });
        if (panels.begin == 0)
            for (int m = 0; m < Q; m++)
                for (int p = 0; p < s.P; p += 32) {
                    const float* from = q + ((int64_t)tokens[m] * s.H + h) * s.head() + s.Nn + p;
                    Arithmetic<KV>::prepare({load<f32x16>(from) * scale, load<f32x16>(from + 16) * scale},
                                            prepared(m, h) + s.R + p);
                }
    });

    // Queries of one slot process each split together, as many as the registers allow, so that its pages are read once
    // for all of these, and are loaded from memory once for all queries of the slot.
    items.clear();
    first_place.resize(Q);
    int places = 0, records = 0;
    for (int i = 0; i < Q; i++) {
        first_place[i] = places;
        places += (lengths[i] + SPLIT - 1) / SPLIT * groups;
    }
    record_of.resize(places);
    const int most = group == 4 ? MOST_ROWS / group : 1;
    for (int i = 0, next; i < Q; i = next) {
        int longest = 0;
        for (next = i; next < Q && slots[next] == slots[i]; next++) longest = std::max(longest, lengths[next]);
        for (int split = 0; split * SPLIT < longest; split++)
            for (int query = i, end; query < next; query = end) {
                for (end = query; end < next && split * SPLIT < lengths[end]; end++) {}
                int count = end - query, shares = (count + most - 1) / most;
                for (int part = 0; part < shares; part++) {
                    Range r = share(count, shares, part);
                    for (int g = 0; g < groups; g++) {
                        items.push_back({query + r.begin, r.end - r.begin, g * group, split, records});
                        for (int j = r.begin; j < r.end; j++)
                            record_of[first_place[query + j] + split * groups + g] = records++;
                    }
                }
                end = std::max(end, query + 1);
            }
    }
    // Maxima and sums, then latents [R], of each record's rows.
    if ((int64_t)partial.size() < (int64_t)records * group * (s.R + 2)) partial.resize((int64_t)records * group * (s.R + 2));
    float *tops = partial.data(), *masses = tops + (int64_t)records * group, *latents = masses + (int64_t)records * group;
    int tasks = std::min((int)items.size(), Pool::get().threads() * 16);
    parallel(tasks, [&](int task) {
        Range r = share((int)items.size(), tasks, task);
        for (int i = r.begin; i < r.end; i++) {
            Item item = items[i];
            const auto* qh = prepared(item.query, item.heads);
            const int32_t* pages = call.tables + slots[item.query] * call.table_width;
            int first = item.split * SPLIT, begin = std::max(first, call.skip), ends[MOST_ROWS];
            for (int j = 0; j < item.queries; j++) ends[j] = std::min(first + SPLIT, lengths[item.query + j]);
            int context = lengths[item.query];
            int64_t row = (int64_t)item.record * group;
            auto run = [&](auto queries, auto heads) {
                attend<decltype(queries)::value, decltype(heads)::value>(qh, plane, pages, begin, ends, context, s, tops + row,
                                                                         masses + row, latents + row * s.R);
            };
            constexpr std::integral_constant<int, 1> one;
            constexpr std::integral_constant<int, 2> two;
            constexpr std::integral_constant<int, 3> three;
            constexpr std::integral_constant<int, 4> four;
            if (group == 1) run(one, one);
            else if (group == 2) run(one, two);
            else if (item.queries == 1) run(one, four);
            else if (item.queries == 2) run(two, four);
            else run(three, four);
        }
    });

    // Combine the splits in order, and convert to natural order.
    if ((int64_t)latent.size() < (int64_t)Q * s.H * s.R) latent.resize((int64_t)Q * s.H * s.R);
    float* lat = latent.data();
    int combine_tasks = Q * s.H <= 16 ? 1 : Pool::get().threads() * 2;
    parallel(combine_tasks, [&](int task) {
        static thread_local std::vector<float> sums;
        sums.resize(s.R);
        Range r = share(Q * s.H, combine_tasks, task);
        for (int i = r.begin; i < r.end; i++) {
            int query = i / s.H, h = i % s.H, g = h % group;
            int splits = (lengths[query] + SPLIT - 1) / SPLIT;
            auto row = [&](int k) {
                return (int64_t)record_of[first_place[query] + k * groups + h / group] * group + g;
            };
            float high = -INFINITY, mass = 0;
            for (int k = 0; k < splits; k++) high = std::max(high, tops[row(k)]);
            std::fill(sums.begin(), sums.end(), 0.0f);
            for (int k = 0; k < splits; k++) {
                float f = std::exp(tops[row(k)] - high);
                mass += f * masses[row(k)];
                const float* acc = latents + row(k) * s.R;
                for (int c = 0; c < s.R; c++) sums[c] += f * acc[c];
            }
            float inverse = 1.0f / mass;
            float* out = lat + (int64_t)i * s.R;
            for (int c = 0; c < s.R; c += 32) Arithmetic<KV>::natural(sums.data() + c, inverse, out + c);
        }
    });

    const int value_panels = s.V / PANEL, value_tasks = std::min(value_panels, 2);
    parallel(s.H * value_tasks, [&](int task) {
        int h = task / value_tasks;
        Range panels = share(value_panels, value_tasks, task % value_tasks);
        product([&](int m) { return lat + ((int64_t)m * s.H + h) * s.R; }, 0, Q, s.R,
                [&](int n) { return Bf16Panel{call.w_uv + ((int64_t)h * value_panels + n) * s.R * PANEL}; }, panels.begin,
                panels.end, rounded, [&](int m, int n, Pair v) {
                    store_pair(call.y + ((int64_t)tokens[m] * s.H + h) * s.V + n * PANEL, v);
                });
    });
}

}  // namespace

extern "C" void redline_mla_decode(const MlaDecodeCall& call) {
    OpSpan span("mla_decode");
    with_pages(call.plane, call.kv_type, [&](const auto* plane) { decode(call, plane); });
}
