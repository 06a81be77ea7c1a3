// y = W x for T <= 8 tokens: the dense products of a decode step, with their epilogues.        N outputs, K inputs.
//
// The weights stream once through shared memory, in tiles of 16 outputs x 32 inputs (layouts/tiled.py): a tile is the
// 16 rows of mma.sync, the tokens are its 8 columns. 8-bit integers are stored in tiles of 16 x 64 and are converted to
// bf16 in registers, exactly; a row's scale is applied to its sum. K is divided among WARPS_PER_TILE warps, each of
// which keeps its part of x in registers for the whole kernel.
//
// Four warps are a group with its own ring of stages. One bulk copy fills a stage with a piece of UNITS tiles for each
// of the four warps, in the order of memory. The last of the four warps to finish a stage starts the copy that refills
// it, so no warp waits for a free stage. Copies into the first stages start before the previous grid has ended. x is
// then loaded at the end of shared memory, and the stages that it overlaps are filled once x is in registers.
//
// A column's sums depend on its own x alone: they are added in order of K within a warp, then over the warps. So a
// token has the same bits whatever the number of tokens.
//
// Macros: INPUTS (K, padded), ALL_INPUTS (inputs of a row in memory: more than INPUTS if K is divided among ranks),
// BITS (of a weight, 16 or 8), RING (bytes before the ring), WARPS_PER_TILE, UNITS, STAGES, FREE_STAGES (stages that x
// does not overlap), EARLY_STAGES (stages filled before the previous grid has ended), COLUMNS (1, 2, 4 or 8 >= T),
// SLICES (parts of K whose x is in registers one after the other), TILES (tiles whose sums a warp keeps), ROW_TILES,
// BATCHED (there are more tiles than that, which are processed in batches), EPILOGUE and its sizes; and byte offsets in
// shared memory: X_AT, SUMS_AT (BATCHED: space for two batches), OPERANDS_AT (0: none). RANKS: of PROJECT_A and
// PROJECT_OUT, whose epilogues contain an all-reduce (all_reduce.cuh).
#include "core.cuh"
#include "all_reduce.cuh"

#define PROJECT_A 1
#define PROJECT_Q 2
#define PROJECT_OUT 3
#define GATES 4
#define HEAD 5
#define HEAD_8 6

constexpr u32 TILE_ROWS = 16, TILE_BYTES = 1024, TILE_INPUTS = TILE_BYTES * 8 / BITS / TILE_ROWS;
constexpr u32 MOST_TOKENS = 8, MOST_PARTS = 256;
#if EPILOGUE == GATES && CHOSEN
#include "choose.cuh"
#endif
constexpr u32 WARPS = THREADS / 32, GROUPS = WARPS / 4;
constexpr u32 TILES_AT_ONCE = WARPS / WARPS_PER_TILE, K_GROUPS = WARPS_PER_TILE / 4;
constexpr u32 SLICE_INPUTS = INPUTS / SLICES;
constexpr u32 SHARE = SLICE_INPUTS / TILE_INPUTS / WARPS_PER_TILE;  // units (a tile's inputs) of a warp, in a slice
constexpr u32 UNIT_X = TILE_INPUTS / 8;                             // registers of x that a lane has for a unit
constexpr u32 PIECES = SHARE / UNITS;
constexpr u32 PIECE_BYTES = UNITS * TILE_BYTES, STAGE_BYTES = 4 * PIECE_BYTES;
constexpr u32 X_BYTES = SLICE_INPUTS * 2, X_STRIDE = X_BYTES + 64;  // 64: rows of two tokens begin in different banks
constexpr u32 SUMS_BYTES = TILE_ROWS * COLUMNS * 4;                 // of a warp and a tile
constexpr u32 BATCH = TILES * TILES_AT_ONCE;                        // tiles whose sums are kept at the same time
static_assert(PIECES * UNITS * WARPS_PER_TILE * SLICES * TILE_INPUTS == INPUTS, "K comes apart into pieces");
static_assert(SLICES == 1 || (FREE_STAGES == STAGES && !BATCHED), "x of the next slice needs a room of its own");
static_assert(EARLY_STAGES <= FREE_STAGES && FREE_STAGES <= STAGES, "stages");
static_assert(BATCH * 64 <= THREADS, "a thread finishes two rows for one token");

// Shared memory: barriers and small sums, the ring [stage][group], x [token], the warps' sums. After the last stage has
// been read, the sums may overwrite the ring.
constexpr u32 BARRIERS = 0, X_BARRIER = GROUPS * STAGES * 16, RSTD = X_BARRIER + 16;
constexpr u32 SQUARES = RSTD + 4 * MOST_TOKENS, ROW_SQUARES = SQUARES + WARPS * 4 * MOST_TOKENS;
static_assert(ROW_SQUARES + 4 * WARPS <= RING, "the small things fit");

// ------------------------------------------------------------------------------------------------------ the epilogues
//
// Each epilogue defines: Arguments, a struct with a unique name; NORMED, whether the factor 1 / rms of x is applied to
// the sums; HALVES, whether a thread finishes rows i and i + 8 of a tile, or neighbouring rows; `load_operands`, which
// loads what two rows need in addition to their sums while the weights arrive; `finish`, which returns the row's
// contribution to the sum of squares; and additional work (`Side`): `begin_side` runs when the previous grid has ended,
// `share_side` before a block-wide barrier, `end_side` after it.

