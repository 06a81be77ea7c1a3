// SwiGLU experts: y = shared(x) + sum over the chosen e of weight_e * expert_e(x).
//
// Rows are grouped by expert, so that each expert's weights are read once for all rows that chose it. A row's sum adds
// its own experts in their own order: so a row's bits do not depend on the other rows.
#include "core/gemm.h"
#include "core/kernels.h"
#include "core/watch.h"

namespace {

// One projection of all experts. Without scales: bf16; with scales: INT4; with wholes, one per panel: NVFP4.
struct Projection {
    const void* data;
    const void* scales;
    const float* wholes;
    int panels, K;

    template <class F> void with(int expert, F&& f) const {
        const int64_t first = (int64_t)expert * panels;
        auto codes = [this, first](int n) { return (const uint8_t*)data + (first + n) * K * (PANEL / 2); };
        auto scale = [this, first](int n, int group) { return (first + n) * (K / group) * PANEL; };
        if (wholes)
            f([&](int n) {
                return Nvfp4Panel{codes(n), (const e4m3*)scales + scale(n, Nvfp4Panel::GROUP), wholes[first + n]};
            });
        else if (scales)
            f([&](int n) { return Int4Panel{codes(n), (const bf16*)scales + scale(n, Int4Panel::GROUP)}; });
        else
            f([&](int n) { return Bf16Panel{(const bf16*)data + (first + n) * K * PANEL}; });
    }
};

// The rows of one expert: places [begin, end) of the sorted list.
struct Group {
    const Projection *gate_up, *down;
    int expert, begin, end;
};

struct Work {
    int group, row_begin, row_end, panel_begin, panel_end;
};

// Divides every group into tasks of some rows by some units (panels, or pairs of these).
template <class Units> void cut(const std::vector<Group>& groups, Units&& units_of, std::vector<Work>& work) {
    work.clear();
    for (int g = 0; g < (int)groups.size(); g++) {
        int rows = groups[g].end - groups[g].begin, units = units_of(groups[g]);
        int row_tasks = (rows + 95) / 96, panel_tasks = std::min(units, rows <= 12 ? 2 : (units + 3) / 4);
        for (int r = 0; r < row_tasks; r++)
            for (int p = 0; p < panel_tasks; p++) {
                Range a = share(rows, row_tasks, r), b = share(units, panel_tasks, p);
                work.push_back({g, groups[g].begin + a.begin, groups[g].begin + a.end, b.begin, b.end});
            }
    }
}

template <class F> void run(const std::vector<Work>& work, F&& f) {
    int tasks = std::min<int>((int)work.size(), 4096);
    parallel(tasks, [&](int task) {
        Range r = share((int)work.size(), tasks, task);
        for (int i = r.begin; i < r.end; i++) f(work[i]);
    });
}

}  // namespace

extern "C" void redline_moe(const MoeCall& call) {
    OpSpan span("moe");
    const int T = call.T, D = call.D, E = call.E, k = call.k, I = call.I, Is = call.Is;
    const int32_t* ids = call.ids;
    // The calling thread's scratch, accessed by reference so that tasks on other threads use it and not their own.
    static thread_local struct {
        std::vector<int> rows, where, start;
        std::vector<float> hidden, parts;
        std::vector<Group> groups;
        std::vector<Work> work;
    } scratch;
    auto& [rows, where, start, hidden, parts, groups_, work] = scratch;
    std::vector<Group>& groups = groups_;

    Projection experts_up{call.gate_up, call.gate_up_scales, call.gate_up_wholes, 2 * I / PANEL, D};
    Projection experts_down{call.down, call.down_scales, call.down_wholes, D / PANEL, I};
    Projection shared_up{call.shared_gate_up, nullptr, nullptr, 2 * Is / PANEL, D};
    Projection shared_down{call.shared_down, nullptr, nullptr, D / PANEL, Is};

    // Sort the (row, choice) pairs by expert: places [0, T k); the shared expert has [T k, T k + T).
    int pairs = T * k, total = pairs + (Is ? T : 0);
    rows.resize(total);
    where.resize(pairs);
    start.assign(E + 1, 0);
    for (int i = 0; i < pairs; i++) start[ids[i] + 1]++;
    for (int e = 0; e < E; e++) start[e + 1] += start[e];
    groups.clear();
    for (int e = 0; e < E; e++)
        if (start[e + 1] > start[e]) groups.push_back({&experts_up, &experts_down, e, start[e], start[e + 1]});
    for (int i = 0; i < pairs; i++) {
        where[i] = start[ids[i]]++;
        rows[where[i]] = i / k;
    }
    if (Is) {
        for (int t = 0; t < T; t++) rows[pairs + t] = t;
        groups.push_back({&shared_up, &shared_down, 0, pairs, total});
    }

    int width = std::max(I, Is);
    if ((int64_t)hidden.size() < (int64_t)total * width) hidden.resize((int64_t)total * width);
    if ((int64_t)parts.size() < (int64_t)total * D) parts.resize((int64_t)total * D);
    float *h = hidden.data(), *part = parts.data();
    const int *row = rows.data(), *place_of = where.data();

    cut(groups, [](const Group& g) { return g.gate_up->panels / 2; }, work);
    run(work, [&](const Work& w) {
        const Group& g = groups[w.group];
        int up = g.gate_up->panels / 2;
        Pair gate[ROWS];
        g.gate_up->with(g.expert, [&](auto panels) {
            // Virtual panels: 2 j is gate panel j, 2 j + 1 its up panel. With one panel at a time all gates of a block
            // of rows come before their ups; with more they alternate. In both cases the gate is kept in its row's
            // place.
            product([&](int m) { return call.x + (int64_t)row[m] * D; }, w.row_begin, w.row_end, D,
                    [&](int n) { return panels((n & 1) * up + (n >> 1)); }, 2 * w.panel_begin, 2 * w.panel_end,
                    call.rounded,
                    [&](int m, int n, Pair v) {
                        int place = m % ROWS;
                        if (n & 1)
                            store_pair(h + (int64_t)m * width + (n >> 1) * PANEL,
                                       {silu(gate[place].a) * v.a, silu(gate[place].b) * v.b});
                        else
                            gate[place] = v;
                    });
        });
    });

    cut(groups, [&](const Group&) { return D / PANEL; }, work);
    run(work, [&](const Work& w) {
        const Group& g = groups[w.group];
        g.down->with(g.expert, [&](auto panels) {
            product([&](int m) { return h + (int64_t)m * width; }, w.row_begin, w.row_end, g.down->K, panels,
                    w.panel_begin, w.panel_end, call.rounded,
                    [&](int m, int n, Pair v) { store_pair(part + (int64_t)m * D + n * PANEL, v); });
        });
    });

    int tasks = T <= 4 ? 1 : Pool::get().threads() * 2;
    parallel(tasks, [&](int task) {
        Range r = share(T, tasks, task);
        for (int t = r.begin; t < r.end; t++)
            for (int d = 0; d < D; d += 16) {
                f32x16 v = Is ? load<f32x16>(part + (int64_t)(pairs + t) * D + d) : f32x16{};
                for (int j = 0; j < k; j++)
                    v += call.weights[t * k + j] * load<f32x16>(part + (int64_t)place_of[t * k + j] * D + d);
                store(call.y + (int64_t)t * D + d, v);
            }
    });
}
