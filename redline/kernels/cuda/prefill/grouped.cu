// Experts times the tokens that chose them, for many tokens at once.        D hidden, I expert width.
//
// The weights are wgmma's a operand, from registers: each thread unpacks the codes that it multiplies, so a weight
// passes through shared memory once, in its stored form. The tokens are wgmma's columns: an expert's tokens are divided
// into tiles of up to WIDEST columns (sort_pairs.py), any multiple of 8, and a product's time is proportional to the
// number of columns.
//
// Four kernels: GATHER stores the tokens' x as columns; UP computes h = silu(gate) * up in the same layout; DOWN
// computes the weighted y of each pair; COMBINE adds the pairs of each token, in order.
//
// Columns. A tile of n columns is K / 64 pieces of n x 128 bytes. One bulk copy loads a piece, and one step multiplies
// it: 64 values of each column, in the swizzle of wgmma.cuh. Within each 32 values k = 8t + e is at 16 (e / 4) + 8 (e /
// 2 % 2) + 2t + e % 2, because lane t of a record (records.py) has the eight values e: so a weight's fragments are
// those of the lane that loaded it. In NVFP4 records a lane has four values of each 16: there k = 4t + e is at 8 (e /
// 2) + 2t + e % 2.
//
// Number formats. INT4 and NVFP4 are multiplied as f16. INT4: a 4-bit code times a bf16 scale has at most 11
// significant bits, so weights of at least 2^-14 are exact, and smaller ones have an error of at most 2^-25. NVFP4: a
// code times its block's scale is exact, and the matrix's scale multiplies the sums. x is the bf16 output of a norm, in
// f16's range. h may be large: it is stored divided by 16 and saturates at a million. BF16 weights, x and h are
// multiplied as bf16. Sums are float32, in the order of k.
//
// Macros: PART; FORMAT of the weights; for GATHER and COMBINE: INPUTS (D), PADDED_INPUTS, CHOSEN (pairs of a token),
// PADDED_OUTPUTS; for UP and DOWN: RECORD_INPUTS, SLICES, ROW_TILES, COPIED_TILES (consecutive row tiles of a slice
// that one copy loads), WEIGHT_STAGES, COLUMN_STAGES, WIDEST.
#include "expert_formats.cuh"
#include "nvfp4.cuh"
#include "wgmma.cuh"

#define GATHER 1
#define UP 2
#define DOWN 3
#define COMBINE 4

constexpr u32 PIECE_INPUTS = 64, COLUMN_BYTES = 2 * PIECE_INPUTS;  // of a step
constexpr float LARGEST_F16 = 65504.f, H_SCALE = FORMAT == BF16 ? 1.f : 1.f / 16;

// A tile's entry in the list of tiles. It describes all tiles of its expert, so they have equal entries.
struct Tile { u32 expert, first, tiles, row, width, rows; };

FN Tile load_tile(const int* tiles, u32 index) {
    const int* at = tiles + 8 * (1 + index);
    u32x4 v = load_global_4(at);
    u32x2 w = load_global_2(at + 4);
    return {v.x, v.y, v.z, v.w, w.x, w.y};
}
FN float clamp_f16(float v) { return -larger(-larger(v, -LARGEST_F16), -LARGEST_F16); }
FN u32 pack_f16_saturated(float lo, float hi) { return pack_f16(clamp_f16(lo), clamp_f16(hi)); }

#if PART == GATHER

struct GatherLaunch {
    const u16* x;        // bf16 [T, x_stride]
    const float* rstd;   // [T], or null: 1
    u8* columns_out;     // f16 or bf16, columns of x
    const int* columns;  // [rows][pair or -1, weight]
    const int* tiles;    // [1 + tiles][8]
    int x_stride, parts;
};

// Stores 32 inputs of a token in the column: `piece` is the column's 128 bytes, `half` which 64 of these.
FN void place(u8* piece, u32 half, u32 column, const u32x4 (&x)[4]) {
    const u32* words = (const u32*)x;  // [t][e / 2]
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
        u32x4 v = {words[i], words[4 + i], words[8 + i], words[12 + i]};
        if (FORMAT == NVFP4) {
            const u32* of = words + i / 2 * 8 + i % 2;
            v = {of[0], of[2], of[4], of[6]};
        }
        store_global_4(piece + 16 * ((4 * half + i) ^ (column & 7)), v);
    }
}

