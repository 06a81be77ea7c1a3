// Computes the inputs of attention for each token: the query heads, and the latent row, which is written into its page.
#include "core/gemm.h"
#include "core/kernels.h"
#include "core/norm.h"
#include "core/pages.h"
#include "core/watch.h"

namespace {

// Rotates interleaved pairs (2i, 2i + 1), as in the checkpoint.
inline void rope(float* x, const float* cos, const float* sin, int dim) {
    for (int i = 0; i < dim / 2; i++) {
        float a = x[2 * i], b = x[2 * i + 1];
        x[2 * i] = a * cos[i] - b * sin[i];
        x[2 * i + 1] = a * sin[i] + b * cos[i];
    }
}

template <class KV> void write_row(const float* x, KV* y, int n) {
    for (int i = 0; i < n; i++) from_float(x[i], y[i]);
}

}  // namespace

extern "C" void redline_mla_qkv(const MlaQkvCall& call) {
    OpSpan span("mla_qkv");
    static thread_local std::vector<float> buffer;
    const int T = call.T, D = call.D, Rq = call.Rq, R = call.R, P = call.P, H = call.H, Nn = call.Nn;
    const bool rounded = rounds(call.kv_type);
    auto rotate = [&](float* x, int t) {
        const int64_t first = (int64_t)t * (P / 2);
        rope(x, call.cos + first, call.sin + first, P);
    };
    int down = Rq + R + P, width = (down + PANEL - 1) / PANEL * PANEL, head = Nn + P;
    if ((int64_t)buffer.size() < (int64_t)T * width) buffer.resize((int64_t)T * width);
    float* a = buffer.data();

    Grid first(T, width / PANEL);
    parallel(first.tasks(), [&](int task) {
        Range rows = first.row_range(task), panels = first.panel_range(task);
        product([&](int m) { return call.x + (int64_t)m * D; }, rows.begin, rows.end, D,
                [&](int n) { return Bf16Panel{call.w_a + (int64_t)n * D * PANEL}; }, panels.begin, panels.end, rounded,
                [&](int m, int n, Pair v) { store_pair(a + (int64_t)m * width + n * PANEL, v); });
    });

    int tasks = T <= 4 ? 1 : Pool::get().threads() * 2;
    parallel(tasks, [&](int task) {
        Range rows = share(T, tasks, task);
        for (int t = rows.begin; t < rows.end; t++) {
            float *row = a + (int64_t)t * width, *latent = row + Rq;
            rms_norm_row(row, call.q_norm, call.eps, Rq, row);
            rms_norm_row(latent, call.kv_norm, call.eps, R, latent);
            rotate(latent + R, t);
            with_pages(call.plane, call.kv_type,
                       [&](auto* plane) { write_row(latent, plane + call.rows[t] * (R + P), R + P); });
        }
    });

    Grid second(T, H * head / PANEL);
    parallel(second.tasks(), [&](int task) {
        Range rows = second.row_range(task), panels = second.panel_range(task);
        product([&](int m) { return a + (int64_t)m * width; }, rows.begin, rows.end, Rq,
                [&](int n) { return Bf16Panel{call.w_q + (int64_t)n * Rq * PANEL}; }, panels.begin, panels.end, rounded,
                [&](int m, int n, Pair v) { store_pair(call.q + (int64_t)m * H * head + n * PANEL, v); });
    });

    parallel(tasks, [&](int task) {
        Range rows = share(T, tasks, task);
        for (int t = rows.begin; t < rows.end; t++)
            for (int h = 0; h < H; h++) rotate(call.q + ((int64_t)t * H + h) * head + Nn, t);
    });
}
