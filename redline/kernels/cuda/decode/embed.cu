// Looks up rows of the embedding for T <= 64 tokens: the residual, x of the first norm, and its sums of squares
// (dense.py).
//
// A thread block has 128 columns of 8 tokens, a warp one token, a lane four columns. Macros: HIDDEN, HIDDEN_PADDED.
#include "core.cuh"

constexpr u32 COLUMNS = 128, TOKENS = THREADS / 32;

struct EmbedLaunch {
    const u64* ids;      // [T]
    const u16* table;    // bf16 [V, HIDDEN]
    const float* gamma;  // [HIDDEN]
    float* residual;     // [T, HIDDEN]
    u16* x;              // bf16 [T, HIDDEN_PADDED]
    float* squares;      // [blocks, T padded to 8]
    u32 tokens;
};

KERNEL(embed, EmbedLaunch) {
    let_next_grid_start();
    wait_for_previous_grid();
    u32 token = block_index_y() * TOKENS + warp_index(), column = block_index() * COLUMNS + 4 * lane_index();
    float v[4] = {}, square = 0.f;
    bool mine = token < a.tokens;
    if (mine && column < HIDDEN) {
        u32x2 id = load_global_2(a.ids + token);
        u32x2 row = load_global_2(a.table + ((u64)id.y << 32 | id.x) * HIDDEN + column);
        v[0] = bf16_lo(row.x), v[1] = bf16_hi(row.x), v[2] = bf16_lo(row.y), v[3] = bf16_hi(row.y);
        store_global_4(a.residual + token * HIDDEN + column, {as_u32(v[0]), as_u32(v[1]), as_u32(v[2]), as_u32(v[3])});
        u32x4 gamma = load_global_4(a.gamma + column);
        for (u32 i = 0; i < 4; i++) square += v[i] * v[i];
        v[0] *= as_float(gamma.x), v[1] *= as_float(gamma.y), v[2] *= as_float(gamma.z), v[3] *= as_float(gamma.w);
    }
    if (mine) store_global_2(a.x + token * HIDDEN_PADDED + column, {pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3])});
    square = warp_sum(square);
    if (lane_index() == 0) store_global_f32(a.squares + block_index() * ((a.tokens + TOKENS - 1) / TOKENS * TOKENS) + token, square);
}
