// Absorbed latent attention over pages: scores, softmax and weighted latents of one split, for one query or for
// TOGETHER queries of a slot: see attend.py.
//
// A thread block has ROWS heads of the query or queries, and a run of pages. Queries, pages and probabilities are
// stored in shared memory in 16-byte chunks, chunk c of row r at c ^ (r % 8): rows are multiples of 128 bytes long, and
// with this swizzle the eight rows of a tile use all banks. Pages are copied asynchronously chunk by chunk, with
// BUFFERS page buffers. Rows outside the context are filled with zeros, so the page's memory there, even NaN, has no
// effect.
//
// Scores are MMAs of 32 rows x 16 tokens, by half of the warps: larger tiles need fewer reads of shared memory, which
// limit this product. Values are MMAs of 32 rows x COLUMNS, whose sums stay in registers for all pages.
#include "attention.cuh"

constexpr u32 ROW_BYTES = 2 * WIDTH, STEPS = WIDTH / 16;
constexpr u32 RAW_ROW = VALUE_BYTES * WIDTH;  // as stored in a page
constexpr bool CONVERT = VALUE_BYTES == 1;
constexpr u32 WARPS = THREADS / 32;

constexpr u32 GROUPS = ROWS > 32 ? ROWS / 32 : 1;  // of rows
constexpr u32 TILES = ROWS / 16 / GROUPS;          // of 16 rows, in a group
constexpr u32 QUARTERS = PAGE / 16;                // of a page's tokens
constexpr u32 power_of_two(u32 least) { return least <= 16 ? 16 : least <= 32 ? 32 : 64; }
constexpr u32 COLUMNS = power_of_two(R * GROUPS / WARPS);
constexpr u32 OUT_TILES = COLUMNS / 8;

constexpr u32 QUERIES = 0;
constexpr u32 PAGES = QUERIES + ROWS * ROW_BYTES;     // one, if pages are converted, else BUFFERS
constexpr u32 RAW = PAGES + PAGE * ROW_BYTES;         // BUFFERS pages to be converted
constexpr u32 CHANCES = CONVERT ? RAW + BUFFERS * PAGE * RAW_ROW : PAGES + BUFFERS * PAGE * ROW_BYTES;  // bf16 [ROWS, PAGE]
constexpr u32 LARGEST = CHANCES + 2 * ROWS * PAGE;    // float32 [QUARTERS, ROWS]: the largest scores of a page
constexpr u32 MOST = LARGEST + 4 * QUARTERS * ROWS;   // float32 [2, ROWS]: the largest score before and after a page
constexpr u32 TOTALS = MOST + 8 * ROWS;               // float32 [QUARTERS, ROWS]: sums of CHANCES
constexpr u32 LENGTHS = TOTALS + 4 * QUARTERS * ROWS;  // int32 [ROWS], if TOGETHER > 1
constexpr u32 SHARED = LENGTHS + LENGTHS_BYTES;

static_assert(BUFFERS == 1 || BUFFERS == 2, "one where no split has two pages");
static_assert(ROWS == 16 || ROWS == 32 || ROWS == 64, "whole groups of row tiles");
static_assert(R % 64 == 0 && P % 64 == 0, "rows of whole 128 bytes");
static_assert(GROUPS * (R / COLUMNS) <= WARPS && GROUPS * QUARTERS <= WARPS, "a warp has one place");
static_assert(THREADS == 8 * PAGE && ROWS <= PAGE, "eight threads copy a row");
static_assert(SHARED <= 232448, "a block's shared memory");

// The address offset of a row's 16-byte chunk.
FN u32 chunk_at(u32 row, u32 row_bytes, u32 chunk) { return row * row_bytes + 16 * (chunk ^ (row & 7)); }

// ---- copies. Eight threads copy a row; thread p of them copies chunks p, p + 8, ...

FN u32 copied_row() { return thread_index() / 8; }
FN u32 copied_piece() { return thread_index() % 8; }

template <u32 BYTES>
FN void copy_row(u32 to, const char* from, bool real) {
    for (u32 i = 0; i < BYTES; i += 128)
        if (i + 128 <= BYTES || i + 16 * copied_piece() < BYTES) copy_async(to + i, from + i, real);
}

FN void copy_queries(const AttendLaunch& a, u32 base, const Work& w) {
    u32 row = copied_row(), piece = copied_piece();
    if (row >= ROWS) return;
    bool real = row < w.rows;
    copy_row<ROW_BYTES>(base + QUERIES + chunk_at(row, ROW_BYTES, piece), head_of(a, w, real ? row : 0) + 16 * piece, real);
}