FN u32 convert(u32 pair, float rstd) {
    float lo = bf16_lo(pair) * rstd, hi = bf16_hi(pair) * rstd;
    return FORMAT == BF16 ? pack_bf16(lo, hi) : pack_f16_saturated(lo, hi);
}

// Block (tile, part of its columns); each warp copies one column after another.
KERNEL(gather, GatherLaunch) {
    let_next_grid_start();
    wait_for_previous_grid();
    if (block_index() >= load_global(a.tiles)) return;
    Tile tile = load_tile(a.tiles, block_index());
    u32 from = (block_index() - tile.first) * tile.width, width = smaller(tile.width, tile.rows - from);
    u8* out = a.columns_out + (u64)(tile.row + from) * PADDED_INPUTS * 2;
    for (u32 n = block_index_y() * (THREADS / 32) + warp_index(); n < width; n += a.parts * (THREADS / 32)) {
        int pair = (int)load_global(a.columns + 2 * (tile.row + from + n));
        if (pair < 0) continue;
        const u16* x = a.x + (u64)(pair / CHOSEN) * a.x_stride;
        float rstd = a.rstd ? load_global_f32(a.rstd + pair / CHOSEN) : 1.f;
        for (u32 i = lane_index(); i < PADDED_INPUTS / 32; i += 32) {
            u32x4 v[4] = {};
            if (32 * i < INPUTS) {
#pragma unroll
                for (u32 t = 0; t < 4; t++) {
                    u32x4 w = load_global_4(x + 32 * i + 8 * t);
                    v[t] = {convert(w.x, rstd), convert(w.y, rstd), convert(w.z, rstd), convert(w.w, rstd)};
                }
            }
            place(out + ((u64)(i / 2) * width + n) * COLUMN_BYTES, i & 1, n, v);
        }
    }
}

#elif PART == COMBINE

struct CombineLaunch {
    const u16* y;  // bf16 [pairs, PADDED_OUTPUTS], in the order of `store_y`
    float* out;    // [tokens, INPUTS]
    int tokens;
};

// A thread computes rows 16i + 4q .. + 3 and the four rows 8 below them.
KERNEL(combine, CombineLaunch) {
    let_next_grid_start();
    wait_for_previous_grid();
    u32 index = block_index() * THREADS + thread_index(), unit = index % (INPUTS / 8), token = index / (INPUTS / 8);
    if (token >= (u32)a.tokens) return;
    float upper[4] = {}, lower[4] = {};
#pragma unroll
    for (u32 k = 0; k < CHOSEN; k++) {
        u32x4 v = load_global_4(a.y + ((u64)token * CHOSEN + k) * PADDED_OUTPUTS + 8 * unit);
        upper[0] += bf16_lo(v.x), upper[1] += bf16_lo(v.y), upper[2] += bf16_lo(v.z), upper[3] += bf16_lo(v.w);
        lower[0] += bf16_hi(v.x), lower[1] += bf16_hi(v.y), lower[2] += bf16_hi(v.z), lower[3] += bf16_hi(v.w);
    }
    float* out = a.out + (u64)token * INPUTS + unit / 2 * 16 + unit % 2 * 4;
    store_global_4(out, {as_u32(upper[0]), as_u32(upper[1]), as_u32(upper[2]), as_u32(upper[3])});
    store_global_4(out + 8, {as_u32(lower[0]), as_u32(lower[1]), as_u32(lower[2]), as_u32(lower[3])});
}

#else

struct MultiplyExpertsLaunch {
    const u8* weights;     // records
    const u8* columns_in;  // of x or of h
    u8* out;               // columns of h, or y [pairs, 16 ROW_TILES]
    const int* columns;    // [rows][pair or -1, weight]
    int* tiles;            // [1 + tiles][8]; words 1 (UP) and 2 (DOWN) of the first row count started items
};

// 128 rows of an expert times one tile of columns: two warpgroups multiply; of the third, one thread copies weights,
// one copies columns, and one takes the next item from a counter that all thread blocks share. Width 0: no item is
// left.
struct Item { u32 expert, rows, row, width; };

