// residual += partial (in place); y = rms_norm(residual) * w. If partial is null, residual stays as it is.
#include "core/kernels.h"
#include "core/norm.h"
#include "core/pool.h"
#include "core/watch.h"

extern "C" void redline_add_norm(const AddNormCall& call) {
    OpSpan span("add_norm");
    const int T = call.T, D = call.D;
    int tasks = T <= 4 ? 1 : Pool::get().threads() * 2;
    parallel(tasks, [&](int task) {
        Range rows = share(T, tasks, task);
        for (int t = rows.begin; t < rows.end; t++) {
            float* r = call.residual + (int64_t)t * D;
            if (call.partial) {
                const float* p = call.partial + (int64_t)t * D;
                for (int i = 0; i < D; i++) r[i] += p[i];
            }
            rms_norm_row(r, call.w, call.eps, D, call.y + (int64_t)t * D);
        }
    });
}
