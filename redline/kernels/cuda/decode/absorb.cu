// Multiplies the nope part of each query by W_UK, which takes it into the latent space (q_abs = W_UK q), and copies its
// rotated part: see absorb.py.
//
// A thread block loads one half of one head's rows of W_UK into shared memory before the previous grid ends: 64 KB for
// R = 512, N = 128, so no ring is needed. The warps share the row tiles of 16; the columns of an MMA are 8 tokens.
#include "core.cuh"

constexpr u32 UNITS = N / 32;                 // of 32 inputs: two MMAs each
constexpr u32 TILES = R / 2 / 16;             // row tiles of a thread block
constexpr u32 TILE_BYTES = UNITS * 1024;
constexpr u32 WEIGHT_BYTES = TILES * TILE_BYTES;
constexpr u32 COPY_BYTES = 16384;
constexpr u32 QUERY_BYTES = 2 * (N + P), ABSORBED_BYTES = 2 * (R + P);
constexpr u32 WARPS = THREADS / 32;

struct AbsorbLaunch {
    const char* q;       // bf16 [T, H, N + P]
    const char* weight;  // bf16 [H, R / 16, N / 32, 16, 32]
    char* absorbed;      // bf16 [T, H, R + P]
    int tokens, heads;
};

// Lane 4g + t loads 16 bytes of token `first` + g for each unit. Columns past the last token are computed but not
// stored.
FN void load_columns(u32x4 (&x)[UNITS], const AbsorbLaunch& a, u32 head, u32 first) {
    u32 token = smaller(first + lane_index() / 4, a.tokens - 1);
    const char* at = a.q + ((u64)token * a.heads + head) * QUERY_BYTES + 16 * (lane_index() % 4);
    for (u32 u = 0; u < UNITS; u++) x[u] = load_global_4(at + 64 * u);
}

FN void multiply(float (&c)[4], const u32x4 (&x)[UNITS], u32 tile) {
    u32 at = tile + 64 * (lane_index() / 4) + 16 * (lane_index() % 4);
    for (u32 u = 0; u < UNITS; u++) {
        u32x4 upper = load_shared_4(at + 1024 * u), lower = load_shared_4(at + 1024 * u + 512);
        mma_bf16(c, upper.x, lower.x, upper.y, lower.y, x[u].x, x[u].y);
        mma_bf16(c, upper.z, lower.z, upper.w, lower.w, x[u].z, x[u].w);
    }
}

// c: rows g and g + 8, tokens 2t and 2t + 1. Lanes g and g ^ 1 exchange values, so that each holds two rows of one
// token.
FN void store_tile(const AbsorbLaunch& a, const float (&c)[4], u32 head, u32 row, u32 first) {
    u32 g = lane_index() / 4, t = lane_index() % 4;
    bool odd = g & 1;
    float upper = shuffle_xor(odd ? c[0] : c[1], 4), lower = shuffle_xor(odd ? c[2] : c[3], 4);
    u32 token = first + 2 * t + odd;
    if (token >= (u32)a.tokens) return;
    char* at = a.absorbed + ((u64)token * a.heads + head) * ABSORBED_BYTES + 2 * (row + (g & 6));
    store_global(at, odd ? pack_bf16(upper, c[1]) : pack_bf16(c[0], upper));
    store_global(at + 16, odd ? pack_bf16(lower, c[3]) : pack_bf16(c[2], lower));
}

FN void copy_rotated(const AbsorbLaunch& a, u32 head) {
    constexpr u32 CHUNKS = P / 8;
    for (u32 i = thread_index(); i < a.tokens * CHUNKS; i += THREADS) {
        u64 row = (u64)(i / CHUNKS) * a.heads + head;
        u32 chunk = 16 * (i % CHUNKS);
        store_global_4(a.absorbed + row * ABSORBED_BYTES + 2 * R + chunk, load_global_4(a.q + row * QUERY_BYTES + 2 * N + chunk));
    }
}

KERNEL_BESIDE(absorb, AbsorbLaunch, 2) {
    u32 head = block_index(), half = block_index_y(), weights = shared_base(), barrier = weights + WEIGHT_BYTES;
    if (thread_index() == 0) {
        const char* from = a.weight + (u64)(2 * head + half) * WEIGHT_BYTES;
        u64 policy = read_once();
        barrier_init(barrier);
        barrier_init_done();
        barrier_expect(barrier, WEIGHT_BYTES);
        for (u32 i = 0; i < WEIGHT_BYTES; i += COPY_BYTES)
            copy_bulk(weights + i, from + i, smaller(COPY_BYTES, WEIGHT_BYTES - i), barrier, policy);
    }
    sync_block();
    wait_for_previous_grid();
    let_next_grid_start();  // only now: `attend` reads pages, which the previous grid has written, before its own wait
    u32x4 x[UNITS], next[UNITS];
    load_columns(x, a, head, 0);
    if (half == 0) copy_rotated(a, head);
    barrier_wait(barrier, 0);
    for (u32 first = 0; first < (u32)a.tokens; first += 8) {
        load_columns(next, a, head, first + 8);
        for (u32 tile = warp_index(); tile < TILES; tile += WARPS) {
            float c[4] = {};
            multiply(c, x, weights + tile * TILE_BYTES);
            store_tile(a, c, head, half * (R / 2) + 16 * tile, first);
        }
        for (u32 u = 0; u < UNITS; u++) x[u] = next[u];
    }
}
