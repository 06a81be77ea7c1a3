// Shared by both kernels of `attend`: the arguments, a thread block's part of the work, and the conversion from FP8 to
// BF16.
//
// TOGETHER consecutive queries of one slot are handled as one query with TOGETHER times as many heads: a thread block
// has ROWS of their (query, head) pairs, which are consecutive rows of q and of the output. Each query still has its
// own context length.
#pragma once
#include "core.cuh"

constexpr u32 PAGE = 64, WIDTH = R + P;
constexpr float LN_2 = 0.69314718f;

struct AttendLaunch {
    const char* q;       // bf16 [T, H, R + P]
    const int* tokens;   // [Q]: rows of q
    const int* slots;    // [Q]
    const int* lengths;  // [Q]
    const int* tables;   // [slots, table_width]
    const char* plane;   // bf16 or e4m3 [pages, 64, R + P]; pages are page_stride apart
    char* out;           // bf16 [Q, H, splits, R]
    float* lse;          // [Q, H, splits]
    int heads, table_width, splits, skip;
    int first_split, all_splits;  // this rank's first of all_splits splits; without context parallelism 0 and `splits`
    u32 page_stride;  // bytes from the start of a page to the next
    float scale;  // factor of the scores, which are exponents of two
};

// Pages [first, first + count) of a slot, for `rows` (query, head) pairs from number `pair` of the queries from `query`
// on. `out` and `lse` of row i of these are at row out_row + splits * i.
struct Work {
    const int* table;
    u32 first, count;
    int length, shortest;  // of the queries' contexts: the longest and the shortest length
    u32 query, pair, rows, out_row;
};

// The pages of the longest context are divided evenly among the splits of all ranks, whatever length the grid was made
// for. If there are fewer pages than splits, the last splits are empty.
FN Work find_work(const AttendLaunch& a) {
    Work w;
    int pairs = TOGETHER * a.heads;
    u32 split = block_index(), parts = (pairs + ROWS - 1) / ROWS;
    w.query = block_index_y() / parts * TOGETHER, w.pair = block_index_y() % parts * ROWS;
    w.rows = smaller(ROWS, pairs - w.pair);
    w.out_row = (w.query * a.heads + w.pair) * a.splits + split;
    int lengths[TOGETHER];
    for (u32 i = 0; i < TOGETHER; i++) lengths[i] = (int)load_global_fresh(a.lengths + w.query + i);
    w.length = w.shortest = lengths[0];
    for (u32 i = 1; i < TOGETHER; i++) {
        w.length = lengths[i] > w.length ? lengths[i] : w.length;
        w.shortest = lengths[i] < w.shortest ? lengths[i] : w.shortest;
    }
    u32 pages = w.length > a.skip ? (w.length + PAGE - 1) / PAGE : 0;
    u32 share = (pages + a.all_splits - 1) / a.all_splits;
    w.first = smaller((a.first_split + split) * share, pages);
    w.count = smaller(share, pages - w.first);
    w.table = a.tables + (u64)load_global_fresh(a.slots + w.query) * a.table_width + w.first;
    return w;
}

FN float* lse_of(const AttendLaunch& a, const Work& w, u32 row) { return a.lse + w.out_row + (u64)row * a.splits; }
FN char* latents_of(const AttendLaunch& a, const Work& w, u32 row) { return a.out + (w.out_row + (u64)row * a.splits) * (2 * R); }

// Whether the query with the longest context sees the token.
FN bool is_seen(const AttendLaunch& a, const Work& w, u32 token) { return (int)token >= a.skip && (int)token < w.length; }

// The query of a row, also of a row that does not exist; and the row's address in q.
FN u32 query_of(const AttendLaunch& a, const Work& w, u32 row) {
    u32 query = w.query;
    for (u32 i = 1; i < TOGETHER; i++) query += w.pair + row >= i * a.heads;
    return query;
}
FN const char* head_of(const AttendLaunch& a, const Work& w, u32 row) {
    u32 query = query_of(a, w, row);
    return a.q + ((u64)load_global_fresh(a.tokens + query) * a.heads + w.pair + row - (query - w.query) * a.heads) * (2 * WIDTH);
}

// The context length of each row of a thread block with several queries: [ROWS] in shared memory.
constexpr u32 LENGTHS_BYTES = TOGETHER > 1 ? 4 * ROWS : 0;
FN void store_length(const AttendLaunch& a, const Work& w, u32 lengths, u32 row) {
    if (TOGETHER > 1) store_shared(lengths + 4 * row, load_global_fresh(a.lengths + query_of(a, w, row)));
}
// Two bf16; infinities and NaN become zeros.
FN u32 finite_or_zero(u32 pair) {
    u32 low = (pair & 0x7f80) == 0x7f80 ? 0 : pair & 0xffff, high = (pair >> 16 & 0x7f80) == 0x7f80 ? 0 : pair & 0xffff0000;
    return low | high;
}

// Whether any query's context ends before the page does.
FN bool ends_within(const Work& w, u32 page) { return TOGETHER > 1 && (int)((page + 1) * PAGE) > w.shortest; }
// Whether a row sees any token of a split. If not, the row's sums are NaN (no other row is affected), its log-sum-exp
// is -inf, and it sees no token of later splits either.
FN bool sees(const AttendLaunch& a, const Work& w, u32 lengths, u32 row) {
    if (TOGETHER == 1) return true;
    int length = (int)load_shared(lengths + 4 * row);
    return length > a.skip && length > (int)(w.first * PAGE);
}

// Called by all threads, between scores and values of a page in which a query's context ends. Tokens after that end
// have weight zero, but zero times NaN is NaN. So latents that are not finite become zeros; a query that sees such a
// token has NaN from its scores already. at(row, chunk): the address of 16 bytes of a row of the page.
template <class Place>
FN void mend_unseen(const Work& w, u32 page, Place at) {
    u32 start = page * PAGE, end = smaller(PAGE, w.length - start), first = (u32)w.shortest > start ? w.shortest - start : 0;
    for (u32 i = first * (R / 8) + thread_index(); i < end * (R / 8); i += THREADS) {
        u32 to = at(i / (R / 8), i % (R / 8));
        u32x4 v = load_shared_4(to);
        store_shared_4(to, {finite_or_zero(v.x), finite_or_zero(v.y), finite_or_zero(v.z), finite_or_zero(v.w)});
    }
}

// Two e4m3 in the high bytes of the halves -> bf16, exact: their bits are moved into bf16's fields and multiplied by
// 2^120, which also handles subnormal numbers.
FN u32 widen_apart(u32 pair) { return multiply_bf16((pair & 0x80008000) | (pair >> 4 & 0x07f007f0), 0x7b807b80); }
