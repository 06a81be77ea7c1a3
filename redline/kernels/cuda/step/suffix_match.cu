// Drafts the tokens that followed the longest earlier match of a slot's latest tokens (suffix_match.py): a thread block
// per row.
//
// Macros: as in step_rows.cu; WINDOW, DEPTH and SHORTEST of run/drafting/suffix.py.
#include "core.cuh"

struct SuffixMatchLaunch {
    const i64* plan;     // [B, PLAN_COLUMNS]
    const i64* tokens;   // [slots, reach]
    const i64* lengths;  // [slots]
    i64* drafts;         // [slots, MOST_DRAFTS]
    i64* drafted;        // [slots]
    i64* by;             // [slots]
    i64* results;        // [B or more, RESULT_COLUMNS]
    u32 reach;
};

constexpr u32 WARPS = THREADS / 32, AT_ONCE = 8;  // loads that a thread has in flight

// The thread's longest match: its length in the upper 16 bits, in the lower 16 bits its end, counted from the first
// token of the window.
FN u32 longest_of(const i64* first, u32 count) {
    i64 last = load_global_i64(first + count - 1);
    u32 found = 0;
    for (u32 begin = 1 + thread_index(); begin < count; begin += AT_ONCE * THREADS) {
        i64 before[AT_ONCE];
#pragma unroll
        for (u32 i = 0; i < AT_ONCE; i++)
            if (begin + i * THREADS < count) before[i] = load_global_i64(first + begin + i * THREADS - 1);
#pragma unroll
        for (u32 i = 0; i < AT_ONCE; i++) {
            u32 end = begin + i * THREADS;
            if (end >= count || before[i] != last) continue;
            u32 length = 1, most = smaller(end, DEPTH);
            while (length < most && load_global_i64(first + end - 1 - length) == load_global_i64(first + count - 1 - length))
                length++;
            u32 key = length << 16 | end;
            found = key > found ? key : found;
        }
    }
    return found;
}

KERNEL(suffix_match, SuffixMatchLaunch) {
    let_next_grid_start();
    wait_for_previous_grid();
    u32 row = block_index(), thread = thread_index();
    const i64* plan = a.plan + row * PLAN_COLUMNS;
    i64* result = a.results + row * RESULT_COLUMNS;
    i64 slot = load_global_i64(plan + PLAN_SLOT), least = load_global_i64(plan + PLAN_MATCH);
    if (least <= 0 || load_global_i64(plan + PLAN_ASKED) <= 0 || load_global_i64(result + RESULT_NEW) <= 0) return;
    u32 length = (u32)load_global_i64(a.lengths + slot), count = smaller(length, WINDOW);
    const i64* first = a.tokens + slot * a.reach + (length - count);
    u32 found = warp_max(longest_of(first, count));
    if (thread % 32 == 0) store_shared(shared_base() + 4 * warp_index(), found);
    sync_block();
    found = warp_max(load_shared(shared_base() + 4 * (thread % 32 % WARPS)));
    if (thread >= MOST_DRAFTS || found >> 16 < SHORTEST || found >> 16 < least) return;
    u32 end = found & 0xffff;
    i64 token = load_global_i64(first + end + thread % (count - end));
    store_global_i64(a.drafts + slot * MOST_DRAFTS + thread, token);
    store_global_i64(result + RESULT_DRAFTS + thread, token);
    if (thread) return;
    store_global_i64(a.drafted + slot, MOST_DRAFTS);
    store_global_i64(a.by + slot, BY_SUFFIX);
    store_global_i64(result + RESULT_DRAFTED, MOST_DRAFTS);
    store_global_i64(result + RESULT_DRAFTED_BY, BY_SUFFIX);
}