// Zeros in columns [from, to) of out [tokens, to].
FN void pad_columns(u16* out, u32 from, u32 to, u32 tokens) {
    for (u32 i = thread_index(); i < tokens * (to - from); i += THREADS)
        store_global_u16(out + i / (to - from) * to + from + i % (to - from), 0);
}
FN void store_bf16_pair(u16* at, float lo, float hi) { store_global(at, pack_bf16(lo, hi)); }
FN void store_f32_pair(float* at, float lo, float hi) { store_global_2(at, {as_u32(lo), as_u32(hi)}); }

// All-reduces the sums of two rows for one token.
template <class Launch>
FN void add_ranks(const Launch& a, u32 row, u32 token, float& lo, float& hi) {
#if RANKS > 1
    Ranks ranks = ranks_of(a, a.site);
    u32 place = (row / 2 * MOST_TOKENS + token) * 2;
    u32x2 sum = {as_u32(lo), as_u32(hi)};
    send_part(ranks, token % RANKS, place, sum);
    sum = all_reduce_words(ranks, token % RANKS, place, sum);
    lo = as_float(sum.x), hi = as_float(sum.y);
#endif
}

#if EPILOGUE == PROJECT_A
// RANK_Q rows of queries (rows of q are padded to RANK_Q_PADDED), then OUTPUTS - RANK_Q rows of latent and key.
struct ProjectALaunch {
    const u8* weights;     // bf16 [ROW_TILES, ALL_INPUTS / 32, 16, 32], from this rank's INPUTS on
    const u8* x;           // bf16 [T, ALL_INPUTS], from this rank's INPUTS on
    const float* squares;  // [parts, 8]
    const float* gamma;    // [RANK_Q]
    u16* q;                // bf16 [T, RANK_Q_PADDED]
    float* squares_out;    // [blocks, 8]
    float* kv;             // [T, OUTPUTS - RANK_Q]
    u64 inbox_0, inbox_1, inbox_2, inbox_3, inbox_4, inbox_5, inbox_6, inbox_7;  // of RANKS ranks
    u64* control;  // described in all_reduce.cuh; null: there is one rank, or each rank multiplies all inputs
    u64 site;      // the all-reduce's first word in an inbox: [rank][OUTPUTS / 2][8][2] words
    u32 tokens, parts, rank, room;
    float eps;
};
using Arguments = ProjectALaunch;
constexpr bool NORMED = true, HALVES = false;

FN u32x4 load_operands(const Arguments& a, u32 row, u32) {
    if (row >= RANK_Q) return {0, 0, 0, 0};
    u32x2 gamma = load_global_2(a.gamma + row);
    return {gamma.x, gamma.y, 0, 0};
}
FN float finish(const Arguments& a, u32 row, u32 token, float lo, float hi, float rstd, u32x4 gamma) {
    add_ranks(a, row, token, lo, hi);
    lo *= rstd, hi *= rstd;
    if (row >= RANK_Q) {
        store_f32_pair(a.kv + token * (OUTPUTS - RANK_Q) + row - RANK_Q, lo, hi);
        return 0.f;
    }
    store_bf16_pair(a.q + token * RANK_Q_PADDED + row, lo * as_float(gamma.x), hi * as_float(gamma.y));
    return lo * lo + hi * hi;
}

struct Side {};
FN Side begin_side(const Arguments&) { return {}; }
FN void share_side(const Arguments&, const Side&) {}
FN void end_side(const Arguments& a, const Side&) {
    if (RANK_Q < RANK_Q_PADDED && block_index() == 0) pad_columns(a.q, RANK_Q, RANK_Q_PADDED, a.tokens);
}
#endif

#if EPILOGUE == PROJECT_Q
// Heads of NOPE + ROPE rows. In addition block t writes token t's row of the KV cache: [latent, normed (RANK) | key,
// rotated (ROPE)].
#define PLANE_BF16 1
#define PLANE_F32 2
#define PLANE_E4M3 3
struct ProjectQLaunch {
    const u8* weights;     // bf16 [ROW_TILES, INPUTS / 32, 16, 32]
    const u8* x;           // bf16 [T, INPUTS]
    const float* squares;  // [parts, 8]
    const float* kv;       // [T, RANK + ROPE]
    const float* gamma;    // [RANK]
    const float* cos;      // [T, ROPE / 2]
    const float* sin;      // [T, ROPE / 2]
    const u64* rows;       // [T]: page * 64 + place
    u8* plane;             // bf16, float32 or e4m3 [pages, 64, RANK + ROPE]; pages are page_stride apart
    u16* q;                // bf16 [T, OUTPUTS]
    u32 tokens, parts;
    u32 page_stride;  // bytes from the start of a page to the next
    float eps;
};
using Arguments = ProjectQLaunch;
constexpr bool NORMED = true, HALVES = false;

FN f32x2 load_angle(const Arguments& a, u32 token, u32 pair) {  // cosine and sine
    u32 at = token * (ROPE / 2) + pair;
    return {load_global_f32(a.cos + at), load_global_f32(a.sin + at)};
}
FN f32x2 rotate(f32x2 v, f32x2 angle) { return {v.x * angle.x - v.y * angle.y, v.x * angle.y + v.y * angle.x}; }
FN bool is_rotated(u32 row) { return row % (NOPE + ROPE) >= NOPE; }
FN u32x4 load_operands(const Arguments& a, u32 row, u32 token) {
    if (!is_rotated(row)) return {0, 0, 0, 0};
    f32x2 angle = load_angle(a, token, (row % (NOPE + ROPE) - NOPE) / 2);
    return {as_u32(angle.x), as_u32(angle.y), 0, 0};
}
FN float finish(const Arguments& a, u32 row, u32 token, float lo, float hi, float rstd, u32x4 angle) {
    f32x2 v = {lo * rstd, hi * rstd};
    if (is_rotated(row)) v = rotate(v, {as_float(angle.x), as_float(angle.y)});
    store_bf16_pair(a.q + token * OUTPUTS + row, v.x, v.y);
    return 0.f;
}

