// y = x W^T, W in bf16 panels. See core/gemm.h for the order of summation.
#include "core/gemm.h"
#include "core/kernels.h"
#include "core/watch.h"

extern "C" void redline_linear(const LinearCall& call) {
    OpSpan span("linear");
    const int K = call.K;
    Grid grid(call.T, (call.N + PANEL - 1) / PANEL);
    parallel(grid.tasks(), [&](int task) {
        Range rows = grid.row_range(task), panels = grid.panel_range(task);
        product([&](int m) { return call.x + m * call.ldx; }, rows.begin, rows.end, K,
                [&](int n) { return Bf16Panel{call.w + (int64_t)n * K * PANEL}; }, panels.begin, panels.end, call.rounded,
                [&](int m, int n, Pair v) { store_pair(call.y + m * call.ldy + n * PANEL, v); });
    });
}
