// Attention of blocks of tokens to the context of their slots, in pages, and to one another (ops/block_attention.py).
//
// The context is divided into splits of 512 tokens, which any thread may compute; a block's own rows follow in the last
// one. Splits are combined in order, so the bits depend on the block's own position and context alone. Arithmetic is in
// float32.
#include <algorithm>
#include <cmath>
#include <vector>

#include "core/kernels.h"
#include "core/pages.h"
#include "core/pool.h"
#include "core/watch.h"

namespace {

constexpr int PAGE = 64, SPLIT = 512, ROWS = 4;  // rows (heads of positions) that are multiplied together

inline void widen(const float* from, float* to, int n) { memcpy(to, from, n * sizeof(float)); }

inline void widen(const bf16* from, float* to, int n) {
    for (int i = 0; i < n; i += 32) {
        Pair v = widen32(from + i);
        store(to + i, v.a);
        store(to + i + 16, v.b);
    }
}

inline void widen(const e4m3* from, float* to, int n) {
    for (int i = 0; i < n; i += LANES) store(to + i, widen_lanes(from + i));
    if (has_nan(from, n)) to[0] = NAN;
}

// The running softmax of M rows, a multiple of ROWS.
struct Rows {
    int M, X;
    const float* q;  // [M][X]
    float *top, *mass, *mixed;  // [M], [M], [M][X]
};

// Adds n rows of the context, keys and values [PAGE][X]. seen(m, t): whether row m may see row t.
template <class Seen> void add(const Rows& rows, const float* keys, const float* values, int n, Seen&& seen) {
    const int X = rows.X;
    float p[ROWS][PAGE], fade[ROWS];
    for (int m = 0; m < rows.M; m += ROWS) {
        const float* q = rows.q + (int64_t)m * X;
        for (int t = 0; t < n; t++) {
            lanes sums[ROWS] = {};
            for (int c = 0; c < X; c += LANES) {
                lanes k = load<lanes>(keys + t * X + c);
#pragma GCC unroll 4
                for (int i = 0; i < ROWS; i++) sums[i] += load<lanes>(q + i * X + c) * k;
            }
            for (int i = 0; i < ROWS; i++) p[i][t] = sum(sums[i]);
        }
        for (int i = 0; i < ROWS; i++) {
            float high = rows.top[m + i];
            for (int t = 0; t < n; t++) {
                if (!seen(m + i, t)) p[i][t] = -INFINITY;
                high = p[i][t] > high ? p[i][t] : high;
            }
            const float least = high == -INFINITY ? 0.0f : high;  // a row that has seen nothing yet stays empty
            fade[i] = std::exp(rows.top[m + i] - least);
            rows.top[m + i] = high;
            std::fill(p[i] + n, p[i] + PAGE, -INFINITY);
            lanes total = {};
            bool sound = true;
            for (int t = 0; t < n; t++) sound &= p[i][t] == p[i][t];
            for (int t = 0; t < PAGE; t += LANES) {
                lanes e = vexp(load<lanes>(p[i] + t) - least);
                store(p[i] + t, e);
                total += e;
            }
            rows.mass[m + i] = rows.mass[m + i] * fade[i] + (sound ? sum(total) : NAN);
        }
        float* mixed = rows.mixed + (int64_t)m * X;
        for (int c = 0; c < X; c += 2 * LANES) {
            lanes a[ROWS][2];
            for (int i = 0; i < ROWS; i++)
                for (int h = 0; h < 2; h++) a[i][h] = load<lanes>(mixed + i * X + c + h * LANES) * fade[i];
            for (int t = 0; t < n; t++) {
                const lanes first = load<lanes>(values + t * X + c), second = load<lanes>(values + t * X + c + LANES);
#pragma GCC unroll 4
                for (int i = 0; i < ROWS; i++) {
                    a[i][0] += p[i][t] * first;
                    a[i][1] += p[i][t] * second;
                }
            }
            for (int i = 0; i < ROWS; i++)
                for (int h = 0; h < 2; h++) store(mixed + i * X + c + h * LANES, a[i][h]);
        }
    }
}

struct Item {
    int block, group, split;
    bool last;
};

template <class KV> void attend(const AttendBlockCall& call, const KV* plane) {
    const int R = call.R, B = call.B, G = call.G, X = call.X, heads = call.H / G, W = 2 * G * X;
    const int many = heads * B, M = (many + ROWS - 1) / ROWS * ROWS, size = M * (X + 2);
    static thread_local std::vector<Item> items;
    static thread_local std::vector<float> results;  // of each item: maxima, masses, mixed values
    static thread_local std::vector<int> first_of;   // a block's first item
    items.clear();
    first_of.resize(R);
    for (int r = 0; r < R; r++) {
        first_of[r] = (int)items.size();
        const int splits = std::max(1, (int)((call.starts[r] + SPLIT - 1) / SPLIT));
        for (int g = 0; g < G; g++)
            for (int s = 0; s < splits; s++) items.push_back({r, g, s, s == splits - 1});
    }
    results.resize((int64_t)items.size() * size);
    const Item* all = items.data();
    float* found = results.data();
    const int* firsts = first_of.data();
    const int tasks = std::min((int)items.size(), Pool::get().threads() * 16), total = (int)items.size();
    parallel(tasks, [&](int task) {
        static thread_local std::vector<float> scratch;
        scratch.resize((int64_t)M * X + 2 * PAGE * X);
        float *q = scratch.data(), *keys = q + (int64_t)M * X, *values = keys + PAGE * X;
        Range mine = share(total, tasks, task);
        for (int i = mine.begin; i < mine.end; i++) {
            const Item item = all[i];
            float* out = found + (int64_t)i * size;
            const Rows rows{M, X, q, out, out + M, out + 2 * M};
            std::fill(rows.top, rows.top + M, -INFINITY);
            std::fill(rows.mass, rows.mass + M, 0.0f);
            std::fill(rows.mixed, rows.mixed + (int64_t)M * X, 0.0f);
            std::fill(q + (int64_t)many * X, q + (int64_t)M * X, 0.0f);
            for (int b = 0; b < B; b++)  // row b * heads + h
                memcpy(q + (int64_t)b * heads * X, call.q + (((int64_t)item.block * B + b) * call.H + item.group * heads) * X,
                       heads * X * sizeof(float));
            const int64_t start = call.starts[item.block], end = std::min(start, (int64_t)(item.split + 1) * SPLIT);
            auto within = [&](int m, int64_t place) {  // a window is causal
                const int64_t distance = start + m / heads - place;
                return call.window == 0 || (distance >= 0 && distance < call.window);
            };
            const int32_t* pages = call.tables + (int64_t)item.block * call.P;
            for (int64_t first = (int64_t)item.split * SPLIT; first < end; first += PAGE) {
                const int n = (int)std::min((int64_t)PAGE, end - first);
                const KV* at = plane + (int64_t)pages[first / PAGE] * PAGE * call.stride + item.group * X;
                for (int t = 0; t < n; t++) {
                    widen(at + t * call.stride, keys + t * X, X);
                    widen(at + t * call.stride + G * X, values + t * X, X);
                }
                if (call.window == 0) add(rows, keys, values, n, [](int, int) { return true; });
                else add(rows, keys, values, n, [&](int m, int t) { return within(m, first + t); });
            }
            if (!item.last) continue;
            const int used = (int)std::max((int64_t)1, std::min((int64_t)B, call.counts[item.block]));
            for (int first = 0; first < used; first += PAGE) {
                const int n = std::min(PAGE, used - first);
                for (int t = 0; t < n; t++) {
                    const float* own = call.own + ((int64_t)item.block * B + first + t) * W + item.group * X;
                    memcpy(keys + t * X, own, X * sizeof(float));
                    memcpy(values + t * X, own + G * X, X * sizeof(float));
                }
                add(rows, keys, values, n, [&](int m, int t) { return within(m, start + first + t); });
            }
        }
    });
    const int last_tasks = R * G <= 4 ? 1 : std::min(R * G, Pool::get().threads() * 4);
    parallel(last_tasks, [&](int task) {
        Range mine = share(R * G, last_tasks, task);
        for (int i = mine.begin; i < mine.end; i++) {
            const int r = i / G, g = i % G, splits = std::max(1, (int)((call.starts[r] + SPLIT - 1) / SPLIT));
            const float* of = found + (int64_t)(firsts[r] + g * splits) * size;
            for (int m = 0; m < many; m++) {
                float* y = call.y + (((int64_t)r * B + m / heads) * call.H + g * heads + m % heads) * X;
                float high = -INFINITY, mass = 0.0f;
                for (int s = 0; s < splits; s++) high = std::max(high, of[(int64_t)s * size + m]);
                std::fill(y, y + X, 0.0f);
                for (int s = 0; s < splits; s++) {
                    const float* split = of + (int64_t)s * size;
                    const float factor = split[m] == -INFINITY ? 0.0f : std::exp(split[m] - high);
                    mass += factor * split[M + m];
                    const float* mixed = split + 2 * M + (int64_t)m * X;
                    for (int c = 0; c < X; c++) y[c] += factor * mixed[c];
                }
                const float inverse = 1.0f / (mass > 1e-30f || mass != mass ? mass : 1e-30f);
                for (int c = 0; c < X; c++) y[c] *= inverse;
            }
        }
    });
}

}  // namespace

extern "C" void redline_attend_block(const AttendBlockCall& call) {
    OpSpan span("attend_block");
    with_pages(call.plane, call.kv_type, [&](const auto* plane) { attend(call, plane); });
}