// A thread has two neighbouring numbers of the row, and their gammas, or their cosine and sine.
struct Side {
    f32x2 pair, factors;
    u32x2 row;
};
constexpr u32 ROW = RANK + ROPE, PAGE = 64;
constexpr u32 VALUE_BYTES = PLANE == PLANE_BF16 ? 2 : PLANE == PLANE_F32 ? 4 : 1;
static_assert(ROW / 2 <= THREADS, "a thread has at most one pair of a page's row");
FN bool has_row_pair(const Arguments& a) { return block_index() < a.tokens && thread_index() < ROW / 2; }
FN Side begin_side(const Arguments& a) {
    Side side = {{0.f, 0.f}, {0.f, 0.f}, {0, 0}};
    if (!has_row_pair(a)) return side;
    u32 token = block_index(), first = 2 * thread_index();
    u32x2 v = load_global_2(a.kv + token * ROW + first);
    side.row = load_global_2(a.rows + token);
    if (first < RANK) {
        u32x2 gamma = load_global_2(a.gamma + first);
        side.factors = {as_float(gamma.x), as_float(gamma.y)};
    } else
        side.factors = load_angle(a, token, (first - RANK) / 2);
    side.pair = {as_float(v.x), as_float(v.y)};
    return side;
}
FN void share_side(const Arguments& a, const Side& side) {
    if (block_index() >= a.tokens) return;
    f32x2 v = side.pair;
    float sum = warp_sum(thread_index() < RANK / 2 ? v.x * v.x + v.y * v.y : 0.f);
    if (lane_index() == 0) store_shared_f32(shared_base() + ROW_SQUARES + 4 * warp_index(), sum);
}
FN void store_row_pair(u8* at, f32x2 v) {
    if (PLANE == PLANE_BF16) store_global(at, pack_bf16(v.x, v.y));
    if (PLANE == PLANE_F32) store_global_2(at, {as_u32(v.x), as_u32(v.y)});
    if (PLANE == PLANE_E4M3) store_global_u16(at, pack_e4m3(v.x, v.y));
}
FN void end_side(const Arguments& a, const Side& side) {
    if (!has_row_pair(a)) return;
    u32 first = 2 * thread_index();
    f32x2 v = side.pair;
    if (first < RANK) {
        float sum = 0.f;
        for (u32 warp = 0; warp < WARPS; warp++) sum += load_shared_f32(shared_base() + ROW_SQUARES + 4 * warp);
        float rstd = reciprocal_root(sum / RANK + a.eps);
        v = {v.x * rstd * side.factors.x, v.y * rstd * side.factors.y};
    } else
        v = rotate(v, side.factors);
    u64 row = (u64)side.row.y << 32 | side.row.x;
    store_row_pair(a.plane + row / PAGE * a.page_stride + (row % PAGE * ROW + first) * VALUE_BYTES, v);
}
#endif

#if EPILOGUE == PROJECT_OUT
// OUTPUTS = D; x_out has rows of OUTPUTS_PADDED.
struct ProjectOutLaunch {
    const u8* weights;      // bf16 [ROW_TILES, INPUTS / 32, 16, 32]
    const u8* x;            // bf16 [T, INPUTS]
    const float* squares;   // null: x is not normed
    const float* residual;  // [T, OUTPUTS]
    const float* gamma;     // [OUTPUTS]
    float* residual_out;    // [T, OUTPUTS]
    u16* x_out;             // bf16 [T, OUTPUTS_PADDED]
    float* squares_out;     // [blocks, 8]
    u64 inbox_0, inbox_1, inbox_2, inbox_3, inbox_4, inbox_5, inbox_6, inbox_7;  // of RANKS ranks
    u64* control;  // described in all_reduce.cuh; null: there is one rank
    u64 site;               // the all-reduce's first word in an inbox: [rank][OUTPUTS / 2][8][2] words
    u32 tokens, parts, rank, room;
    float eps;
};
using Arguments = ProjectOutLaunch;
constexpr bool NORMED = false, HALVES = false;

FN u32x4 load_operands(const Arguments& a, u32 row, u32 token) {
    u32x2 before = load_global_2(a.residual + token * OUTPUTS + row), gamma = load_global_2(a.gamma + row);
    return {before.x, before.y, gamma.x, gamma.y};
}
FN float finish(const Arguments& a, u32 row, u32 token, float lo, float hi, float, u32x4 operands) {
    add_ranks(a, row, token, lo, hi);
    lo += as_float(operands.x), hi += as_float(operands.y);
    store_f32_pair(a.residual_out + token * OUTPUTS + row, lo, hi);
    store_bf16_pair(a.x_out + token * OUTPUTS_PADDED + row, lo * as_float(operands.z), hi * as_float(operands.w));
    return lo * lo + hi * hi;
}

struct Side {};
FN Side begin_side(const Arguments&) { return {}; }
FN void share_side(const Arguments&, const Side&) {}
FN void end_side(const Arguments& a, const Side&) {
    if (OUTPUTS < OUTPUTS_PADDED && block_index() == 0) pad_columns(a.x_out, OUTPUTS, OUTPUTS_PADDED, a.tokens);
}
#endif

