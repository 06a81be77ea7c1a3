// The rows that a drafter reads after a step (read_rows.py): one warp per position, its lanes have the pairs of the
// rotary embedding.
//
// Macros: as in step_rows.cu.
#include "core.cuh"

struct ReadRowsLaunch {
    const i64* plan;  // [B, PLAN_COLUMNS]
    const int* tables;  // [slots, pages]
    const i64* facts;   // [slots, FACTS]
    const i64* results;  // [B or more, RESULT_COLUMNS]
    const float* frequencies;  // [pairs]
    i64* ids;                  // [T]
    float* cos;                // [T, pairs]
    float* sin;  // [T, pairs]
    i64* rows;      // [T]
    i64* tails;     // [T]
    int* last;      // [B]
    int* slots;     // [B]
    int* contexts;  // [B]
    u32 count, positions, pages, pairs, spare_page;
};

FN i64 least(i64 a, i64 b) { return a < b ? a : b; }
FN i64 most(i64 a, i64 b) { return a < b ? b : a; }

KERNEL(read_rows, ReadRowsLaunch) {
    let_next_grid_start();
    wait_for_previous_grid();
    u32 token = block_index() * (THREADS / 32) + warp_index();
    if (token >= a.count * a.positions) return;
    u32 row = token / a.positions, place_in_row = token % a.positions;
    const i64 *plan = a.plan + row * PLAN_COLUMNS, *result = a.results + row * RESULT_COLUMNS;
    i64 slot = load_global_i64(plan + PLAN_SLOT), limit = load_global_i64(a.facts + slot * FACTS);
    i64 before = load_global_i64(result + RESULT_BEFORE), fresh = load_global_i64(result + RESULT_NEW);
    bool read = load_global_i64(plan + PLAN_ASKED) > 0 && load_global_i64(plan + PLAN_PROPOSE) >= 0;
    bool reads = read && place_in_row < fresh;
    i64 at = reads ? before - 1 + place_in_row : 0;
    for (u32 pair = lane_index(); pair < a.pairs; pair += 32) {
        float angle = (float)at * load_global_f32(a.frequencies + pair);
        store_global_f32(a.cos + token * a.pairs + pair, cos_exact(angle));
        store_global_f32(a.sin + token * a.pairs + pair, sin_exact(angle));
    }
    if (lane_index() != 0) return;
    bool ends = reads && at % PAGE_TOKENS == PAGE_TOKENS - 1, writes = reads && at + 2 <= limit - 1;
    i64 place = writes ? at + 1 : 0;
    const u32* table = (const u32*)a.tables + slot * a.pages;
    i64 page = load_global(table + place / PAGE_TOKENS);
    store_global_i64(a.ids + token, reads ? load_global_i64(result + RESULT_TOKENS + place_in_row) : 0);
    store_global_i64(a.rows + token, writes ? page * PAGE_TOKENS + place % PAGE_TOKENS
                                            : (i64)a.spare_page * PAGE_TOKENS + token % PAGE_TOKENS);
    store_global_i64(a.tails + token, ends ? (i64)load_global(table + at / PAGE_TOKENS) : (i64)a.spare_page);
    if (place_in_row) return;
    fresh = most(fresh, 1);
    store_global(a.last + row, row * a.positions + (u32)fresh - 1);
    store_global(a.slots + row, (u32)slot);
    store_global(a.contexts + row, read ? (u32)most(least(before + fresh, limit - 1), 2) : 2);
}
