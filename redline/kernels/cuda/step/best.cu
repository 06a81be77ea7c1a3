// The argmax of each row (the first one if several are equal), and whether all numbers of the row are finite (best.py).
//
// Block (p, r) reads part p of row r. The last of a row's thread blocks to finish combines their results and resets the
// row's counter to zero for the next launch. Macros: WIDTH, numbers per load: 4 if every row begins at a multiple of 16
// bytes.
#include "core.cuh"

struct BestLaunch {
    const float* logits;  // rows are `step` apart
    u32x4* found;         // [R, parts]
    u32* done;            // [R]: thread blocks of the row that have finished their part
    i64* ids;             // [R]
    u8* finite;           // [R]
    u32 vocabulary, step;
};

constexpr u32 WARPS = THREADS / 32;
constexpr u32 AT_ONCE = 4;               // loads that a thread has in flight
constexpr u32 FOUND = 0;                 // [WARPS] u32x4
constexpr u32 LAST = FOUND + WARPS * 16; // u32

// key: ordered as the numbers are; 0: there is no number. id: the column. most: the largest absolute value of all, as
// bits.
struct Best { u32 key, id, most; };

// Both zeros have the same key, because they compare equal.
FN u32 sort_key(float v) {
    u32 bits = as_u32(v + 0.f);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

FN void load_piece(u32 (&words)[WIDTH], const float* row, u32 piece) {
    if constexpr (WIDTH == 4) {
        u32x4 v = load_global_4(row + 4 * piece);
        words[0] = v.x, words[1] = v.y, words[2] = v.z, words[3] = v.w;
    } else
        words[0] = load_global(row + piece);
}

// This thread's part of pieces [first, end). A NaN never wins; if no number is above -infinity, the thread's first one
// wins.
FN Best look(const float* row, u32 first, u32 end) {
    float greatest = -infinity();
    u32 begin = first + thread_index(), id = begin * WIDTH, most = 0;
    for (u32 piece = begin; piece < end; piece += AT_ONCE * THREADS) {
        u32 words[AT_ONCE][WIDTH];
#pragma unroll
        for (u32 i = 0; i < AT_ONCE; i++)
            if (piece + i * THREADS < end) load_piece(words[i], row, piece + i * THREADS);
#pragma unroll
        for (u32 i = 0; i < AT_ONCE; i++)
            if (piece + i * THREADS < end)
#pragma unroll
                for (u32 j = 0; j < WIDTH; j++) {
                    u32 magnitude = words[i][j] & 0x7fffffff;
                    most = magnitude > most ? magnitude : most;
                    if (as_float(words[i][j]) > greatest) {
                        greatest = as_float(words[i][j]);
                        id = (piece + i * THREADS) * WIDTH + j;
                    }
                }
    }
    return begin < end ? Best{sort_key(greatest), id, most} : Best{0, ~0u, 0};
}

FN Best best_of_warp(Best mine) {
    u32 key = warp_max(mine.key);
    return {key, ~warp_max(mine.key == key ? ~mine.id : 0), warp_max(mine.most)};
}

// Every thread gets the result. A block-wide barrier must separate two calls.
FN Best best_of_block(Best mine) {
    u32 at = shared_base() + FOUND;
    mine = best_of_warp(mine);
    if (lane_index() == 0) store_shared_4(at + 16 * warp_index(), {mine.key, mine.id, mine.most, 0});
    sync_block();
    u32x4 other = load_shared_4(at + 16 * (lane_index() % WARPS));
    return best_of_warp({other.x, other.y, other.z});
}

KERNEL_BESIDE(best, BestLaunch, 2) {
    let_next_grid_start();
    wait_for_previous_grid();
    u32 row = block_index_y(), part = block_index(), parts = grid_size(), last = shared_base() + LAST;
    u32 pieces = a.vocabulary / WIDTH, share = (pieces + parts - 1) / parts;
    Best mine = best_of_block(look(a.logits + (u64)row * a.step, part * share, smaller(part * share + share, pieces)));
    u32x4* found = a.found + row * parts;
    if (thread_index() == 0) {
        store_global_4(found + part, {mine.key, mine.id, mine.most, 0});
        store_shared(last, add_global(a.done + row, 1) == parts - 1);
    }
    sync_block();
    if (!load_shared(last)) return;

    mine = {0, ~0u, 0};
    if (thread_index() < parts) {
        u32x4 other = load_global_4(found + thread_index());
        mine = {other.x, other.y, other.z};
    }
    mine = best_of_block(mine);
    if (thread_index() == 0) {
        store_global_i64(a.ids + row, mine.id);
        store_global_u8(a.finite + row, mine.most < 0x7f800000);
        store_global(a.done + row, 0);
    }
}