#if EPILOGUE == GATES
// EXPERTS rows of router logits, padded to whole tiles; then tiles of 8 rows of gate and the same 8 of up, WIDTH of
// each.
//
// With CHOSEN > 0 this kernel also selects CHOSEN experts for each token, and the next kernel waits only for that. So
// logits come first, in units: one group's part of K of a tile. Units are divided among all thread blocks, and each
// block computes its units before its own tiles. The last block has no tiles: it waits for all units, adds the parts
// and selects experts while the others multiply. No flags are needed for units: minus zero marks a word that has not
// been stored, and its reader resets it.
struct GatesLaunch {
    const u8* weights;     // bf16 [ROW_TILES, INPUTS / 32, 16, 32]
    const u8* x;           // bf16 [T, INPUTS]
    const float* squares;  // [parts, 8]
    float* logits;         // [T, EXPERTS]
    u16* h;                // bf16 [T, WIDTH_PADDED]
    float* rstd;           // [8]
    // Used only if this kernel selects experts, otherwise null.
    u32* notes;          // for exchange among blocks: NOTES words, then [K_GROUPS, T, ROUTER_ROWS] logits, not normed
    const float* bias;   // [EXPERTS] or null
    const int* forced;   // [T, CHOSEN] or null
    int* pair_token;     // [T CHOSEN]
    float* pair_weight;  // [T CHOSEN]
    int* slot_expert;    // [slots]
    int* slot_first;     // [slots + 1]
    int* count;          // [1]
    int* ids;            // [T, CHOSEN]
    float* shares;       // [T, CHOSEN]
    int* origin;         // [T CHOSEN]
    u32 tokens, parts, slots, normalise;
    float eps, scale;
};
using Arguments = GatesLaunch;
constexpr bool NORMED = true, HALVES = true;
constexpr u32 ROUTER_ROWS = (EXPERTS + TILE_ROWS - 1) / TILE_ROWS * TILE_ROWS;
constexpr u32 TAKEN_BACK = 0, READY = 1, NOTES = 4;  // words of notes: 1 after READY was reset; 1 after choosing

FN u32x4 load_operands(const Arguments&, u32, u32) { return {0, 0, 0, 0}; }
FN float finish(const Arguments& a, u32 row, u32 token, float lo, float hi, float rstd, u32x4) {
    lo *= rstd, hi *= rstd;
    if (row >= ROUTER_ROWS) {
        u32 column = (row - ROUTER_ROWS) / TILE_ROWS * 8 + row % 8;
        store_global_u16(a.h + token * WIDTH_PADDED + column, f32_to_bf16(silu(lo) * hi));
        return 0.f;
    }
    if (row < EXPERTS) store_global_f32(a.logits + token * EXPERTS + row, lo);
    if (row + 8 < EXPERTS) store_global_f32(a.logits + token * EXPERTS + row + 8, hi);
    return 0.f;
}

struct Side {};
FN Side begin_side(const Arguments&) { return {}; }
FN void share_side(const Arguments&, const Side&) {}
FN void end_side(const Arguments& a, const Side&) {
    if (block_index()) return;
    u32 i = thread_index();
    float rstd = i < a.tokens ? load_shared_f32(shared_base() + RSTD + 4 * i) : 0.f;
    if (i < MOST_TOKENS) store_global_f32(a.rstd + i, rstd);
    if (WIDTH < WIDTH_PADDED) pad_columns(a.h, WIDTH, WIDTH_PADDED, a.tokens);
}
#endif

#if EPILOGUE == HEAD
struct HeadLaunch {
    const u8* weights;     // bf16 [ROW_TILES, INPUTS / 32, 16, 32]
    const u8* x;           // bf16 [T, INPUTS]
    const float* squares;  // [parts, 8]
    float* logits;         // [T, OUTPUTS]
    u32 tokens, parts;
    float eps;
};
using Arguments = HeadLaunch;
constexpr bool NORMED = true, HALVES = false;

FN u32x4 load_operands(const Arguments&, u32, u32) { return {0, 0, 0, 0}; }
FN float finish(const Arguments& a, u32 row, u32 token, float lo, float hi, float rstd, u32x4) {
    store_f32_pair(a.logits + (u64)token * OUTPUTS + row, lo * rstd, hi * rstd);
    return 0.f;
}

struct Side {};
FN Side begin_side(const Arguments&) { return {}; }
FN void share_side(const Arguments&, const Side&) {}
FN void end_side(const Arguments&, const Side&) {}
#endif

#if EPILOGUE == HEAD_8
struct Head8Launch {
    const u8* weights;     // int8 [ROW_TILES, INPUTS / 64, 16, 64]
    const u8* x;           // bf16 [T, INPUTS]
    const float* squares;  // null: x is normed already
    const float* scales;   // [OUTPUTS]
    float* logits;         // [T, OUTPUTS]
    u32 tokens, parts;
    float eps;
};
using Arguments = Head8Launch;
constexpr bool NORMED = false, HALVES = false;

FN u32x4 load_operands(const Arguments& a, u32 row, u32) {
    u32x2 scales = load_global_2(a.scales + row);
    return {scales.x, scales.y, 0, 0};
}
FN float finish(const Arguments& a, u32 row, u32 token, float lo, float hi, float, u32x4 scales) {
    store_f32_pair(a.logits + (u64)token * OUTPUTS + row, lo * as_float(scales.x), hi * as_float(scales.y));
    return 0.f;
}

struct Side {};
FN Side begin_side(const Arguments&) { return {}; }
FN void share_side(const Arguments&, const Side&) {}
FN void end_side(const Arguments&, const Side&) {}
#endif

