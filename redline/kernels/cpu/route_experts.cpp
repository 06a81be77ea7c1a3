// Router: s = sigmoid(x W^T); the k largest of s + bias, in the best groups; weights s / (sum + 1e-20) * scale.
#include <cmath>

#include "core/gemm.h"
#include "core/kernels.h"
#include "core/watch.h"

// Sets scores to -inf outside the `chosen` groups with the largest sums of their two best scores; ties to the lower
// group.
static void keep_best_groups(float* choice, int E, int groups, int chosen) {
    int size = E / groups;
    static thread_local std::vector<float> sums;
    sums.assign(groups, 0);
    for (int g = 0; g < groups; g++) {
        float first = -INFINITY, second = -INFINITY;
        for (int e = g * size; e < (g + 1) * size; e++) {
            if (choice[e] > first) second = first, first = choice[e];
            else if (choice[e] > second) second = choice[e];
        }
        sums[g] = first + second;
    }
    for (int g = 0; g < groups; g++) {
        int better = 0;
        for (int other = 0; other < groups; other++)
            better += sums[other] > sums[g] || (sums[other] == sums[g] && other < g);
        if (better >= chosen) std::fill(choice + g * size, choice + (g + 1) * size, -INFINITY);
    }
}

extern "C" void redline_route_experts(const RouteExpertsCall& call) {
    OpSpan span("route_experts");
    const int T = call.T, D = call.D, E = call.E, k = call.k;
    int panels = (E + PANEL - 1) / PANEL, width = panels * PANEL;
    int tasks = T <= 8 ? 1 : std::min(T / 4, Pool::get().threads() * 2);
    parallel(tasks, [&](int task) {
        static thread_local std::vector<float> buffer;
        Range rows = share(T, tasks, task);
        int count = rows.end - rows.begin;
        if ((int)buffer.size() < (count + 1) * width) buffer.resize((count + 1) * width);
        float *scores = buffer.data(), *choice = scores + (int64_t)count * width;
        product([&](int m) { return call.x + (int64_t)(rows.begin + m) * D; }, 0, count, D,
                [&](int n) { return Bf16Panel{call.w + (int64_t)n * D * PANEL}; }, 0, panels, false,
                [&](int m, int n, Pair v) {
                    store(scores + m * width + n * PANEL, 1.0f / (1.0f + vexp(-v.a)));
                    store(scores + m * width + n * PANEL + 16, 1.0f / (1.0f + vexp(-v.b)));
                });
        for (int m = 0; m < count; m++) {
            float* s = scores + m * width;
            int32_t* id = call.ids + (int64_t)(rows.begin + m) * k;
            float* weight = call.weights + (int64_t)(rows.begin + m) * k;
            for (int e = 0; e < E; e++) choice[e] = s[e] + call.bias[e];
            if (call.groups > 1) keep_best_groups(choice, E, call.groups, call.chosen_groups);
            float total = 0;
            for (int j = 0; j < k; j++) {
                int best = 0;
                for (int e = 1; e < E; e++)
                    if (choice[e] > choice[best]) best = e;
                id[j] = best;
                weight[j] = s[best];
                total += s[best];
                choice[best] = -INFINITY;
            }
            for (int j = 0; j < k; j++) weight[j] = (call.normalise ? weight[j] / (total + 1e-20f) : weight[j]) * call.scale;
        }
    });
}
