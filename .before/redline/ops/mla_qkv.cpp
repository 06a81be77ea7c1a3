// What attention needs of each token: the query heads, and the latent row written into its page.
#include "cpu/gemm.h"
#include "cpu/kernels.h"
#include "cpu/norm.h"
#include "cpu/pages.h"

namespace {

// Interleaved pairs (2i, 2i + 1), as the checkpoint has them.
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

// x [T, D]; wa panels over [Rq | R | P] outputs; wq panels over H (Nn + P) outputs; cos, sin [T, P / 2];
// slots [T]: page * 64 + place; plane: rows of R + P values. q [T, H (Nn + P)].
extern "C" void redline_mla_qkv(const float* x, const bf16* wa, const float* q_norm, const float* kv_norm, const bf16* wq,
                                const float* cos, const float* sin, const int64_t* slots, void* plane, int kv_type,
                                float* q, float eps, int T, int D, int Rq, int R, int P, int H, int Nn) {
    static thread_local std::vector<float> buffer;
    int down = Rq + R + P, width = (down + PANEL - 1) / PANEL * PANEL, head = Nn + P;
    if ((int64_t)buffer.size() < (int64_t)T * width) buffer.resize((int64_t)T * width);
    float* a = buffer.data();

    Grid first(T, width / PANEL);
    parallel(first.tasks(), [&](int task) {
        Range rows = first.row_range(task), panels = first.panel_range(task);
        product([&](int m) { return x + (int64_t)m * D; }, rows.begin, rows.end, D,
                [&](int n) { return Bf16Panel{wa + (int64_t)n * D * PANEL}; }, panels.begin, panels.end, rounds(kv_type),
                [&](int m, int n, Pair v) { store_pair(a + (int64_t)m * width + n * PANEL, v); });
    });

    int tasks = T <= 4 ? 1 : Pool::get().threads() * 2;
    parallel(tasks, [&](int task) {
        Range rows = share(T, tasks, task);
        for (int t = rows.begin; t < rows.end; t++) {
            float *row = a + (int64_t)t * width, *latent = row + Rq;
            rms_norm_row(row, q_norm, eps, Rq, row);
            rms_norm_row(latent, kv_norm, eps, R, latent);
            rope(latent + R, cos + (int64_t)t * (P / 2), sin + (int64_t)t * (P / 2), P);
            with_pages(plane, kv_type, [&](auto* rows) { write_row(latent, rows + slots[t] * (R + P), R + P); });
        }
    });

    Grid second(T, H * head / PANEL);
    parallel(second.tasks(), [&](int task) {
        Range rows = second.row_range(task), panels = second.panel_range(task);
        product([&](int m) { return a + (int64_t)m * width; }, rows.begin, rows.end, Rq,
                [&](int n) { return Bf16Panel{wq + (int64_t)n * Rq * PANEL}; }, panels.begin, panels.end, rounds(kv_type),
                [&](int m, int n, Pair v) { store_pair(q + (int64_t)m * H * head + n * PANEL, v); });
    });

    parallel(tasks, [&](int task) {
        Range rows = share(T, tasks, task);
        for (int t = rows.begin; t < rows.end; t++)
            for (int h = 0; h < H; h++)
                rope(q + ((int64_t)t * H + h) * head + Nn, cos + (int64_t)t * (P / 2), sin + (int64_t)t * (P / 2), P);
    });
}
