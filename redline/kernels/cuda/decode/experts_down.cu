// residual += the routed experts' down projections + the shared expert's; also x and the sums of squares for the next
// norm.
//
// A thread block has a slab of 64 outputs and sums over all slots and over the shared expert, so that no sums are added
// across thread blocks. Each of the four groups of four warps processes every fourth piece of the work: first pieces of
// the shared expert (128 inputs), then of the slots (a slice of an expert, for up to PAIRS of its pairs). Warp q
// multiplies row tile q of the slab, one pair after the other. Other tokens in the batch change no bit of a token's
// result if an expert has a multiple of four slices, as Kimi's experts have, because the group that processes a slice
// then does not depend on the other slots.
//
// For BF16 weights the pairs of a piece are the columns of one MMA, and no sums are kept in registers.
//
// A slot's x is stored after its weights in the same stage. For few tokens (KEPT) sums are kept in registers, each lane
// its part, and the whole x of the shared expert is in shared memory; for more tokens sums are in shared memory, and
// the shared expert processes CHUNK tokens at a time.
//
// Macros. SLICES, SLICE: number of slices of an expert's width, and inputs of a slice. SHARED: the shared expert's
// width. HIDDEN, X: outputs, and the row length of x, which is zero from HIDDEN on. ROOM: the largest number of tokens.
// CHUNK: tokens of a chunk, up to 8. PAIRS: pairs of a stage. FORMAT: of the experts' weights, and so of h. RANKS,
// SHOTS: sums are all-reduced (all_reduce.cuh).
#include "expert_formats.cuh"
#include "all_reduce.cuh"
#include "ring.cuh"
#include "running_sum.cuh"
#if FORMAT == INT4
#include "int4_columns.cuh"
#elif FORMAT == NVFP4
#include "nvfp4_columns.cuh"
#elif FORMAT == BF16
#include "columns.cuh"
#endif

struct ExpertsDownLaunch {
    const char* weights;     // [E][X / 64][SLICES][4] records
    const char* shared;      // [X / 64][SHARED / 128][4][4] tiles
    const char* h;           // f16 or bf16 [pairs, SLICES SLICE]
    const char* shared_h;    // bf16 [T, SHARED]
    const int* pair_token;   // [pairs]
    const int* slot_expert;  // [slots]
    const int* slot_first;   // [slots + 1]
    const float* residual;   // [T, HIDDEN]
    const float* gamma;      // [HIDDEN]
    float* residual_out;     // [T, HIDDEN]
    char* x;                 // bf16 [T, X]
    float* squares;          // [X / 64, T padded to 8]
    u64 inbox_0, inbox_1, inbox_2, inbox_3, inbox_4, inbox_5, inbox_6, inbox_7;  // of RANKS ranks
    u64* control;  // described in all_reduce.cuh; null: there is one rank
    u64 site;                // the all-reduce's first word in an inbox: [rank][T][X] words
    int tokens, pairs, slots;
    u32 rank, room;
};

constexpr u32 GROUPS = SLICE / 32;
constexpr u32 RECORD = FORMAT == BF16 ? 32 * SLICE : FORMAT == NVFP4 ? 9 * SLICE + 16 : 9 * SLICE;
constexpr u32 PIECE = 16384;  // of the shared expert: 64 rows x 128 inputs
constexpr bool FEW = KEPT;
constexpr u32 CHUNKS = (ROOM + CHUNK - 1) / CHUNK;
constexpr u32 PIECES = SHARED / 128 * CHUNKS;
constexpr u32 X_AT = SHARED && PIECE > 4 * RECORD ? PIECE : 4 * RECORD;
constexpr u32 ROUTED_X = PAIRS * 2 * SLICE, SHARED_X = SHARED && !FEW ? CHUNK * 256 : 0;
constexpr u32 STAGE = X_AT + (ROUTED_X > SHARED_X ? ROUTED_X : SHARED_X);
constexpr u32 SHARED_ROW = 2 * SHARED + 64;     // 64 bytes of padding: rows of two tokens begin in different banks
static_assert(THREADS == 512 && X % 64 == 0 && (!FEW || CHUNKS == 1), "one slab to a block");
static_assert(FORMAT != BF16 || (SLICE == 128 && PAIRS == 8 && !FEW), "a product has eight columns");

