// The argmax of each row (the first one if several are equal), and whether the row is finite, in one pass.
#include <cmath>

#include "core/kernels.h"
#include "core/pool.h"
#include "core/vec.h"
#include "core/watch.h"

extern "C" void redline_best(const BestCall& call) {
    OpSpan span("best");
    const int R = call.R, V = call.V;
    int tasks = R <= 4 ? 1 : Pool::get().threads() * 2;
    parallel(tasks, [&](int task) {
        Range rows = share(R, tasks, task);
        for (int r = rows.begin; r < rows.end; r++) {
            const float* row = call.x + r * call.ldx;
            f32x16 high = splat(-INFINITY);
            i32x16 where = {}, sound = ~i32x16{}, at = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
            int i = 0;
            for (; i + 16 <= V; i += 16, at += 16) {
                f32x16 v = load<f32x16>(row + i);
                i32x16 higher = v > high;
                high = higher ? v : high;
                where = higher ? at : where;
                sound &= v - v == f32x16{};  // infinity and NaN give NaN, which compares unequal
            }
            int best = where[0], all = sound[0];
            float greatest = high[0];
            for (int l = 1; l < 16; l++) {
                all &= sound[l];
                if (high[l] > greatest || (high[l] == greatest && where[l] < best)) greatest = high[l], best = where[l];
            }
            for (; i < V; i++) {
                if (row[i] > greatest) greatest = row[i], best = i;
                all &= -(int)std::isfinite(row[i]);
            }
            call.ids[r] = best;
            call.finite[r] = all != 0;
        }
    });
}