constexpr u32 WARPS = 8, BLOCK_TILES = WARPS, ITEMS = 3;
constexpr u32 RECORD_PIECES = RECORD_INPUTS / PIECE_INPUTS, RECORD_SCALES = 8 * RECORD_INPUTS;
constexpr u32 RECORD_BYTES = FORMAT == BF16 ? 32 * RECORD_INPUTS : FORMAT == NVFP4 ? 9 * RECORD_INPUTS + 16 : 9 * RECORD_INPUTS;
constexpr u32 PIECES = SLICES * RECORD_PIECES, INPUTS = SLICES * RECORD_INPUTS;
constexpr u32 ROW_BLOCKS = ROW_TILES / BLOCK_TILES;
constexpr u64 EXPERT_BYTES = (u64)ROW_TILES * SLICES * RECORD_BYTES;
static_assert(ROW_TILES % BLOCK_TILES == 0 && BLOCK_TILES % COPIED_TILES == 0, "a block of rows is whole");

// Shared memory, from a multiple of 1024: the columns' ring, the tile of h, the weights' ring, each item's columns
// list.
constexpr u32 TILE_BYTES = WIDEST * COLUMN_BYTES, SLICE_BYTES = BLOCK_TILES * RECORD_BYTES;
constexpr u32 H_TILE = COLUMN_STAGES * TILE_BYTES, WEIGHTS = H_TILE + (PART == UP ? TILE_BYTES : 0);
constexpr u32 OWN_COLUMNS = WEIGHTS + WEIGHT_STAGES * SLICE_BYTES, ITEM = OWN_COLUMNS + ITEMS * 8 * WIDEST;
constexpr u32 BARRIERS = ITEM + ITEMS * 16;

// A position in a ring of stages.
template <u32 STAGES>
struct Cursor {
    u32 stage = 0, parity = 0;

    __device__ __forceinline__ void next() {
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
};

// Two mbarriers for each stage of a ring: `full`, and `free`, which completes when all readers have released the stage.
template <u32 FIRST>
struct Stages {
    u32 base;