using Stages = Ring<2, STAGE>;
constexpr u32 ROWS_AT = Stages::MEMORY;                  // of the shared expert's x
constexpr u32 ROWS_BARRIER = ROWS_AT + (SHARED && FEW ? ROOM * SHARED_ROW : 0);
constexpr u32 SUM_AT = FEW ? 0 : ROWS_BARRIER + 16;      // [16 warps][ROOM][16 rows] f32; if FEW, over the stages
constexpr u32 SQUARE_AT = FEW ? ROWS_BARRIER + 16 : SUM_AT + 16 * ROOM * 64;  // [ROOM][2] f32
constexpr u32 TOTALS_AT = SQUARE_AT + ROOM * 8;
constexpr u32 TOKEN_AT = TOTALS_AT + 64;                 // [pairs] u32
constexpr u32 ENTRY_AT = TOKEN_AT + 512 * 4;             // [pairs or fewer] Entry

FN u32 token_of(u32 pair) { return load_shared(shared_base() + TOKEN_AT + 4 * pair); }

// An expert and up to PAIRS of its pairs, which are a slot or a part of one, packed into a word.
struct Entry { u32 expert, first, pairs; };

FN u32 pack_entry(Entry e) { return e.expert | e.first << 10 | e.pairs << 20; }
FN Entry entry_of(u32 index) {
    u32 word = load_shared(shared_base() + ENTRY_AT + 4 * index);
    return {word & 1023, word >> 10 & 1023, word >> 20};
}

// Returns the number of entries. Reads the lists before this grid's wait: the choice of experts wrote them two grids
// ago, and `experts_up`, the grid between, calls let_next_grid_start only when they are complete.
FN u32 load_lists(const ExpertsDownLaunch& a) {
    u32 base = shared_base(), i = thread_index(), token = 0, expert = 0, first = 0, end = 0;
    if (i < a.pairs) token = load_global_fresh(a.pair_token + i);
    if (i < a.slots) {
        expert = load_global_fresh(a.slot_expert + i);
        first = load_global_fresh(a.slot_first + i), end = load_global_fresh(a.slot_first + i + 1);
    }
    if (i < a.pairs) store_shared(base + TOKEN_AT + 4 * i, token);
    u32 parts = (end - first + PAIRS - 1) / PAIRS, total, at = running_sum(parts, base + TOTALS_AT, total) - parts;
#pragma unroll 1
    for (; first < end; first += PAIRS)
        store_shared(base + ENTRY_AT + 4 * at++, pack_entry({expert, first, smaller(end - first, PAIRS)}));
    return total;
}

// Sums for few tokens: for each token this lane's part of rows g and g + 8 of the warp's row tile.
template <u32 TOKENS>
struct Sums {
    float upper[TOKENS] = {}, lower[TOKENS] = {};

    __device__ __forceinline__ void add(u32 token, float above, float below) {
#pragma unroll
        for (u32 i = 0; i < TOKENS; i++)
            if (TOKENS == 1 || i == token) upper[i] += above, lower[i] += below;
    }
};

FN u32 sum_place(u32 warp, u32 token, u32 row) { return shared_base() + SUM_AT + 64 * (warp * ROOM + token) + 4 * row; }

// Piece: of the shared expert if below PIECES, otherwise PIECES + entry * SLICES + slice.
struct Group {
    const ExpertsDownLaunch& a;
    Stages ring;
    u32 warp, end;
    Sums<FEW ? ROOM : 1> sums;