// Rows to be converted are stored unswizzled, since the threads that copied them also convert them; others are stored
// in their final place.
FN void copy_page(const AttendLaunch& a, const Work& w, u32 to, u32 number, u32 page) {
    u32 row = copied_row(), piece = copied_piece();
    const char* from = a.plane + (u64)page * a.page_stride + row * RAW_ROW + 16 * piece;
    u32 place = CONVERT ? row * RAW_ROW + 16 * piece : chunk_at(row, ROW_BYTES, piece);
    copy_row<RAW_ROW>(to + place, from, is_seen(a, w, number * PAGE + row));
}

FN u32 widen(u32 pair) { return widen_apart((pair & 0xff) << 8 | (pair & 0xff00) << 16); }
FN u32x4 widen(u32 a, u32 b) { return {widen(a), widen(a >> 16), widen(b), widen(b >> 16)}; }

// Each thread converts what it copied itself.
FN void convert_page(u32 to, u32 raw) {
    u32 row = copied_row();
#pragma unroll 1
    for (u32 chunk = copied_piece(); chunk < RAW_ROW / 16; chunk += 8) {
        u32x4 v = load_shared_4(raw + row * RAW_ROW + 16 * chunk);
        store_shared_4(to + chunk_at(row, ROW_BYTES, 2 * chunk), widen(v.x, v.y));
        store_shared_4(to + chunk_at(row, ROW_BYTES, 2 * chunk + 1), widen(v.z, v.w));
    }
}

// ---- scores

FN u32 tile_row(u32 group, u32 i) { return 16 * (group * TILES + i); }

struct Scores { float s[TILES][2][4]; };  // 16 rows x 8 tokens each

// A lane's address for load_tiles, at columns 16 step to 16 step + 15.
FN u32 step_of(u32 at, u32 step) { return (at ^ 32 * (step % 4)) + 128 * (step / 4); }

struct Step { u32x4 k, q[TILES]; };  // fragments of 16 columns

FN void load_step(Step& f, u32 k_at, const u32 (&q_at)[TILES], u32 step) {
    f.k = load_tiles(step_of(k_at, step));
    for (u32 i = 0; i < TILES; i++) f.q[i] = load_tiles(step_of(q_at[i], step));
}

// MMAs of one step run while the fragments of the next are loaded.
FN void score(Scores& c, u32 queries, u32 page, u32 group, u32 quarter) {
    u32 lane = lane_index(), q_at[TILES];
    for (u32 i = 0; i < TILES; i++) q_at[i] = queries + chunk_at(tile_row(group, i) + lane % 16, ROW_BYTES, lane / 16);
    u32 k_at = page + chunk_at(16 * quarter + lane / 16 * 8 + lane % 8, ROW_BYTES, lane / 8 % 2);
    Step f[2];
    load_step(f[0], k_at, q_at, 0);
#pragma unroll 4
    for (u32 step = 0; step < STEPS; step++) {
        if (step + 1 < STEPS) load_step(f[(step + 1) % 2], k_at, q_at, step + 1);
        const Step& now = f[step % 2];
        for (u32 i = 0; i < TILES; i++) {
            mma_bf16(c.s[i][0], now.q[i].x, now.q[i].y, now.q[i].z, now.q[i].w, now.k.x, now.k.y);
            mma_bf16(c.s[i][1], now.q[i].x, now.q[i].y, now.q[i].z, now.q[i].w, now.k.z, now.k.w);
        }
    }
}

// A lane has rows g and g + 8 (`lower`) of each tile.
FN u32 row_of(u32 group, u32 i, u32 lower) { return tile_row(group, i) + 8 * lower + lane_index() / 4; }

FN void scale_and_mask(Scores& c, const AttendLaunch& a, const Work& w, u32 base, u32 number, u32 group, u32 quarter) {
    u32 first = number * PAGE + 16 * quarter + 2 * (lane_index() % 4);
    for (u32 j = 0; j < 2; j++)
        for (u32 e = 0; e < 4; e++) {
            bool seen = is_seen(a, w, first + 8 * j + (e & 1));
            for (u32 i = 0; i < TILES; i++) c.s[i][j][e] = seen ? c.s[i][j][e] * a.scale : -infinity();
        }
    if (!ends_within(w, number)) return;
    for (u32 i = 0; i < TILES; i++)
        for (u32 lower = 0; lower < 2; lower++) {
            u32 length = load_shared(base + LENGTHS + 4 * row_of(group, i, lower));
            for (u32 j = 0; j < 2; j++)
                for (u32 e = 0; e < 2; e++)
                    if (first + 8 * j + e >= length) c.s[i][j][2 * lower + e] = -infinity();
        }
}

// ---- softmax. The four lanes that share a row combine their values with shuffles.

