// residual += partial (in place); y = rms_norm(residual) * w. A null partial adds nothing.
#include "cpu/kernels.h"
#include "cpu/norm.h"
#include "cpu/pool.h"

extern "C" void redline_add_norm(float* residual, const float* partial, const float* w, float* y, float eps, int T, int D) {
    int tasks = T <= 4 ? 1 : Pool::get().threads() * 2;
    parallel(tasks, [&](int task) {
        Range rows = share(T, tasks, task);
        for (int t = rows.begin; t < rows.end; t++) {
            float* r = residual + (int64_t)t * D;
            if (partial) {
                const float* p = partial + (int64_t)t * D;
                for (int i = 0; i < D; i++) r[i] += p[i];
            }
            rms_norm_row(r, w, eps, D, y + (int64_t)t * D);
        }
    });
}