    // Announces the bytes of the stage to its barrier, and copies weights, which do not depend on the previous grid.
    __device__ __forceinline__ void fill_weights(u32 stage, u32 piece) const {
        u32 barrier = ring.barrier(stage), slab = block_index();
        if (piece < PIECES) {
            u32 n = FEW ? 0 : smaller(a.tokens - piece % CHUNKS * CHUNK, CHUNK);
            const char* from = a.shared + ((u64)slab * (PIECES / CHUNKS) + piece / CHUNKS) * PIECE;
            barrier_expect(barrier, PIECE + n * 256);
            copy_bulk(stage, from, PIECE, barrier, read_once());
        } else {
            Entry e = entry_of((piece - PIECES) / SLICES);
            constexpr u64 EXPERT = (u64)(X / 64) * SLICES * 4 * RECORD;
            const char* from = a.weights + (slab * SLICES + (piece - PIECES) % SLICES) * (u64)(4 * RECORD);
            barrier_expect(barrier, 4 * RECORD + e.pairs * 2 * SLICE);
            copy_bulk(stage, from + e.expert * EXPERT, 4 * RECORD, barrier, read_once());
        }
    }
    __device__ __forceinline__ void fill_x(u32 stage, u32 piece) const {
        u32 barrier = ring.barrier(stage), to = stage + X_AT;
        if (piece >= PIECES) {
            Entry e = entry_of((piece - PIECES) / SLICES);
            const char* from = a.h + 2 * SLICE * (e.first * SLICES + (piece - PIECES) % SLICES);
#pragma unroll 1
            for (u32 i = 0; i < e.pairs; i++)
                copy_bulk(to + 2 * SLICE * i, from + 2 * SLICES * SLICE * i, 2 * SLICE, barrier);
        } else if (!FEW) {
            u32 first = piece % CHUNKS * CHUNK, n = smaller(a.tokens - first, CHUNK);
#pragma unroll 1
            for (u32 i = 0; i < n; i++)
                copy_bulk(to + 256 * i, a.shared_h + 2 * ((first + i) * SHARED + piece / CHUNKS * 128), 256, barrier);
        }
    }
    // Called when the warp has read its part of the current stage, which held `piece`. The ring has two stages, so the
    // group's second piece after it refills the stage.
    __device__ __forceinline__ void release(u32 piece) {
        sync_warp();
        u32 next = piece + 8;
        if (next < end && lane_index() == 0 && ring.is_last(ring.stage))
            fill_weights(ring.stage, next), fill_x(ring.stage, next);
        ring.next();
    }

    // Sums for many tokens.
    __device__ __forceinline__ void add_shared_sums(u32 token, u32 row, float v) const {
        u32 at = sum_place(warp, token, row);
        store_shared_f32(at, load_shared_f32(at) + v);
    }
    // Adds to rows g and g + 8 of columns 2t and 2t + 1, in two independent sums: 128 inputs; `weights` is this lane's
    // address, x that of column g.
    __device__ __forceinline__ void multiply_tiles(float (&c)[4], float (&d)[4], u32 weights, u32 x, u32 t) {
#pragma unroll
        for (u32 u = 0; u < 4; u++) {
            u32x4 upper = load_shared_4(weights + u * 1024), lower = load_shared_4(weights + u * 1024 + 512);
            u32x4 v = load_shared_4(x + 64 * u + 16 * t);
            mma_bf16(c, upper.x, lower.x, upper.y, lower.y, v.x, v.y);
            mma_bf16(d, upper.z, lower.z, upper.w, lower.w, v.z, v.w);
        }
    }
    // The columns are the chunk's tokens.
    __device__ __forceinline__ void multiply_shared(u32 piece, float (&c)[4], float (&d)[4]) {
        u32 lane = forget(lane_index()), g = lane >> 2, t = lane & 3, first = piece % CHUNKS * CHUNK;
        u32 weights = ring.wait() + warp % 4 * (PIECE / 4) + lane * 16, token = g < CHUNK && first + g < a.tokens ? g : 0;
        u32 x = FEW ? shared_base() + ROWS_AT + token * SHARED_ROW + 256 * piece : ring.stage + X_AT + 256 * token;
        multiply_tiles(c, d, weights, x, t);
        release(piece);
    }
    // All pieces of the shared expert, from `piece` on. `piece` is passed by value here and to `release`: if this loop
    // runs once, ptxas 12.8 to 13.1 takes the next piece from the register of the piece before it.
    __device__ __forceinline__ void run_shared(u32 piece) {
        u32 lane = forget(lane_index()), g = lane >> 2, t = lane & 3;
        if constexpr (FEW) {
            float c[4] = {}, d[4] = {};
#pragma unroll 1
            for (; piece < PIECES; piece += 4) multiply_shared(piece, c, d);
#pragma unroll
            for (u32 i = 0; i < ROOM; i++) {  // moves the sums to the first lane of a row, for every token
                u32 upper = shuffle(as_u32(c[i % 2] + d[i % 2]), 4 * g + i / 2);
                u32 lower = shuffle(as_u32(c[2 + i % 2] + d[2 + i % 2]), 4 * g + i / 2);
                if (t == 0) sums.upper[i] = as_float(upper), sums.lower[i] = as_float(lower);
            }
        } else {
#pragma unroll 1
            for (; piece < PIECES; piece += 4) {
                float c[4] = {}, d[4] = {};
                multiply_shared(piece, c, d);
#pragma unroll
                for (u32 i = 0; i < 4; i++) {
                    u32 mine = 2 * t + i % 2, token = piece % CHUNKS * CHUNK + mine;
                    if (mine < CHUNK && token < a.tokens) add_shared_sums(token, g + i / 2 * 8, c[i] + d[i]);
                }
            }
        }
    }
#if FORMAT == BF16
    // The columns are the pairs.
    __device__ __forceinline__ void multiply_entry(u32 piece) {
        Entry e = entry_of((piece - PIECES) / SLICES);
        u32 lane = forget(lane_index()), g = lane >> 2, t = lane & 3;
        float c[4] = {}, d[4] = {};
        u32 weights = ring.wait() + warp % 4 * RECORD + lane * 16;
        multiply_tiles(c, d, weights, ring.stage + X_AT + 2 * SLICE * (g < e.pairs ? g : 0), t);
        release(piece);
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            u32 mine = 2 * t + i % 2;
            if (mine < e.pairs) add_shared_sums(token_of(e.first + mine), g + i / 2 * 8, c[i] + d[i]);
        }
    }