// --------------------------------------------------------------------------------------------------------- the stream

// A thread block's row tiles. Blocks with one tile more are spread evenly among the others, which balances the load on
// the GPU.
struct Run { u32 first, end; };
FN Run share_out(u32 tiles, u32 block, u32 blocks) { return {block * tiles / blocks, (block + 1) * tiles / blocks}; }

#if EPILOGUE == GATES && CHOSEN
constexpr bool CHOOSES = true;
constexpr u32 LOGIT_TILES = ROUTER_ROWS / TILE_ROWS, LOGIT_UNITS = LOGIT_TILES * K_GROUPS;
// With several blocks, the last one has no tiles other than logits. If the rest does not divide evenly, the first
// blocks have one tile more.
FN bool is_last_block() { return block_index() + 1 == grid_size(); }
FN Run run_of_block() {
    u32 tiles = ROW_TILES - LOGIT_TILES, block = block_index(), blocks = grid_size() - (grid_size() > 1);
    if (block == blocks) return {ROW_TILES, ROW_TILES};
    u32 each = tiles / blocks, more = tiles % blocks, first = LOGIT_TILES + block * each + smaller(block, more);
    return {first, first + each + (block < more)};
}
// One unit for each of the last blocks; blocks have several only if there are more units than blocks.
FN Run units_of_block() {
    u32 block = block_index(), blocks = grid_size();
    if (LOGIT_UNITS > blocks) return share_out(LOGIT_UNITS, block, blocks);
    u32 without = blocks - LOGIT_UNITS;
    return block < without ? Run{0, 0} : Run{block - without, block - without + 1};
}
#else
constexpr bool CHOOSES = false;
FN Run run_of_block() { return share_out(ROW_TILES, block_index(), grid_size()); }
FN Run units_of_block() { return {0, 0}; }
#endif

// The pieces that a group reads, in order: units of logits; then slice by slice, and within a slice tile by tile.
struct Walk {
    const u8* weights;
    u32 first, count;  // first row tile, and the number of tiles: every TILES_AT_ONCE-th
    u32 k_group;
    u32 unit, units_end;     // the next unit; every K_GROUPS-th is this group's
    u32 slice, tile, piece;  // the next ones
};
FN Walk begin_walk(const u8* weights, Run run, Run units) {
    u32 first = run.first + warp_index() / WARPS_PER_TILE;
    u32 count = first < run.end ? (run.end - first + TILES_AT_ONCE - 1) / TILES_AT_ONCE : 0;
    u32 k_group = warp_index() % WARPS_PER_TILE / 4;
    u32 unit = units.first + (k_group + K_GROUPS - units.first % K_GROUPS) % K_GROUPS;
    if (warp_index() >= WARPS_PER_TILE) unit = units.end;  // the first K_GROUPS groups have all units
    return {weights, first, count, k_group, unit, units.end, count ? 0u : SLICES, 0, 0};
}
FN bool is_at_units(const Walk& w) { return CHOOSES && w.unit < w.units_end; }
FN bool is_left(const Walk& w) { return is_at_units(w) || w.slice < SLICES; }
FN const u8* place(const Walk& w) {
    u32 tile = is_at_units(w) ? w.unit / K_GROUPS : w.first + w.tile * TILES_AT_ONCE;
    u32 unit = ((w.slice % SLICES * K_GROUPS + w.k_group) * PIECES + w.piece) * 4 * UNITS;
    return w.weights + (u64)(tile * (ALL_INPUTS / TILE_INPUTS) + unit) * TILE_BYTES;
}
FN void advance(Walk& w) {
    if (++w.piece < PIECES) return;
    w.piece = 0;
    if (is_at_units(w)) {
        w.unit += K_GROUPS;
        return;
    }
    if (++w.tile < w.count) return;
    w.tile = 0;
    w.slice++;
}

struct Ring {
    u32 stages, barriers;  // of this warp's group
    u32 stage, parity;     // the next stage to be read
    u64 policy;
};
FN Ring begin_ring() {
    u32 group = warp_index() / 4;
    return {shared_base() + RING + group * STAGE_BYTES, shared_base() + BARRIERS + group * STAGES * 16, 0, 0, read_once()};
}
FN void make_barriers() {
    if (thread_index() == 0) {
        for (u32 i = 0; i < GROUPS * STAGES; i++) {
            barrier_init(shared_base() + BARRIERS + 16 * i);
            store_shared(shared_base() + BARRIERS + 16 * i + 8, 0);
        }
        barrier_init(shared_base() + X_BARRIER);
        barrier_init_done();
    }
    sync_block();
}
FN void fill(const Ring& ring, u32 stage, const u8* from) {
    u32 barrier = ring.barriers + 16 * stage;
    barrier_expect(barrier, STAGE_BYTES);
    copy_bulk(ring.stages + stage * (GROUPS * STAGE_BYTES), from, STAGE_BYTES, barrier, ring.policy);
}
FN void fill_first(const Ring& ring, Walk& wanted, u32 first, u32 end) {
    for (u32 stage = first; stage < end && is_left(wanted); stage++) {
        if (thread_index() % 128 == 0) fill(ring, stage, place(wanted));
        advance(wanted);
    }
}
// Called when this warp has read its stage. The last of the four warps refills it.
FN void release(Ring& ring, Walk& wanted) {
    sync_warp();
    if (is_left(wanted)) {
        if (lane_index() == 0 && (add_shared(ring.barriers + 16 * ring.stage + 8, 1) & 3) == 3)
            fill(ring, ring.stage, place(wanted));
        advance(wanted);
    }
    if (++ring.stage == STAGES) {
        ring.stage = 0;
        ring.parity ^= 1;
    }
}

