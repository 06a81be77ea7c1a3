// Samples a token for each row. e^x is computed once; for top-k, top-p and min-p the least weight that is kept is found
// by quickselect, without sorting.
//
// Sums are float64, in an order that depends on the row alone: blocks of BLOCK tokens in the order of ids, sixteen
// lanes in a block.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>
#include <vector>

#include "core/kernels.h"
#include "core/pool.h"
#include "core/vec.h"
#include "core/watch.h"

namespace {

constexpr int BLOCK = 256;  // tokens of a sum

typedef double f64x8 __attribute__((vector_size(64)));

struct Sum {
    f64x8 low = {}, high = {};

    void add(f32x16 v) {
        low += __builtin_convertvector(__builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7), f64x8);
        high += __builtin_convertvector(__builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15), f64x8);
    }

    double value() const {
        f64x8 v = low + high;
        return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7]));
    }
};

// Appends the lanes of v for which `chosen` is -1 to a list, and returns its new end. The store may be 16 numbers wide.
inline float* append(float* end, f32x16 v, i32x16 chosen) {
#if defined(__AVX512F__)
    __mmask16 mask = _mm512_test_epi32_mask((__m512i)chosen, (__m512i)chosen);
    _mm512_storeu_ps(end, _mm512_maskz_compress_ps(mask, (__m512)v));
    return end + __builtin_popcount(mask);
#else
    for (int l = 0; l < 16; l++) {
        *end = v[l];
        end -= chosen[l];
    }
    return end;
#endif
}

struct Row {
    int V, padded;  // padded: V rounded up to a multiple of 16, with weights of 0
    std::vector<float> weight, pool, spare;
    std::vector<double> sums;

    // The weights e^(x / temperature) of logits x, scaled so that the greatest is 1. Returns false if no token can be
    // sampled: a logit is NaN, or the greatest is infinite.
    bool weigh(const float* x, float temperature) {
        f32x16 tail = splat(-INFINITY);
        memcpy(&tail, x + V / 16 * 16, V % 16 * sizeof(float));
        f32x16 high = tail;
        for (int i = 0; i + 16 <= V; i += 16) high = vmax(load<f32x16>(x + i), high);
        float greatest = largest(high) / temperature;
        if (!std::isfinite(greatest)) return false;
        f32x16 divisor = splat(temperature), top = splat(greatest);
        i32x16 numbers = tail == tail;
        for (int i = 0; i < padded; i += 16) {
            f32x16 v = i + 16 <= V ? load<f32x16>(x + i) : tail;
            numbers &= v == v;
            store(&weight[i], vexp(v / divisor - top));
        }
        for (int l = 0; l < 16; l++) {
            if (!numbers[l]) return false;
        }
        return true;
    }

    // The sum of each block's weights that are at least `least`; returns the total.
    double add_up(float least) {
        double total = 0;
        for (int begin = 0, b = 0; begin < padded; begin += BLOCK, b++) {
            Sum sum;
            for (int i = begin; i < begin + BLOCK && i < padded; i += 16) {
                f32x16 w = load<f32x16>(&weight[i]);
                sum.add(w >= splat(least) ? w : f32x16{});
            }
            total += sums[b] = sum.value();
        }
        return total;
    }

    // The first token at which the running sum exceeds `reached`, which is less than the total.
    int64_t find(double reached, float least) const {
        int b = 0, last = (padded - 1) / BLOCK;
        double mass = 0;
        while (b < last && mass + sums[b] <= reached) mass += sums[b++];
        int token = b * BLOCK;
        for (int i = token; i < V && i < (b + 1) * BLOCK && mass <= reached; i++) {
            if (weight[i] < least || weight[i] == 0) continue;
            mass += weight[i];
            token = i;  // the last possible token, in case the running sum stays below the block's sum by rounding
        }
        return token;
    }

    struct Bound {
        float weight;
        double mass;  // of all greater weights
        int count;
    };

    // The greatest weight w such that at least `wanted` tokens, or a mass of `wanted`, have weight w or more; w is at
    // least `floor`.
    template <bool by_mass> Bound bound(double wanted, float floor) {
        float* end = pool.data();
        for (int i = 0; i < padded; i += 16) {
            f32x16 w = load<f32x16>(&weight[i]);
            end = append(end, w, w >= splat(floor));
        }
        Bound found = {0, 0, 0};
        for (int n = end - pool.data(); n > 0;) {
            store(&pool[n], splat(-1));  // padding, which counts neither as above nor as below
            float pivot = median(n);
            Sum mass;
            i32x16 above = {}, equal = {};
            float *high = pool.data(), *low = spare.data();
            for (int i = 0; i < n; i += 16) {
                f32x16 w = load<f32x16>(&pool[i]);
                i32x16 more = w > splat(pivot), same = w == splat(pivot);
                mass.add(more ? w : f32x16{});
                above += more, equal += same;
                high = append(high, w, more);
                low = append(low, w, ~(more | same) & (w >= f32x16{}));
            }
            int counted = high - pool.data(), alike = 0;
            for (int l = 0; l < 16; l++) alike -= equal[l];
            double more = found.mass + mass.value();
            if (counted && (by_mass ? more : found.count + counted) >= wanted) {
                n = counted;
                continue;
            }
            found = {pivot, more, found.count + counted};
            if ((by_mass ? more + (double)pivot * alike : found.count + alike) >= wanted) break;
            n = low - spare.data();
            if (!n) break;  // by rounding, the sums stay below `wanted`: the smallest weight is the bound
            found.mass += (double)pivot * alike, found.count += alike;
            std::swap(pool, spare);
        }
        return found;
    }

    // The median of nine of the pool's numbers.
    float median(int n) const {
        float a[9];
        for (int i = 0; i < 9; i++) a[i] = pool[(int64_t)n * (2 * i + 1) / 18];
        std::nth_element(a, a + 4, a + 9);
        return a[4];
    }

    float least_kept(const SampleOdds& odds) {
        float least = 0;
        bool limited = odds.top_k > 0 && odds.top_k < V;
        double among = 0;
        if (limited) {
            Bound last = bound<false>(odds.top_k, 0);
            least = last.weight;
            among = last.mass + (odds.top_k - last.count) * (double)least;
        }
        if (odds.top_p < 1) {
            if (!limited) among = add_up(0);
            // All tokens with less weight than this have, together, too little mass to be part of top_p.
            float floor = limited ? least : (float)((1 - odds.top_p) * 0.999 * among / V);
            least = bound<true>(odds.top_p * among, floor).weight;
        }
        return odds.min_p > least ? (float)odds.min_p : least;
    }

    int64_t draw(const float* x, const SampleOdds& odds) {
        if (!weigh(x, (float)odds.temperature)) return -1;
        float least = least_kept(odds);
        return find(odds.u * add_up(least), least);
    }

    void resize(int vocabulary) {
        V = vocabulary, padded = (V + 15) / 16 * 16;
        for (auto* part : {&weight, &pool, &spare}) part->resize(padded + 32);
        sums.resize(padded / BLOCK + 1);
    }
};

}  // namespace

extern "C" void redline_sample(const SampleCall& call) {
    OpSpan span("sample");
    const int R = call.R;
    int tasks = R < Pool::get().threads() * 4 ? R : Pool::get().threads() * 4;
    parallel(tasks, [&](int task) {
        static thread_local Row row;
        row.resize(call.V);
        Range rows = share(R, tasks, task);
        for (int r = rows.begin; r < rows.end; r++) {
            call.ids[r] = row.draw(call.x + r * call.ldx, call.odds[r]);
        }
    });
}
