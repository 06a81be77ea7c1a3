// What both kernels of `attend` share: its arguments, which pages a block has, and how fp8 becomes bf16.
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
    const char* plane;   // bf16 or e4m3 [pages, 64, R + P], whose pages may lie apart
    char* out;           // bf16 [Q, H, splits, R]
    float* lse;          // [Q, H, splits]
    int heads, table_width, splits, skip;
    int first_split, all_splits;  // splits are these of a context that is divided among ranks; or 0 and `splits`
    u32 page_stride;  // bytes from a page to the next
    float scale;  // of scores, for powers of two
};

// Pages [first, first + count) of a slot, for heads [head, head + rows) of a query. `out` and `lse` of a head are in row
// out_row + splits * its number among them.
struct Work {
    const int* table;
    u32 first, count;
    int length;
    u32 query, head, rows, out_row;
};

// Pages are shared out evenly over the splits of all ranks, whatever length the grid was made for; splits left over, the
// last ones, have none.
FN Work find_work(const AttendLaunch& a) {
    Work w;
    u32 split = block_index(), parts = (a.heads + ROWS - 1) / ROWS;
    w.query = block_index_y() / parts, w.head = block_index_y() % parts * ROWS;
    w.rows = smaller(ROWS, a.heads - w.head);
    w.out_row = (w.query * a.heads + w.head) * a.splits + split;
    w.length = (int)load_global_fresh(a.lengths + w.query);
    u32 pages = w.length > a.skip ? (w.length + PAGE - 1) / PAGE : 0;
    u32 share = (pages + a.all_splits - 1) / a.all_splits;
    w.first = smaller((a.first_split + split) * share, pages);
    w.count = smaller(share, pages - w.first);
    w.table = a.tables + (u64)load_global_fresh(a.slots + w.query) * a.table_width + w.first;
    return w;
}

FN float* lse_of(const AttendLaunch& a, const Work& w, u32 head) { return a.lse + w.out_row + (u64)head * a.splits; }
FN char* latents_of(const AttendLaunch& a, const Work& w, u32 head) { return a.out + (w.out_row + (u64)head * a.splits) * (2 * R); }

FN bool is_seen(const AttendLaunch& a, const Work& w, u32 token) { return (int)token >= a.skip && (int)token < w.length; }

// Two e4m3 in the high bytes of both halves -> bf16, exact: their bits in place, times 2^120, which also mends subnormals.
FN u32 widen_apart(u32 pair) { return multiply_bf16((pair & 0x80008000) | (pair >> 4 & 0x07f007f0), 0x7b807b80); }