// ---------------------------------------------------------------------------------------------------------- x, 1 / rms

FN void request_x(const Arguments& a, u32 slice) {
    u32 barrier = shared_base() + X_BARRIER;
    barrier_expect(barrier, a.tokens * X_BYTES);
    for (u32 token = 0; token < a.tokens; token++)
        copy_bulk(shared_base() + X_AT + token * X_STRIDE, a.x + token * (2 * ALL_INPUTS) + slice * X_BYTES, X_BYTES, barrier);
}
// Loads the warp's fragments: lane 4g + t has the t-th quarter of each of the warp's units, of token g.
FN void read_x(u32 (&x)[SHARE][UNIT_X], u32 tokens) {
    u32 token = lane_index() / 4, k_group = warp_index() % WARPS_PER_TILE / 4, place = warp_index() % 4;
    u32 at = shared_base() + X_AT + token * X_STRIDE + lane_index() % 4 * (4 * UNIT_X);
#pragma unroll
    for (u32 i = 0; i < SHARE; i++) {
        u32 unit = ((k_group * PIECES + i / UNITS) * 4 + place) * UNITS + i % UNITS;
#pragma unroll
        for (u32 j = 0; j < UNIT_X; j += 4) {
            u32x4 v = {0, 0, 0, 0};
            if (token < tokens) v = load_shared_4(at + unit * (16 * UNIT_X) + 4 * j);
            x[i][j] = v.x, x[i][j + 1] = v.y, x[i][j + 2] = v.z, x[i][j + 3] = v.w;
        }
    }
}
// Loads a slice's x into registers; then fills the stages that x overlapped.
FN void take_x(const Arguments& a, u32 (&x)[SHARE][UNIT_X], Ring& ring, Walk& wanted, u32 slice) {
    barrier_wait(shared_base() + X_BARRIER, slice & 1);
    read_x(x, a.tokens);
    if (SLICES > 1 || FREE_STAGES < STAGES) sync_block();
    if (slice + 1 < SLICES && thread_index() == 0) request_x(a, slice + 1);
    fill_first(ring, wanted, FREE_STAGES, STAGES);
}
// Warp i computes 1 / rms of token i: squares [parts][8], each lane adds its parts in order.
FN void make_rstd(const Arguments& a) {
    u32 token = warp_index();
    if (token >= a.tokens) return;
    float part[MOST_PARTS / 32], sum = 0.f;
#pragma unroll
    for (u32 i = 0; i < MOST_PARTS / 32; i++) {
        u32 index = lane_index() + 32 * i;
        part[i] = index < a.parts ? load_global_f32(a.squares + index * MOST_TOKENS + token) : 0.f;
    }
#pragma unroll
    for (u32 i = 0; i < MOST_PARTS / 32; i++) sum += part[i];
    sum = warp_sum(sum);
    if (lane_index() == 0) store_shared_f32(shared_base() + RSTD + 4 * token, reciprocal_root(sum / NORM_INPUTS + a.eps));
}

// --------------------------------------------------------------------------------------------------------- the product

#if BITS == 8
// Multiplies four integers by two registers of x. `upper` is of row g, `lower` of row g + 8.
FN void multiply_four(float (&c)[4], u32 upper, u32 lower, u32 x0, u32 x1) {
    mma_bf16(c, widen_s8<0>(upper), widen_s8<0>(lower), widen_s8<1>(upper), widen_s8<1>(lower), x0, x1);
}
#endif
// Multiplies UNITS tiles by the fragments from x on.
FN void multiply_piece(float (&even)[4], float (&odd)[4], u32 piece, const u32 (*x)[UNIT_X]) {
    u32 at = piece + lane_index() * 16;
#pragma unroll
    for (u32 i = 0; i < UNITS; i++) {
        u32x4 top = load_shared_4(at + i * TILE_BYTES), bottom = load_shared_4(at + i * TILE_BYTES + TILE_BYTES / 2);
#if BITS == 8
        multiply_four(even, top.x, bottom.x, x[i][0], x[i][1]);
        multiply_four(odd, top.y, bottom.y, x[i][2], x[i][3]);
        multiply_four(even, top.z, bottom.z, x[i][4], x[i][5]);
        multiply_four(odd, top.w, bottom.w, x[i][6], x[i][7]);
#else
        mma_bf16(even, top.x, bottom.x, top.y, bottom.y, x[i][0], x[i][1]);
        mma_bf16(odd, top.z, bottom.z, top.w, bottom.w, x[i][2], x[i][3]);
#endif
    }
}
// Multiplies one tile by the warp's slice of x, and adds to `sum`.
FN void multiply_tile(float (&sum)[4], const u32 (&x)[SHARE][UNIT_X], Ring& ring, Walk& wanted) {
    float even[4] = {}, odd[4] = {};
#pragma unroll
    for (u32 piece = 0; piece < PIECES; piece++) {
        barrier_wait(ring.barriers + 16 * ring.stage, ring.parity);
        u32 stage = ring.stages + ring.stage * (GROUPS * STAGE_BYTES);
        multiply_piece(even, odd, stage + warp_index() % 4 * PIECE_BYTES, x + piece * UNITS);
        release(ring, wanted);
    }
#pragma unroll
    for (u32 i = 0; i < 4; i++) sum[i] += even[i] + odd[i];
}