FN float four_sum(float v) { return v += shuffle_xor(v, 1), v + shuffle_xor(v, 2); }
FN float four_max(float v) { return v = larger(v, shuffle_xor(v, 1)), larger(v, shuffle_xor(v, 2)); }
FN u32 most_at(u32 base, u32 page, u32 row) { return base + MOST + 4 * (page % 2 * ROWS + row); }

FN void begin_softmax(u32 base) {
    for (u32 i = thread_index(); i < ROWS; i += THREADS) store_shared_f32(most_at(base, 0, i), -infinity());
    for (u32 i = thread_index(); i < QUARTERS * ROWS; i += THREADS) store_shared_f32(base + TOTALS + 4 * i, 0.f);
}

FN void share_largest(const Scores& c, u32 base, u32 group, u32 quarter) {
    for (u32 i = 0; i < TILES; i++)
        for (u32 lower = 0; lower < 2; lower++) {
            const float *x = c.s[i][0] + 2 * lower, *y = c.s[i][1] + 2 * lower;
            float most = four_max(larger(larger(x[0], x[1]), larger(y[0], y[1])));
            if (lane_index() % 4 == 0) store_shared_f32(base + LARGEST + 4 * (quarter * ROWS + row_of(group, i, lower)), most);
        }
}

// Converts scores to exp2(score - largest score so far) and rescales the previous total. page: index within the split.
FN void soften(const Scores& c, u32 base, u32 page, u32 group, u32 quarter) {
    u32 t = lane_index() % 4;
    for (u32 i = 0; i < TILES; i++)
        for (u32 lower = 0; lower < 2; lower++) {
            u32 row = row_of(group, i, lower), total_at = base + TOTALS + 4 * (quarter * ROWS + row);
            float before = load_shared_f32(most_at(base, page, row)), most = before, total = 0;
            for (u32 k = 0; k < QUARTERS; k++) most = larger(most, load_shared_f32(base + LARGEST + 4 * (k * ROWS + row)));
            for (u32 j = 0; j < 2; j++) {
                float x = exp2_fast(c.s[i][j][2 * lower] - most), y = exp2_fast(c.s[i][j][2 * lower + 1] - most);
                store_shared(base + CHANCES + chunk_at(row, 2 * PAGE, 2 * quarter + j) + 4 * t, pack_bf16(x, y));
                total += x + y;
            }
            total = four_sum(total);
            if (t) continue;
            store_shared_f32(total_at, load_shared_f32(total_at) * exp2_fast(before - most) + total);
            if (quarter == 0) store_shared_f32(most_at(base, page + 1, row), most);
        }
}

FN float total_of(u32 base, u32 row) {
    float total = 0;
    for (u32 k = 0; k < QUARTERS; k++) total += load_shared_f32(base + TOTALS + 4 * (k * ROWS + row));
    return total;
}

// ---- values

struct Latents { float o[TILES][OUT_TILES][4]; };

FN void multiply_rows(Latents& c, u32 i, float upper, float lower) {
    for (u32 j = 0; j < OUT_TILES; j++) {
        c.o[i][j][0] *= upper, c.o[i][j][1] *= upper;
        c.o[i][j][2] *= lower, c.o[i][j][3] *= lower;
    }
}

FN float fading_of(u32 base, u32 page, u32 row) {
    return exp2_fast(load_shared_f32(most_at(base, page, row)) - load_shared_f32(most_at(base, page + 1, row)));
}

FN void add_values(Latents& c, u32 base, u32 page, u32 group, u32 column) {
    u32 lane = lane_index(), p_at[TILES];
    for (u32 i = 0; i < TILES; i++) p_at[i] = base + CHANCES + chunk_at(tile_row(group, i) + lane % 16, 2 * PAGE, lane / 16);
    u32 v_at = page + chunk_at(lane % 16, ROW_BYTES, column / 8 + lane / 16);
    for (u32 quarter = 0; quarter < QUARTERS; quarter++) {
        u32x4 p[TILES];
        for (u32 i = 0; i < TILES; i++) p[i] = load_tiles(step_of(p_at[i], quarter));
        for (u32 j = 0; j < OUT_TILES; j += 2) {
            u32x4 v = load_tiles_transposed((v_at ^ 16 * j) + 16 * quarter * ROW_BYTES);
            for (u32 i = 0; i < TILES; i++) {
                mma_bf16(c.o[i][j], p[i].x, p[i].y, p[i].z, p[i].w, v.x, v.y);
                mma_bf16(c.o[i][j + 1], p[i].x, p[i].y, p[i].z, p[i].w, v.z, v.w);
            }
        }
    }
}