#else
    __device__ __forceinline__ void multiply_entry(u32 piece) {
        Entry e = entry_of((piece - PIECES) / SLICES);
        u32 token = token_of(e.first), t = forget(lane_index()) & 3, row = (forget(lane_index()) >> 2) + t % 2 * 8;
        u32 record = ring.wait() + warp % 4 * RECORD, x = ring.stage + X_AT;
#pragma unroll 1
        for (u32 i = 0;; x += 2 * SLICE) {
            Columns c;
            float upper, lower;
            bool last = PAIRS == 1 || ++i == e.pairs;
            load_columns<GROUPS>(c, x);
            multiply_columns<GROUPS>(record, c, upper, lower, [&] { if (last) release(piece); });
            if constexpr (FEW) {
                sums.add(token, upper * ONE, lower * ONE);
            } else {
                float sum = fold(upper, lower);
                if (t < 2) add_shared_sums(token, row, sum * ONE);
            }
            if (last) break;
            token = token_of(e.first + i);
        }
    }
#endif
    // Stores the sums of few tokens to where the sums of many tokens are.
    __device__ __forceinline__ void store_sums() const {
        u32 lane = forget(lane_index()), g = lane >> 2, t = lane & 3;
#pragma unroll
        for (u32 i = 0; i < (FEW ? ROOM : 1); i++) {
            float sum = fold(sums.upper[i], sums.lower[i]);
            if (t < 2) store_shared_f32(sum_place(warp, i, g + t * 8), sum);
        }
    }
};

// The sum over the four groups, in their order.
FN float sum_of(u32 token, u32 row) {
    float sum = 0;
#pragma unroll
    for (u32 group = 0; group < 4; group++) sum += load_shared_f32(sum_place(4 * group + row / 16, token, row % 16));
    return sum;
}

