// Which drafts of each row are accepted, and the tokens that result (verify_drafts.py): one thread per row.
//
// Macros: as in step_rows.cu, MOST_POSITIONS of a row, FACT_SEED of a slot, and VERDICT, a stream of random numbers.
#include "core.cuh"

struct VerifyDraftsLaunch {
    const i64* chosen;  // [T]
    const u8* finite;   // [T]
    const i64* ids;     // [T]: the input ids of the positions
    const i64* plan;    // [B, PLAN_COLUMNS]
    i64* tokens;        // [slots, reach]
    i64* lengths;       // [slots]
    i64* drafted;       // [slots]
    i64* by;            // [slots]
    const i64* facts;   // [slots, FACTS]
    const i64* shares;  // [MOST_DRAFTS]
    i64* results;       // [B or more, RESULT_COLUMNS]
    u32 count, positions, reach;
};

// Two rounds of splitmix64 over (seed, position), in a separate stream: ops/draws.py.
FN u64 mix(u64 x) {
    x += 0x9E3779B97F4A7C15ull;
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ x >> 27) * 0x94D049BB133111EBull;
    return x ^ x >> 31;
}
FN i64 drawn(i64 seed, i64 position) {
    u64 of_stream = mix((u64)seed ^ mix(~(u64)VERDICT));
    return (i64)(mix(of_stream ^ mix((u64)position)) >> 11);
}

KERNEL(verify_drafts, VerifyDraftsLaunch) {
    let_next_grid_start();
    wait_for_previous_grid();
    u32 row = block_index() * THREADS + thread_index();
    if (row >= a.count) return;
    const i64 *plan = a.plan + row * PLAN_COLUMNS, *chosen = a.chosen + row * a.positions, *ids = a.ids + row * a.positions;
    i64* result = a.results + row * RESULT_COLUMNS;
    i64 slot = load_global_i64(plan + PLAN_SLOT);
    i64 before = load_global_i64(result + RESULT_BEFORE), ran = load_global_i64(result + RESULT_RAN);
    i64 token[MOST_POSITIONS], draft[MOST_POSITIONS], share[MOST_POSITIONS];
    bool finite[MOST_POSITIONS];
#pragma unroll
    for (u32 k = 0; k < MOST_POSITIONS; k++)
        if (k < a.positions) {
            token[k] = load_global_i64(chosen + k);
            finite[k] = load_global_u8(a.finite + row * a.positions + k);
            draft[k] = k ? load_global_i64(ids + k) : 0;
            share[k] = k ? load_global_i64(a.shares + k - 1) : 0;
        }
    bool synthetic = load_global_i64(a.shares) >= 0;
    i64 draw = synthetic ? drawn(load_global_i64(a.facts + slot * FACTS + FACT_SEED), before) : 0;
    i64 held = 0;
#pragma unroll
    for (u32 k = 0; k < MOST_POSITIONS; k++)
        if (k < a.positions) {
            // A wrong draft may cause non-finite logits that the answer itself would not have: later drafts are then
            // rejected.
            bool right = k == 0 || (synthetic ? draw < share[k] : token[k - 1] == draft[k]);
            bool holds = held == k && k < ran && finite[k] && right;
            if (holds) {
                if (k && synthetic) {  // an accepted draft is the token, whatever was sampled there
                    store_global_i64(a.tokens + slot * a.reach + before + k - 1, draft[k]);
                    store_global_i64(result + RESULT_TOKENS + k - 1, draft[k]);
                }
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
