// All-gather: every rank gets the columns of all ranks, one rank after the other. It gathers the logits of a head whose
// rows are divided among the ranks, or each rank's query heads (as 32-bit words of two numbers).
//
// An inbox has two rooms for logits, which launches use alternately, because two gathers may follow one another
// directly. A counter in global memory says which room is next; the last thread block of a launch increments it.
// Queries have one room, because all-reduces separate two gathers of queries. All thread blocks of a launch must be
// resident on the GPU at once.
// Macros: RANKS, WIDTH (words of a rank in a row, a multiple of 4), TURNS (whether there are two rooms).
#include "core.cuh"
#include "all_reduce.cuh"

struct AllGatherLaunch {
    const float* part;   // [R, WIDTH]
    float* whole;        // [R, RANKS, WIDTH]
    u64 inbox_0, inbox_1, inbox_2, inbox_3, inbox_4, inbox_5, inbox_6, inbox_7;  // of RANKS ranks
    u64* control;        // all_reduce.cuh describes it
    u32* turns;          // [2]: launches that ended, thread blocks of this one that ended; null: one room
    u64 site;            // first word of the rooms in an inbox: [rooms][rank][R][WIDTH] words
    u32 rows, rank, room;
};

KERNEL(all_gather, AllGatherLaunch) {
    let_next_grid_start();
    wait_for_previous_grid();
    u64 turn = TURNS ? load_global_fresh(a.turns) & 1 : 0;
    Ranks ranks = ranks_of(a, a.site + turn * RANKS * a.room);
    u32 count = a.rows * (WIDTH / 4), step = grid_size() * THREADS, first = block_index() * THREADS + thread_index();
    for (u32 i = first; i < count; i += step) {
        u32x4 v = load_global_4(a.part + 4 * i);
        send(ranks, 4 * i, v);
        store_global_4(a.whole + ((u64)(i / (WIDTH / 4)) * RANKS + a.rank) * WIDTH + i % (WIDTH / 4) * 4, v);
    }
    for (u32 i = first; i < count; i += step) {
        u32 places[1] = {4 * i};
        u32x4 came[1][RANKS];
        receive(ranks, places, 1, came);
#pragma unroll
        for (u32 source = 0; source < RANKS; source++)
            if (source != a.rank)
                store_global_4(a.whole + ((u64)(i / (WIDTH / 4)) * RANKS + source) * WIDTH + i % (WIDTH / 4) * 4, came[0][source]);
    }
    if (!TURNS) return;
    sync_block();
    if (thread_index() == 0 && add_global(a.turns + 1, 1) + 1 == grid_size()) {
        store_global(a.turns + 1, 0);
        add_global(a.turns, 1);
    }
}