KERNEL(experts_down, ExpertsDownLaunch) {
    let_next_grid_start();
    u32 base = shared_base(), thread = thread_index(), warp = warp_index(), column = block_index() * 64 + thread % 64;
    bool leader = thread % 128 == 0, exists = column < HIDDEN;
    Group group = {a, Stages(base, warp / 4), warp};
    u32 piece = warp / 4, second = group.ring.last;
    if (thread == 0) barrier_init(base + ROWS_BARRIER);
    // Copies of weights start before the previous grid has ended, those of the shared expert before the lists of
    // experts are read.
    if (leader) {
        group.ring.make();
        if (piece < PIECES) group.fill_weights(group.ring.stage, piece);
        if (piece + 4 < PIECES) group.fill_weights(second, piece + 4);
    }
    float gamma = exists ? load_global_f32(a.gamma + column) : 0.f;
    u32 end = PIECES + load_lists(a) * SLICES;
    if (!FEW)
        for (u32 i = thread; i < 16 * ROOM * 16; i += THREADS) store_shared(base + SUM_AT + 4 * i, 0);
    sync_block();
    if (leader && piece >= PIECES && piece < end) group.fill_weights(group.ring.stage, piece);
    if (leader && piece + 4 >= PIECES && piece + 4 < end) group.fill_weights(second, piece + 4);

    wait_for_previous_grid();
    if (SHARED && FEW && thread == 0) {
        barrier_expect(base + ROWS_BARRIER, a.tokens * 2 * SHARED);
        for (u32 i = 0; i < a.tokens; i++)
            copy_bulk(base + ROWS_AT + i * SHARED_ROW, a.shared_h + 2 * SHARED * i, 2 * SHARED, base + ROWS_BARRIER);
    }
    if (leader && piece < end) group.fill_x(group.ring.stage, piece);
    if (leader && piece + 4 < end) group.fill_x(second, piece + 4);
    float old = exists && thread < a.tokens * 64 ? load_global_f32(a.residual + thread / 64 * HIDDEN + column) : 0.f;
    group.end = end;
    if (SHARED && FEW) barrier_wait(base + ROWS_BARRIER, 0);
    group.run_shared(piece);
    piece = forget(thread_index()) / 128;
    if (piece < PIECES) piece += (PIECES - piece + 3) / 4 * 4;
#pragma unroll 1
    for (; piece < end; piece += 4) group.multiply_entry(piece);
    sync_block();
    if (FEW) group.store_sums(), sync_block();

    thread = forget(thread_index()), column = block_index() * 64 + thread % 64, exists = column < HIDDEN;
    // A thread has one column of every STEP-th token.
    constexpr u32 STEP = THREADS / 64, MINE = (ROOM + STEP - 1) / STEP;
    u32 first = thread / 64, count = first < a.tokens ? (a.tokens - first + STEP - 1) / STEP : 0, places[MINE], sums[MINE];
    float before[MINE] = {old};
#if RANKS > 1
    Ranks ranks = ranks_of(a, a.site);
    u32 owner = (first + block_index()) % RANKS;
#endif
#pragma unroll
    for (u32 n = 0; n < MINE; n++) {
        u32 token = first + n * STEP;
        places[n] = token * X + column, sums[n] = n < count ? as_u32(sum_of(token, thread % 64)) : 0;
#if RANKS > 1
        if (n < count) send_part(ranks, owner, places[n], sums[n]);
#endif
        if (n && n < count && exists) before[n] = load_global_f32(a.residual + token * HIDDEN + column);
    }
#if RANKS > 1
    all_reduce_words(ranks, owner, places, count, sums);
#endif
#pragma unroll
    for (u32 n = 0; n < MINE; n++) {
        if (n >= count) break;
        u32 token = first + n * STEP;
        float now = exists ? before[n] + as_float(sums[n]) : 0.f;
        if (exists) store_global_f32(a.residual_out + token * HIDDEN + column, now);
        store_global_u16(a.x + 2 * places[n], f32_to_bf16(now * gamma));
        float square = warp_sum(now * now);
        if (lane_index() == 0) store_shared_f32(base + SQUARE_AT + 8 * token + 4 * (warp % 2), square);
    }
    sync_block();
    u32 columns = (a.tokens + 7) / 8 * 8;
    if (thread < columns) {
        u32 at = base + SQUARE_AT + 8 * thread;
        float sum = thread < a.tokens ? load_shared_f32(at) + load_shared_f32(at + 4) : 0.f;
        store_global_f32(a.squares + block_index() * columns + thread, sum);
    }
}