// A warp's sums are stored as [row][column].
FN u32 sums_at(u32 batch, u32 warp, u32 tile) {
    u32 buffer = BATCHED ? batch & 1 : 0;
    return shared_base() + SUMS_AT + ((buffer * WARPS + warp) * TILES + tile) * SUMS_BYTES;
}
FN void keep_sums(u32 at, const float (&sum)[4]) {
    u32 row = lane_index() / 4, column = lane_index() % 4 * 2;
    if (column >= COLUMNS) return;
#pragma unroll
    for (u32 half = 0; half < 2; half++) {
        u32 place = at + ((row + 8 * half) * COLUMNS + column) * 4;
        if (COLUMNS == 1)
            store_shared_f32(place, sum[2 * half]);
        else
            store_shared_2(place, {as_u32(sum[2 * half]), as_u32(sum[2 * half + 1])});
    }
}
FN float total(u32 at, u32 row, u32 column) {
    float sum = 0.f;
#pragma unroll
    for (u32 warp = 0; warp < WARPS_PER_TILE; warp++)
        sum += load_shared_f32(at + warp * (TILES * SUMS_BYTES) + (row * COLUMNS + column) * 4);
    return sum;
}
// What a thread finishes of a batch: two rows of a tile for one token.
struct Item {
    bool exists;
    u32 tile, lo, hi;  // tile of the batch, rows of the tile
    u32 row, token;    // row: the first of the two, of the whole weight
};
FN Item item_of(const Arguments& a, Run run, u32 batch) {
    u32 token = thread_index() % MOST_TOKENS, pair = thread_index() / MOST_TOKENS % 8, tile = thread_index() / 64;
    u32 lo = HALVES ? pair : 2 * pair, hi = HALVES ? pair + 8 : lo + 1;
    u32 row_tile = run.first + batch * BATCH + tile, row = row_tile * TILE_ROWS + lo;
    bool exists = tile < BATCH && row_tile < run.end && token < a.tokens && row < OUTPUTS;
    return {exists, tile, lo, hi, row, token};
}
FN u32 operands_at(const Item& item) {
    return shared_base() + OPERANDS_AT + (thread_index() / MOST_TOKENS * COLUMNS + item.token) * 16;
}
// `early`: the operands, if ASKED_EARLY. Returns the thread's contribution to the sums of squares.
constexpr bool ASKED_EARLY = EPILOGUE == HEAD_8;  // it has many short batches
FN float finish_batch(const Arguments& a, Run run, u32 batch, u32x4 early) {
    Item item = item_of(a, run, batch);
    if (!item.exists) return 0.f;
    u32x4 operands = OPERANDS_AT   ? load_shared_4(operands_at(item))
                     : ASKED_EARLY ? early
                                   : load_operands(a, item.row, item.token);
    float rstd = NORMED ? load_shared_f32(shared_base() + RSTD + 4 * item.token) : 1.f;
    u32 at = sums_at(batch, item.tile % TILES_AT_ONCE * WARPS_PER_TILE, item.tile / TILES_AT_ONCE);
    return finish(a, item.row, item.token, total(at, item.lo, item.token), total(at, item.hi, item.token), rstd, operands);
}
// Stores this block's part of squares [parts][8], from the rows that its threads finished; thread i has token i % 8.
FN void store_squares(float* squares_out, float squares) {
    u32 room = shared_base() + SQUARES;
    squares += shuffle_xor(squares, 8);
    squares += shuffle_xor(squares, 16);
    if (lane_index() < MOST_TOKENS) store_shared_f32(room + (warp_index() * MOST_TOKENS + lane_index()) * 4, squares);
    sync_block();
    if (thread_index() >= MOST_TOKENS) return;
    float sum = 0.f;
    for (u32 warp = 0; warp < BATCH * 64 / 32; warp++)
        sum += load_shared_f32(room + (warp * MOST_TOKENS + thread_index()) * 4);
    store_global_f32(squares_out + block_index() * MOST_TOKENS + thread_index(), sum);
}

#if EPILOGUE == GATES && CHOSEN
static_assert(SLICES == 1, "units are multiplied with all of x");
static_assert(16 * COLUMNS <= 128 && SUMS_BYTES <= PIECE_BYTES, "a group finishes a unit at once, in the place of a stage");

// Called by block 0: resets READY before the next grid, which waits for it, may start.
FN void take_back_choice(const Arguments& a) {
    if (thread_index() == 0) {
        store_global(a.notes + READY, 0);
        show_all();
        store_global_fresh(a.notes + TAKEN_BACK, 1);
    }
    sync_block();
    let_next_grid_start();
}
FN u32* logit_at(const Arguments& a, u32 k_group, u32 token, u32 expert) {
    return a.notes + NOTES + (k_group * a.tokens + token) * ROUTER_ROWS + expert;
}
// Called by a group: one unit; its four partial sums are added in the stage that was read last.
FN void multiply_unit(const Arguments& a, u32 unit, const u32 (&x)[SHARE][UNIT_X], Ring& ring, Walk& wanted) {
    float even[4] = {}, odd[4] = {}, sum[4];
    u32 group = warp_index() / 4, thread = thread_index() % 128, stage = 0;
#pragma unroll
    for (u32 piece = 0; piece < PIECES; piece++) {
        barrier_wait(ring.barriers + 16 * ring.stage, ring.parity);
        stage = ring.stages + ring.stage * (GROUPS * STAGE_BYTES);
        multiply_piece(even, odd, stage + warp_index() % 4 * PIECE_BYTES, x + piece * UNITS);
        if (piece + 1 < PIECES) release(ring, wanted);
    }
#pragma unroll
    for (u32 i = 0; i < 4; i++) sum[i] = even[i] + odd[i];
    sync_warp();
    keep_sums(stage + warp_index() % 4 * PIECE_BYTES, sum);
    writes_before_copies();
    sync_threads(1 + group, 128);
    u32 row = thread / COLUMNS, token = thread % COLUMNS;
    if (row < TILE_ROWS && token < a.tokens) {
        float part = 0.f;
#pragma unroll
        for (u32 warp = 0; warp < 4; warp++) part += load_shared_f32(stage + warp * PIECE_BYTES + thread * 4);
        u32 of_all = unit / K_GROUPS * TILE_ROWS + row;
        if (of_all < EXPERTS) store_global_fresh(logit_at(a, unit % K_GROUPS, token, of_all), sent(as_u32(part)));
    }
    sync_threads(1 + group, 128);
    release(ring, wanted);
}

