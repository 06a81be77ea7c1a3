// Stores a drafted token of each row in its slot, and prepares the drafter's next row (keep_drafts.py): one warp per
// row.
//
// Macros: as in step_rows.cu.
#include "core.cuh"

struct KeepDraftsLaunch {
    const i64* token;  // [B]
    const i64* plan;   // [B, PLAN_COLUMNS]
    const int* tables;   // [slots, pages]
    const i64* lengths;  // [slots]
    const i64* facts;    // [slots, FACTS]
    i64* drafts;   // [slots, MOST_DRAFTS]
    i64* drafted;  // [slots]
    const i64* by;   // [slots]
    i64* results;  // [B or more, RESULT_COLUMNS]
    const float* frequencies;  // [pairs]
    i64* ids;                  // [B]
    float* cos;                // [B, pairs]
    float* sin;  // [B, pairs]
    i64* rows;      // [B]
    int* contexts;  // [B]
    u32 count, pages, pairs, spare_page;
};

FN i64 least(i64 a, i64 b) { return a < b ? a : b; }

KERNEL(keep_drafts, KeepDraftsLaunch) {
    let_next_grid_start();
    wait_for_previous_grid();
    u32 row = block_index() * (THREADS / 32) + warp_index();
    if (row >= a.count) return;
    const i64* plan = a.plan + row * PLAN_COLUMNS;
    i64* result = a.results + row * RESULT_COLUMNS;
    i64 slot = load_global_i64(plan + PLAN_SLOT), limit = load_global_i64(a.facts + slot * FACTS);
    i64 done = load_global_i64(a.drafted + slot), place = load_global(a.contexts + row);
    i64 wanted = least(least(load_global_i64(plan + PLAN_PROPOSE), limit - load_global_i64(a.lengths + slot) - 1), MOST_DRAFTS);
    bool live = load_global_i64(plan + PLAN_ASKED) > 0 && load_global_i64(result + RESULT_NEW) > 0 && done < wanted
        && load_global_i64(a.by + slot) != BY_SUFFIX;
    bool writes = live && done + 1 < wanted && place <= limit - 2;  // the page after the last draft may be missing
    for (u32 pair = lane_index(); pair < a.pairs; pair += 32) {
        float angle = (float)(place - 1) * load_global_f32(a.frequencies + pair);
        store_global_f32(a.cos + row * a.pairs + pair, cos_exact(angle));
        store_global_f32(a.sin + row * a.pairs + pair, sin_exact(angle));
    }
    sync_warp();  // every lane has read the row's context
    if (lane_index() != 0) return;
    i64 token = load_global_i64(a.token + row), page = load_global((const u32*)a.tables + slot * a.pages + (writes ? place : 0) / PAGE_TOKENS);
    token = token < 0 ? 0 : token;
    if (live) {
        store_global_i64(a.drafts + slot * MOST_DRAFTS + done, token);
        store_global_i64(a.drafted + slot, done + 1);
        store_global_i64(result + RESULT_DRAFTED, done + 1);
        store_global_i64(result + RESULT_DRAFTS + done, token);
    }
    store_global_i64(a.ids + row, live ? token : 0);
    store_global_i64(a.rows + row, writes ? page * PAGE_TOKENS + place % PAGE_TOKENS
                                          : (i64)a.spare_page * PAGE_TOKENS + row % PAGE_TOKENS);
    store_global(a.contexts + row, (u32)place + (writes ? 1 : 0));
}
