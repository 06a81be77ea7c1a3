// y = x W^T, W in bf16 panels. See cpu/gemm.h for the order of summation.
#include "cpu/gemm.h"
#include "cpu/kernels.h"

// x [T, >= K] with row stride ldx, w in ceil(N / 32) panels, y [T, >= 32 * ceil(N / 32)] with row stride ldy.
extern "C" void redline_linear(const float* x, int64_t ldx, const bf16* w, float* y, int64_t ldy, int T, int N, int K,
                               int rounded) {
    Grid grid(T, (N + PANEL - 1) / PANEL);
    parallel(grid.tasks(), [&](int task) {
        Range rows = grid.row_range(task), panels = grid.panel_range(task);
        product([&](int m) { return x + m * ldx; }, rows.begin, rows.end, K,
                [&](int n) { return Bf16Panel{w + (int64_t)n * K * PANEL}; }, panels.begin, panels.end, rounded,
                [&](int m, int n, Pair v) { store_pair(y + m * ldy + n * PANEL, v); });
    });
}