struct InRoom {
    u32 at;  // [T, EXPERTS]
    __device__ __forceinline__ float operator()(u32 token, u32 expert) const {
        return load_shared_f32(at + 4 * (token * EXPERTS + expert));
    }
};
// Called by the last block, in the place of its ring.
FN void choose_of_all(const Arguments& a) {
    u32 room = shared_base() + RING, logits = room + CHOOSING_BYTES;
    sync_block();  // all groups have finished reading stages
    if (thread_index() == 0) {
        while (load_global_fresh(a.notes + TAKEN_BACK) != 1) wait_a_little();
        store_global(a.notes + TAKEN_BACK, 0);
    }
    for (u32 i = thread_index(); i < a.tokens * EXPERTS; i += THREADS) {
        u32 token = i / EXPERTS, row = i % EXPERTS, part[K_GROUPS];
        while (true) {
            bool missing = false;
#pragma unroll
            for (u32 k = 0; k < K_GROUPS; k++) part[k] = load_global_fresh(logit_at(a, k, token, row));
#pragma unroll
            for (u32 k = 0; k < K_GROUPS; k++) missing |= is_unsent(part[k]);
            if (!missing) break;
            wait_a_little();
        }
        float sum = 0.f;
#pragma unroll
        for (u32 k = 0; k < K_GROUPS; k++) sum += as_float(part[k]), store_global_fresh(logit_at(a, k, token, row), UNSENT);
        sum *= load_shared_f32(shared_base() + RSTD + 4 * token);
        store_shared_f32(logits + 4 * i, sum);
        store_global_f32(a.logits + i, sum);
    }
    sync_block();
    choose(a, InRoom{logits}, room);
    show_all();
    sync_block();
    if (thread_index() == 0) store_global_fresh(a.notes + READY, 1);
}
static_assert(RING + CHOOSING_BYTES + 4 * MOST_TOKENS * EXPERTS <= X_AT + X_BYTES, "choosing has room in the ring and x's place");
#endif

KERNEL(dense, Arguments) {
#if EPILOGUE == GATES && CHOSEN
    if (block_index()) let_next_grid_start();
#else
    let_next_grid_start();
#endif
    make_barriers();
    Run run = run_of_block();
    Ring ring = begin_ring();
    Walk wanted = begin_walk(a.weights, run, units_of_block());
    u32 unit = wanted.unit;
    fill_first(ring, wanted, 0, EARLY_STAGES);
    wait_for_previous_grid();
    if (thread_index() == 0) request_x(a, 0);
#if EPILOGUE == GATES && CHOSEN
    if (block_index() == 0) take_back_choice(a);
#endif
    fill_first(ring, wanted, EARLY_STAGES, FREE_STAGES);
    Item item = item_of(a, run, 0);
    u32x4 operands = {0, 0, 0, 0};
    if (OPERANDS_AT && item.exists) operands = load_operands(a, item.row, item.token);
    Side side = begin_side(a);
    if (NORMED) make_rstd(a);
    if (OPERANDS_AT && item.exists) store_shared_4(operands_at(item), operands);

    u32 x[SHARE][UNIT_X];
    u32 count = wanted.count, batches = (run.end - run.first + BATCH - 1) / BATCH;
    float squares = 0.f;
    if (SLICES == 1) take_x(a, x, ring, wanted, 0);
#if EPILOGUE == GATES && CHOSEN
    for (; unit < wanted.units_end; unit += K_GROUPS) multiply_unit(a, unit, x, ring, wanted);
#endif
    for (u32 batch = 0; batch < batches; batch++) {
        float sums[TILES][4] = {};
        u32x4 early = {0, 0, 0, 0};
        if (ASKED_EARLY && item_of(a, run, batch).exists) early = load_operands(a, item_of(a, run, batch).row, 0);
        for (u32 slice = 0; slice < SLICES; slice++) {
            if (SLICES > 1) take_x(a, x, ring, wanted, slice);
#pragma unroll
            for (u32 tile = 0; tile < TILES; tile++)
                if (batch * TILES + tile < count) multiply_tile(sums[tile], x, ring, wanted);
        }
        if (!BATCHED) sync_block();  // the sums overwrite the ring
#pragma unroll
        for (u32 tile = 0; tile < TILES; tile++) keep_sums(sums_at(batch, warp_index(), tile), sums[tile]);
        if (batch == 0) share_side(a, side);
        sync_block();
        if (batch == 0) end_side(a, side);
        squares += finish_batch(a, run, batch, early);
    }
#if EPILOGUE == PROJECT_A || EPILOGUE == PROJECT_OUT
    store_squares(a.squares_out, squares);
#elif EPILOGUE == GATES && CHOSEN
    if (is_last_block()) choose_of_all(a);
#endif
}