    __device__ __forceinline__ u32 full(u32 stage) const { return base + BARRIERS + 16 * (FIRST + stage); }
    __device__ __forceinline__ u32 free(u32 stage) const { return full(stage) + 8; }
    __device__ __forceinline__ void make(u32 stages, u32 readers) const {
        for (u32 i = 0; i < stages; i++) barrier_init(full(i), 1), barrier_init(free(i), readers);
    }
    template <u32 N>
    __device__ __forceinline__ void wait_full(Cursor<N> at) const { barrier_wait(full(at.stage), at.parity); }
    template <u32 N>
    __device__ __forceinline__ void wait_free(Cursor<N> at) const { barrier_wait(free(at.stage), at.parity ^ 1); }
};
typedef Stages<0> WeightRing;
typedef Stages<WEIGHT_STAGES> ColumnRing;
typedef Stages<WEIGHT_STAGES + COLUMN_STAGES> ItemRing;

FN u32 weights_at(u32 base, u32 stage) { return base + WEIGHTS + stage * SLICE_BYTES; }
FN u32 columns_at(u32 base, u32 stage) { return base + stage * TILE_BYTES; }
FN u32 own_columns_at(u32 base, u32 stage) { return base + OWN_COLUMNS + stage * 8 * WIDEST; }

// ------------------------------------------------------------------------------------------------- the third warpgroup

// Item `index` of all. All tiles of an expert use a block of its rows before the next block of rows, so that its
// weights stay in the L2 cache.
FN Item find_item(const int* tiles, u32 index) {
    u32 nth = index / ROW_BLOCKS;
    Tile tile = load_tile(tiles, nth);
    u32 ours = (nth - tile.first) * ROW_BLOCKS + index % ROW_BLOCKS;
    u32 rows = ours / tile.tiles, from = ours % tile.tiles * tile.width;
    return {tile.expert, rows, tile.row + from, smaller(tile.width, tile.rows - from)};
}

FN void hand_out(const MultiplyExpertsLaunch& a, u32 base) {
    ItemRing ring = {base};
    u32 total = load_global(a.tiles) * ROW_BLOCKS;
    for (Cursor<ITEMS> at;; at.next()) {
        u32 index = add_global(a.tiles + (PART == UP ? 1 : 2), 1);
        Item item = {0, 0, 0, 0};
        if (index < total) item = find_item(a.tiles, index);
        ring.wait_free(at);
        store_shared_4(base + ITEM + 16 * at.stage, {item.expert, item.rows, item.row, item.width});
        if (PART == DOWN && item.width) {
            barrier_expect(ring.full(at.stage), 8 * item.width);
            copy_bulk(own_columns_at(base, at.stage), a.columns + 2 * item.row, 8 * item.width, ring.full(at.stage));
        } else
            barrier_arrive(ring.full(at.stage));
        if (!item.width) return;
    }
}

FN Item wait_item(u32 base, Cursor<ITEMS> at) {
    ItemRing{base}.wait_full(at);
    u32x4 v = load_shared_4(base + ITEM + 16 * at.stage);
    return {v.x, v.y, v.z, v.w};
}

FN void copy_weights(const MultiplyExpertsLaunch& a, u32 base) {
    WeightRing ring = {base};
    Cursor<WEIGHT_STAGES> stage;
    for (Cursor<ITEMS> at;; at.next()) {
        Item item = wait_item(base, at);
        if (!item.width) return;
        barrier_arrive(ItemRing{base}.free(at.stage));
        const u8* from = a.weights + item.expert * EXPERT_BYTES + (u64)item.rows * SLICES * SLICE_BYTES;
        for (u32 slice = 0; slice < SLICES; slice++, stage.next()) {
            ring.wait_free(stage);
            barrier_expect(ring.full(stage.stage), SLICE_BYTES);
            for (u32 i = 0; i < BLOCK_TILES / COPIED_TILES; i++)
                copy_bulk(weights_at(base, stage.stage) + i * COPIED_TILES * RECORD_BYTES,
                          from + (i * SLICES + slice) * COPIED_TILES * RECORD_BYTES, COPIED_TILES * RECORD_BYTES,
                          ring.full(stage.stage));
        }
    }
}

FN void copy_columns(const MultiplyExpertsLaunch& a, u32 base) {
    ColumnRing ring = {base};
    Cursor<COLUMN_STAGES> stage;
    for (Cursor<ITEMS> at;; at.next()) {
        Item item = wait_item(base, at);
        if (!item.width) return;
        barrier_arrive(ItemRing{base}.free(at.stage));
        const u8* from = a.columns_in + (u64)item.row * INPUTS * 2;
        u32 bytes = item.width * COLUMN_BYTES;
        for (u32 piece = 0; piece < PIECES; piece++, stage.next()) {
            ring.wait_free(stage);
            barrier_expect(ring.full(stage.stage), bytes);
            copy_bulk(columns_at(base, stage.stage), from + piece * bytes, bytes, ring.full(stage.stage));
        }
    }
}

// ------------------------------------------------------------------------------------ the two warpgroups that multiply

// A lane's part of its two rows, for 64 inputs.
#if FORMAT == BF16
struct Codes { u32x4 upper[2], lower[2]; };  // for 32 inputs each
#else
struct Codes {
    u32x4 words;
    u32x2 scales;
};
#endif
typedef u32 Fragments[4][4];  // the same as fragments of four MMAs

// A warp's positions in the rings, kept across items.
struct Place {
    u32 base;
    u32 piece = 0;  // of the slice
    Cursor<WEIGHT_STAGES> weights;
    Cursor<COLUMN_STAGES> columns;
    f32x2 matrix_scales = {1.f, 1.f};  // of NVFP4, for rows g and g + 8
};

// Called by a warp: releases a stage that it no longer reads.
FN void let_go(u32 barrier) {
    sync_warp();
    if (lane_index() == 0) barrier_arrive(barrier);
}

FN Codes load_codes(Place& at) {
    WeightRing ring = {at.base};
    if (at.piece == 0) ring.wait_full(at.weights);
    u32 record = weights_at(at.base, at.weights.stage) + warp_index() * RECORD_BYTES, lane = lane_index();
#if FORMAT == BF16
    u32 tiles = record + at.piece * 2048 + lane * 16;
    return {{load_shared_4(tiles), load_shared_4(tiles + 1024)}, {load_shared_4(tiles + 512), load_shared_4(tiles + 1536)}};
#else
    if (FORMAT == NVFP4 && at.piece == 0) at.matrix_scales = load_matrix_scales(record, RECORD_INPUTS);
    return {load_shared_4(record + at.piece * 512 + lane * 16),
            load_shared_2(record + RECORD_SCALES + at.piece * 64 + lane / 4 * 8)};
#endif
}

FN void next_piece(Place& at) {
    if (++at.piece < RECORD_PIECES) return;
    let_go(WeightRing{at.base}.free(at.weights.stage));
    at.piece = 0, at.weights.next();
}

#if FORMAT == BF16

FN void unpack(Fragments& a, const Codes& codes) {
#pragma unroll
    for (u32 half = 0; half < 2; half++) {
        u32x4 upper = codes.upper[half], lower = codes.lower[half];
        a[2 * half][0] = upper.x, a[2 * half][1] = lower.x, a[2 * half][2] = upper.y, a[2 * half][3] = lower.y;
        a[2 * half + 1][0] = upper.z, a[2 * half + 1][1] = lower.z, a[2 * half + 1][2] = upper.w, a[2 * half + 1][3] = lower.w;
    }
}

#elif FORMAT == NVFP4

FN void unpack(Fragments& a, Codes codes) {
    u32 words[4] = {codes.words.x, codes.words.y, codes.words.z, codes.words.w};
    Scales scales[2] = {widen_scales(codes.scales.x), widen_scales(codes.scales.y)};
#pragma unroll
    for (u32 q = 0; q < 4; q++) {
        Codes4 values = scaled(widen(words[q]), scales[q / 2], q % 2);
#pragma unroll
        for (u32 i = 0; i < 4; i++) a[q][i] = values.v[i];
    }
}

#else

// Codes at bits 0 and 16, and at 4 and 20, as f16: bit operations give 1024 + u and 1024 + 16 u, an FMA u - 8, exactly.
FN u32 low_codes(u32 w) { return multiply_add_f16(and_or<0x000f000f, 0x64006400>(w), 0x3c003c00, 0xe408e408); }
FN u32 high_codes(u32 w) { return multiply_add_f16(and_or<0x00f000f0, 0x64006400>(w), 0x2c002c00, 0xd480d480); }

FN void unpack(Fragments& a, Codes codes) {
    u32 words[4] = {codes.words.x, codes.words.y, codes.words.z, codes.words.w}, scales[2] = {codes.scales.x, codes.scales.y};
#pragma unroll
    for (u32 row = 0; row < 2; row++)
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            float scale = half ? bf16_hi(scales[row]) : bf16_lo(scales[row]);
            u32 word = words[2 * half + row], both = pack_f16(scale, scale);
            a[2 * half][row] = multiply_f16(low_codes(word), both);
            a[2 * half][2 + row] = multiply_f16(high_codes(word), both);
            a[2 * half + 1][row] = multiply_f16(low_codes(word >> 8), both);
            a[2 * half + 1][2 + row] = multiply_f16(high_codes(word >> 8), both);
        }
}

