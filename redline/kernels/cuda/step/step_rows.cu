// From a plan to the inputs of a decode step (step_rows.py): one warp per position, its lanes have the pairs of the
// rotary embedding.
//
// Every thread block writes the plan's updates of all slots. They write the same values, so that no block waits for
// another.
// Macros: PLAN_*, columns of a plan; FACTS of a slot, the first its limit; RESULT_*, columns of a result; PAGE_TOKENS.
#include "core.cuh"

struct StepRowsLaunch {
    const i64* plan;           // [B, PLAN_COLUMNS]
    const i64* tokens;         // [slots, reach]
    int* tables;               // [slots, pages]
    i64* lengths;              // [slots]
    i64* facts;                // [slots, FACTS]
    const i64* drafts;         // [slots, MOST_DRAFTS]
    i64* drafted;              // [slots]
    const i64* by;             // [slots]
    i64* results;              // [B or more, RESULT_COLUMNS]
    const float* frequencies;  // [pairs]
    i64* ids;                  // [T]
    float* cos;                // [T, pairs]
    float* sin;                // [T, pairs]
    i64* rows;                 // [T]
    int* slots;                // [T]
    int* contexts;             // [T]
    u32 count, positions, reach, pages, pairs, spare_page;
};

constexpr i64 KEEP = -1;

FN i64 least(i64 a, i64 b) { return a < b ? a : b; }
FN i64 not_negative(i64 v) { return v < 0 ? 0 : v; }

// Stores the host's updates of the row's slot: its length and facts, and new pages.
FN void take_over(const StepRowsLaunch& a, const i64* plan) {
    i64 slot = load_global_i64(plan + PLAN_SLOT), length = load_global_i64(plan + PLAN_LENGTH);
    i64 fact[FACTS], cell[PLAN_PAGES - PLAN_CELLS], page[PLAN_PAGES - PLAN_CELLS];
#pragma unroll
    for (u32 i = 0; i < FACTS; i++) fact[i] = load_global_i64(plan + PLAN_FACTS + i);
#pragma unroll
    for (u32 i = 0; i < PLAN_PAGES - PLAN_CELLS; i++) {
        cell[i] = load_global_i64(plan + PLAN_CELLS + i);
        page[i] = load_global_i64(plan + PLAN_PAGES + i);
    }
#pragma unroll
    for (u32 i = 0; i < PLAN_PAGES - PLAN_CELLS; i++) store_global(a.tables + cell[i], (u32)page[i]);
    if (length == KEEP) return;
    store_global_i64(a.lengths + slot, length);
    store_global_i64(a.drafted + slot, 0);
#pragma unroll
    for (u32 i = 0; i < FACTS; i++) store_global_i64(a.facts + slot * FACTS + i, fact[i]);
}

KERNEL(step_rows, StepRowsLaunch) {
    let_next_grid_start();
    wait_for_previous_grid();
    for (u32 row = thread_index(); row < a.count; row += THREADS) take_over(a, a.plan + row * PLAN_COLUMNS);
    sync_block();

    u32 token = block_index() * (THREADS / 32) + warp_index();
    if (token >= a.count * a.positions) return;
    u32 row = token / a.positions, place_in_row = token % a.positions;
    const i64* plan = a.plan + row * PLAN_COLUMNS;
    i64 slot = load_global_i64(plan + PLAN_SLOT), asked = load_global_i64(plan + PLAN_ASKED);
    i64 length = load_global_i64(a.lengths + slot), limit = load_global_i64(a.facts + slot * FACTS);
    i64 given = load_global_i64(plan + PLAN_GIVEN), count = given > 0 ? given : load_global_i64(a.drafted + slot);
    const i64* drafts = given > 0 ? plan + PLAN_DRAFTS_GIVEN : a.drafts + slot * MOST_DRAFTS;
    i64 ran = not_negative(least(least(asked, 1 + count), limit - length));
    bool live = place_in_row < ran;
    // The last token of a job at its limit has no page for its position; the position before it has been computed
    // already.
    i64 start = not_negative(least(length - 1, limit - 2)), place = live ? start + place_in_row : start;
    for (u32 pair = lane_index(); pair < a.pairs; pair += 32) {
        float angle = (float)place * load_global_f32(a.frequencies + pair);
        store_global_f32(a.cos + token * a.pairs + pair, cos_exact(angle));
        store_global_f32(a.sin + token * a.pairs + pair, sin_exact(angle));
    }
    if (lane_index() != 0) return;
    i64 last = load_global_i64(a.tokens + slot * a.reach + start);
    i64 page = load_global((u32*)a.tables + slot * a.pages + place / PAGE_TOKENS);
    store_global_i64(a.ids + token, live && place_in_row ? load_global_i64(drafts + place_in_row - 1) : last);
    store_global_i64(a.rows + token, (live ? page : a.spare_page) * PAGE_TOKENS + (live ? place : token) % PAGE_TOKENS);
    store_global(a.slots + token, (u32)slot);
    store_global(a.contexts + token, (u32)place + 1);
    if (place_in_row == 0) {
        store_global_i64(a.results + row * RESULT_COLUMNS + RESULT_BEFORE, length);
        store_global_i64(a.results + row * RESULT_COLUMNS + RESULT_RAN, ran);
        i64 by = load_global_i64(given > 0 ? plan + PLAN_GIVEN_BY : a.by + slot);
        store_global_i64(a.results + row * RESULT_COLUMNS + RESULT_BY, ran > 1 ? by : BY_NOBODY);
    }
}
