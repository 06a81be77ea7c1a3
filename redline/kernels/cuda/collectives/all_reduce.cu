// residual += the all-reduced partial sums of all ranks, for T <= 64 tokens; also the input x of the following RMS norm
// and the sums of squares for it.
//
// Runs after a product whose kernel has no all-reduce in its epilogue. A thread block has 512 columns of a token, a
// lane four. A thread block may wait for the corresponding one on another GPU, so all thread blocks of a launch must be
// resident on the GPU at once.
// Macros: RANKS, SHOTS, HIDDEN, HIDDEN_PADDED, ROUTED.
#include "core.cuh"
#include "all_reduce.cuh"

struct AllReduceLaunch {
    const float* partial;   // [T, HIDDEN]
    const float* routed;    // [T, HIDDEN]: added to `partial`; null unless ROUTED
    const float* residual;  // [T, HIDDEN]
    const float* gamma;     // [HIDDEN]
    float* residual_out;    // [T, HIDDEN]
    u16* x;                 // bf16 [T, HIDDEN_PADDED]
    float* squares;         // [blocks, T padded to 8]
    u64 inbox_0, inbox_1, inbox_2, inbox_3, inbox_4, inbox_5, inbox_6, inbox_7;  // of RANKS ranks
    u64* control;  // described in all_reduce.cuh; null: there is one rank
    u64 site;               // the all-reduce's first word in an inbox: [rank][T][HIDDEN] words
    u32 tokens, rank, room;
};

FN u32x4 add_4(u32x4 a, u32x4 b) {
    return {as_u32(as_float(a.x) + as_float(b.x)), as_u32(as_float(a.y) + as_float(b.y)), as_u32(as_float(a.z) + as_float(b.z)),
            as_u32(as_float(a.w) + as_float(b.w))};
}

KERNEL(all_reduce, AllReduceLaunch) {
    let_next_grid_start();
    u32 token = block_index_y(), column = (block_index() * THREADS + thread_index()) * 4, place = token * HIDDEN + column;
    bool exists = column < HIDDEN;
    u32x4 gamma = {0, 0, 0, 0}, v = {0, 0, 0, 0}, old = {0, 0, 0, 0};
    if (exists) gamma = load_global_4(a.gamma + column);
#if RANKS > 1
    Ranks ranks = ranks_of(a, a.site);
    u32 owner = (token + block_index() + warp_index()) % RANKS;
#endif
    wait_for_previous_grid();
    if (exists) {
        v = load_global_4(a.partial + place);
        if (ROUTED) v = add_4(v, load_global_4(a.routed + place));
#if RANKS > 1
        send_part(ranks, owner, place, v);
#endif
        old = load_global_4(a.residual + place);
#if RANKS > 1
        v = all_reduce_words(ranks, owner, place, v);
#endif
        v = add_4(old, v);
        store_global_4(a.residual_out + place, v);
    }
    float now[4] = {as_float(v.x), as_float(v.y), as_float(v.z), as_float(v.w)}, square = 0.f;
    for (u32 i = 0; i < 4; i++) square += now[i] * now[i];
    u32x2 x = {pack_bf16(now[0] * as_float(gamma.x), now[1] * as_float(gamma.y)),
               pack_bf16(now[2] * as_float(gamma.z), now[3] * as_float(gamma.w))};
    if (column < HIDDEN_PADDED) store_global_2(a.x + token * HIDDEN_PADDED + column, x);
    square = warp_sum(square);
    if (lane_index() == 0) store_shared_f32(shared_base() + 4 * warp_index(), square);
    sync_block();
    if (thread_index() == 0) {
        float sum = 0.f;
        for (u32 i = 0; i < THREADS / 32; i++) sum += load_shared_f32(shared_base() + 4 * i);
        store_global_f32(a.squares + block_index() * ((a.tokens + 7) / 8 * 8) + token, sum);
    }
}