#endif

// Multiplies `now` while it unpacks `next`. Each warpgroup waits for its own MMAs; meanwhile the tensor cores run the
// other's.
template <u32 N>
FN void step(float (&sums)[N / 2], Fragments& now, Fragments& next, Place& at, bool last) {
    ColumnRing ring = {at.base};
    ring.wait_full(at.columns);
    u32 tile = columns_at(at.base, at.columns.stage);
    products_begin();
#pragma unroll
    for (u32 i = 0; i < 4; i++)
        if (FORMAT == BF16)
            multiply_bf16<N>(sums, now[i], tile, i);
        else
            multiply_f16<N>(sums, now[i], tile, i);
    products_commit();
    if (!last) {  // must remain a branch: otherwise the compiler moves the arithmetic behind the wait
        unpack(next, load_codes(at));
        next_piece(at);
    }
    settle(next);
    products_wait();
    settle(now);
    let_go(ring.free(at.columns.stage));
    at.columns.next();
}

template <u32 N>
FN void multiply(float (&sums)[N / 2], Place& at) {
    Fragments even, odd = {};
    unpack(even, load_codes(at));
    next_piece(at);
    for (u32 left = unknown(PIECES); left;) {
        step<N>(sums, even, odd, at, left == 1);
        if (--left == 0) break;
        step<N>(sums, odd, even, at, left == 1);
        --left;
    }
    settle(sums);
}

#if PART == UP

FN float gated(float gate, float up) {
    return gate * reciprocal_fast(1.f + exp2_fast(-1.44269504f * gate)) * up * H_SCALE;
}

