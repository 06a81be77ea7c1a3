// Which drafts of each row hold, and the tokens that come of it (settle_rows.py): a thread to a row.
//
// Macros: as in step_rows.cu, and MOST_POSITIONS of a row.
#include "core.cuh"

struct SettleRowsLaunch {
    const i64* chosen;  // [T]
    const u8* finite;   // [T]
    const i64* ids;     // [T]: what ran there
    const i64* plan;    // [B, PLAN_COLUMNS]
    i64* tokens;        // [slots, reach]
    i64* lengths;       // [slots]
    i64* drafted;       // [slots]
    i64* by;            // [slots]
    i64* results;       // [B or more, RESULT_COLUMNS]
    u32 count, positions, reach;
};

KERNEL(settle_rows, SettleRowsLaunch) {
    let_next_grid_start();
    wait_for_previous_grid();
    u32 row = block_index() * THREADS + thread_index();
    if (row >= a.count) return;
    const i64 *plan = a.plan + row * PLAN_COLUMNS, *chosen = a.chosen + row * a.positions, *ids = a.ids + row * a.positions;
    i64* result = a.results + row * RESULT_COLUMNS;
    i64 slot = load_global_i64(plan + PLAN_SLOT);
    i64 before = load_global_i64(result + RESULT_BEFORE), ran = load_global_i64(result + RESULT_RAN);
    i64 token[MOST_POSITIONS], draft[MOST_POSITIONS];
    bool finite[MOST_POSITIONS];
#pragma unroll
    for (u32 k = 0; k < MOST_POSITIONS; k++)
        if (k < a.positions) {
            token[k] = load_global_i64(chosen + k);
            finite[k] = load_global_u8(a.finite + row * a.positions + k);
            draft[k] = k ? load_global_i64(ids + k) : 0;
        }
    i64 held = 0;
#pragma unroll
    for (u32 k = 0; k < MOST_POSITIONS; k++)
        if (k < a.positions) {
            // Drafts may go where no answer would have gone: where the numbers end, so do the drafts.
            bool holds = held == k && k < ran && finite[k] && (k == 0 || token[k - 1] == draft[k]);
            if (holds) {
                store_global_i64(a.tokens + slot * a.reach + before + k, token[k]);
                held++;
            }
            store_global_i64(result + RESULT_TOKENS + k, token[k]);
        }
    store_global_i64(result + RESULT_NEW, held);
    store_global_i64(result + RESULT_DRAFTED, 0);
    store_global_i64(result + RESULT_DRAFTED_BY, BY_DRAFTER);
    if (load_global_i64(plan + PLAN_ASKED) > 0) {
        store_global_i64(a.drafted + slot, 0);
        store_global_i64(a.by + slot, BY_DRAFTER);
    }
    if (held) store_global_i64(a.lengths + slot, before + held);
}