// Stores through shared memory, in the place of the queries, so that a warp writes whole cache lines.
FN void store_latents(const AttendLaunch& a, const Latents& c, u32 base, u32 group, u32 column, const Work& w) {
    u32 t = lane_index() % 4;
    for (u32 i = 0; i < TILES; i++)
        for (u32 j = 0; j < OUT_TILES; j++)
            for (u32 lower = 0; lower < 2; lower++)
                store_shared(base + QUERIES + chunk_at(row_of(group, i, lower), ROW_BYTES, column / 8 + j) + 4 * t,
                             pack_bf16(c.o[i][j][2 * lower], c.o[i][j][2 * lower + 1]));
    sync_warp();
    for (u32 i = lane_index(); i < 16 * TILES * OUT_TILES; i += 32) {
        u32 row = tile_row(group, 0) + i / OUT_TILES, chunk = column / 8 + i % OUT_TILES;
        if (row >= w.rows || !sees(a, w, base + LENGTHS, row)) continue;
        u32x4 v = load_shared_4(base + QUERIES + chunk_at(row, ROW_BYTES, chunk));
        store_global_4(latents_of(a, w, row) + 16 * chunk, v);
    }
}

KERNEL_BESIDE(attend, AttendLaunch, ROWS == 16 && BUFFERS == 1 && !CONVERT ? 2 : 1) {
    let_next_grid_start();
    u32 base = shared_base(), warp = warp_index(), thread = thread_index();
    // The next lines read lengths, tables and pages before the wait below. The newest row of a page was written by the
    // grid before `absorb`; `absorb` calls let_next_grid_start only after it has waited for that grid.
    Work w = find_work(a);
    u32 count = w.count;
    if (count == 0) {
        wait_for_previous_grid();
        if (thread < w.rows) store_global_f32(lse_of(a, w, thread), -infinity());
        return;
    }
    copy_page(a, w, base + (CONVERT ? RAW : PAGES), w.first, load_global_fresh(w.table));
    u32 next = count > 1 ? load_global_fresh(w.table + 1) : 0;
    begin_softmax(base);
    if (thread < ROWS) store_length(a, w, base + LENGTHS, thread);
    wait_for_previous_grid();
    copy_queries(a, base, w);
    copies_commit();

    u32 score_group = warp / QUARTERS, quarter = warp % QUARTERS;
    u32 group = warp % GROUPS, column = warp / GROUPS * COLUMNS;
    Latents latents = {};
    for (u32 i = 0; i < count; i++) {
        if (BUFFERS > 1 && i + 1 < count) {
            u32 to = base + (CONVERT ? RAW + (i + 1) % 2 * PAGE * RAW_ROW : PAGES + (i + 1) % 2 * PAGE * ROW_BYTES);
            copy_page(a, w, to, w.first + i + 1, next);
            if (i + 2 < count) next = load_global_fresh(w.table + i + 2);
        }
        copies_commit();
        copies_wait<1>();
        u32 page = base + PAGES + (CONVERT ? 0 : i % 2 * PAGE * ROW_BYTES);
        if (CONVERT) convert_page(page, base + RAW + i % 2 * PAGE * RAW_ROW);
        sync_block();
        if (score_group < GROUPS) {
            Scores c = {};
            score(c, base + QUERIES, page, score_group, quarter);
            scale_and_mask(c, a, w, base, w.first + i, score_group, quarter);
            share_largest(c, base, score_group, quarter);
            sync_threads(1 + score_group, 32 * QUARTERS);
            soften(c, base, i, score_group, quarter);
        }
        sync_block();
        if (ends_within(w, w.first + i)) {
            mend_unseen(w, w.first + i, [=](u32 row, u32 chunk) { return page + chunk_at(row, ROW_BYTES, chunk); });
            sync_block();
        }
        if (column < R) {
            for (u32 k = 0; k < TILES; k++)
                multiply_rows(latents, k, fading_of(base, i, row_of(group, k, 0)), fading_of(base, i, row_of(group, k, 1)));
            add_values(latents, base, page, group, column);
        }
        sync_block();
    }
    if (thread < w.rows) {
        float most = load_shared_f32(most_at(base, count, thread)), lse = (most + log2_fast(total_of(base, thread))) * LN_2;
        store_global_f32(lse_of(a, w, thread), sees(a, w, base + LENGTHS, thread) ? lse : -infinity());
    }
    if (column < R) {
        for (u32 k = 0; k < TILES; k++)
            multiply_rows(latents, k, 1.f / total_of(base, row_of(group, k, 0)), 1.f / total_of(base, row_of(group, k, 1)));
        store_latents(a, latents, base, group, column, w);
    }
}