// The item's 128 rows give 64 of h: one piece of a tile of columns. Row g of a record is gate, row g + 8 its up.
template <u32 N>
FN void finish(const MultiplyExpertsLaunch& a, const float (&sums)[N / 2], u32 base, u32, Item item) {
    u32 lane = lane_index(), g = lane >> 2, t = lane & 3, odd = g & 1, tile = base + H_TILE, warp = warp_index();
    u32 chunk = warp / 4 * 4 + g / 2, word_of = warp % 4;  // chunk of 8 values, and this lane's pair in it
    if (FORMAT == NVFP4) chunk = warp / 2 * 2 + g % 4 / 2, word_of = warp % 2 * 2 + g / 4;
    sync_threads(1, 32 * WARPS);  // all threads have copied the previous tile
#pragma unroll
    for (u32 j = 0; j < N / 8; j++) {
        float first = gated(sums[4 * j], sums[4 * j + 2]), second = gated(sums[4 * j + 1], sums[4 * j + 3]);
        // Lanes of rows g and g ^ 1 exchange values, so that each has both rows of one column.
        float given = shuffle_xor(odd ? first : second, 4);
        float lo = odd ? given : first, hi = odd ? second : given;
        u32 word = FORMAT == BF16 ? pack_bf16(lo, hi) : pack_f16_saturated(lo, hi), column = 8 * j + 2 * t + odd;
        store_shared(tile + column * COLUMN_BYTES + 16 * (chunk ^ (column & 7)) + 4 * word_of, word);
    }
    sync_threads(1, 32 * WARPS);
    u8* out = a.out + (u64)item.row * (8 * ROW_TILES * 2) + item.rows * N * COLUMN_BYTES;
    for (u32 i = thread_index(); i < N * (COLUMN_BYTES / 16); i += 32 * WARPS)
        store_global_4(out + 16 * i, load_shared_4(tile + 16 * i));
}

#else

// y of a pair is stored by 16 rows, and within these as [g][row g, row g + 8]: a thread has one word of it.
FN void store_y(u8* out, u32 pair, u32 weight, float upper, float lower) {
    if ((int)pair < 0) return;
    float w = as_float(weight) * (1.f / H_SCALE);
    store_global(out + (u64)pair * (16 * ROW_TILES * 2), pack_bf16(upper * w, lower * w));
}

template <u32 N>
FN void finish(const MultiplyExpertsLaunch& a, const float (&sums)[N / 2], u32 base, u32 stage, Item item) {
    u32 lane = lane_index(), g = lane >> 2, t = lane & 3;
    u8* out = a.out + (item.rows * BLOCK_TILES + warp_index()) * 32 + 4 * g;
#pragma unroll
    for (u32 j = 0; j < N / 8; j++) {
        u32x4 two = load_shared_4(own_columns_at(base, stage) + 8 * (8 * j + 2 * t));  // two pairs and weights
        store_y(out, two.x, two.y, sums[4 * j], sums[4 * j + 2]);
        store_y(out, two.z, two.w, sums[4 * j + 1], sums[4 * j + 3]);
    }
}

#endif

// Selects the wgmma instruction with the item's width; each width has its own loop.
template <u32 N>
FN void multiply_item(const MultiplyExpertsLaunch& a, Place& at, u32 stage, Item item) {
    if (item.width == N) {
        float sums[N / 2] = {};
        multiply<N>(sums, at);
        if (FORMAT == NVFP4)
#pragma unroll
            for (u32 i = 0; i < N / 2; i++) sums[i] *= ONE * (i % 4 < 2 ? at.matrix_scales.x : at.matrix_scales.y);
        finish<N>(a, sums, at.base, stage, item);
    } else if constexpr (N > 8)
        multiply_item<N - 8>(a, at, stage, item);
}

FN void consume(const MultiplyExpertsLaunch& a, u32 base) {
    Place at = {base};
    for (Cursor<ITEMS> items;; items.next()) {
        Item item = wait_item(base, items);
        if (!item.width) return;
        multiply_item<WIDEST>(a, at, items.stage, item);
        let_go(ItemRing{base}.free(items.stage));
    }
}

KERNEL(multiply_experts, MultiplyExpertsLaunch) {
    let_next_grid_start();
    u32 base = (shared_base() + 1023) & ~1023u, warp = warp_index();
    if (thread_index() == 0) {
        WeightRing{base}.make(WEIGHT_STAGES, WARPS);
        ColumnRing{base}.make(COLUMN_STAGES, WARPS);
        ItemRing{base}.make(ITEMS, WARPS + 2);
        barrier_init_done();
    }
    sync_block();
    wait_for_previous_grid();
    if (warp < WARPS) {
        consume(a, base);
    } else {
        if (lane_index()) return;
        if (warp == WARPS) copy_weights(a, base);
        if (warp == WARPS + 1) copy_columns(a, base);
        if (warp == WARPS + 2) hand_out(a, base);
    }
}

#endif
