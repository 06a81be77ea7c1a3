// Sorts the (token, expert) pairs of a step by expert, and divides them into tiles of columns.
//
// One thread block. Each warp counts the pairs of its own run by expert; prefix sums over the warps and over the
// experts give the place where each warp's pairs of each expert begin; then each warp stores the pairs of its run. So
// the order within an expert is that of the pairs, whatever the timing of warps. `sort_pairs.py` defines tiles.
//
// Macros: EXPERTS (<= THREADS), WIDEST (columns of a tile).
#include "core.cuh"

struct SortPairsLaunch {
    const int* ids;        // [T, K]
    const float* weights;  // [T, K]
    int* columns;          // [rows][pair or -1, weight]
    int* tiles;            // [1 + tiles][8]
    int pairs;
};

constexpr u32 WARPS = THREADS / 32, AT_ONCE = 8;
constexpr u32 COUNTS = 0, FIRST_ROWS = 4 * WARPS * EXPERTS, SUMS = FIRST_ROWS + 4 * EXPERTS;
constexpr u32 TILES_SHIFT = 20;  // a word counts rows in its lower bits and tiles above
static_assert(EXPERTS <= THREADS && EXPERTS < 512, "an expert has a thread, and nine bits");

FN u32 ceil_div(u32 a, u32 b) { return (a + b - 1) / b; }

// The sum over this thread and those before it.
FN u32 scan(u32 value, u32 sums) {
    u32 lane = lane_index(), warp = warp_index();
    for (u32 step = 1; step < 32; step *= 2) {
        u32 before = shuffle(value, (lane - step) & 31);
        if (lane >= step) value += before;
    }
    if (lane == 31) store_shared(sums + 4 * warp, value);
    sync_block();
    for (u32 i = 0; i < warp; i++) value += load_shared(sums + 4 * i);
    return value;
}

// The lanes that have the same expert.
FN u32 same_expert(u32 expert) {
    u32 same = ~0u;
#pragma unroll
    for (u32 bit = 0; bit < 9; bit++) {
        bool set = expert >> bit & 1;
        u32 lanes = warp_ballot(set);
        same &= set ? lanes : ~lanes;
    }
    return same;
}

// Expert e's rows begin at `row`, its tiles at `first`.
FN void write_tiles(const SortPairsLaunch& a, u32 expert, u32 first, u32 tiles, u32 row, u32 width, u32 rows) {
    for (u32 i = 0; i < tiles; i++) {
        int* tile = a.tiles + 8 * (1 + first + i);
        store_global_4(tile, {expert, first, tiles, row});
        store_global_4(tile + 4, {width, rows, 0, 0});
    }
}

KERNEL(sort_pairs, SortPairsLaunch) {
    let_next_grid_start();
    u32 base = shared_base(), thread = thread_index(), lane = lane_index(), warp = warp_index();
    u32 counts = base + COUNTS + 4 * EXPERTS * warp;
    for (u32 i = thread; i < WARPS * EXPERTS; i += THREADS) store_shared(base + COUNTS + 4 * i, 0);
    sync_block();
    wait_for_previous_grid();

    u32 run = ceil_div(a.pairs, 32 * WARPS) * 32, from = smaller(run * warp, a.pairs), to = smaller(from + run, a.pairs);
    for (u32 i = from + lane; i < to; i += 32 * AT_ONCE) {
        u32 ids[AT_ONCE];
#pragma unroll
        for (u32 n = 0; n < AT_ONCE; n++) ids[n] = i + 32 * n < to ? load_global(a.ids + i + 32 * n) : EXPERTS;
#pragma unroll
        for (u32 n = 0; n < AT_ONCE; n++)
            if (ids[n] < EXPERTS) add_shared(counts + 4 * ids[n], 1);
    }
    sync_block();

    u32 total = 0;
    if (thread < EXPERTS)
        for (u32 i = 0; i < WARPS; i++) {
            u32 at = base + COUNTS + 4 * (EXPERTS * i + thread), count = load_shared(at);
            store_shared(at, total);
            total += count;
        }
    u32 width = total ? ceil_div(ceil_div(total, ceil_div(total, WIDEST)), 8) * 8 : 8;
    u32 tiles = ceil_div(total, width), rows = ceil_div(total, 8) * 8;
    u32 sums = scan(rows | tiles << TILES_SHIFT, base + SUMS), ours = sums - (rows | tiles << TILES_SHIFT);
    u32 row = ours & ((1u << TILES_SHIFT) - 1);
    if (thread < EXPERTS) {
        store_shared(base + FIRST_ROWS + 4 * thread, row);
        write_tiles(a, thread, ours >> TILES_SHIFT, tiles, row, width, rows);
        for (u32 i = total; i < rows; i++) store_global_2(a.columns + 2 * (row + i), {~0u, 0});
    }
    if (thread == THREADS - 1) {
        store_global_4(a.tiles, {sums >> TILES_SHIFT, 0, 0, 0});
        store_global_4(a.tiles + 4, {0, 0, 0, 0});
    }
    sync_block();

    for (u32 start = from; start < to; start += 32 * AT_ONCE) {
        u32 ids[AT_ONCE], weights[AT_ONCE];
#pragma unroll
        for (u32 n = 0; n < AT_ONCE; n++) {
            u32 i = start + 32 * n + lane;
            ids[n] = i < to ? load_global(a.ids + i) : EXPERTS;
            weights[n] = i < to ? load_global(a.weights + i) : 0;
        }
#pragma unroll
        for (u32 n = 0; n < AT_ONCE; n++) {
            u32 expert = ids[n], same = same_expert(expert), rank = count_bits(same & ((1u << lane) - 1)), before = 0;
            if (expert < EXPERTS) before = load_shared(counts + 4 * expert);
            sync_warp();
            if (expert < EXPERTS && rank == 0) store_shared(counts + 4 * expert, before + count_bits(same));
            sync_warp();
            if (expert >= EXPERTS) continue;
            u32 place = load_shared(base + FIRST_ROWS + 4 * expert) + before + rank;
            store_global_2(a.columns + 2 * place, {start + 32 * n + lane, weights[n]});
        }
    }
}
