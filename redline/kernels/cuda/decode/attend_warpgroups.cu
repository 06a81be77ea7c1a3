// Absorbed latent attention over pages with warpgroup MMAs: the same arguments and results as attend.cu.
//
// A page is the a operand of both products, from one copy in shared memory: scores [64 tokens x ROWS] are page times
// queries, latents [R x ROWS] are the transposed page times probabilities. So the ROWS heads of a thread block are
// columns, of which wgmma supports any multiple of 8; an MMA with 16 columns takes half the time of one with 64.
//
// Rows are stored in tiles of 64 columns, 128 bytes of a row each, in the layout of `wgmma_attention.cuh`. Rows outside
// the context are filled with zeros, so the page's memory there, even NaN, has no effect. For each page:
// - the first of four warpgroups computes scores and turns them into probabilities, while the others load pages: bf16
//   with asynchronous copies into BUFFERS buffers; e4m3 through registers, a page ahead, widened into the other buffer;
// - then each warpgroup accumulates its SHARE of the tiles of latents, whose sums stay in registers for all pages.
#include "attention.cuh"
#include "wgmma_attention.cuh"

constexpr bool CONVERT = VALUE_BYTES == 1;
constexpr u32 RAW_ROW = VALUE_BYTES * WIDTH;  // as stored in a page
constexpr u32 GROUP = 128;                    // threads of a warpgroup
constexpr u32 BRINGERS = THREADS - GROUP;     // threads that load pages
constexpr u32 TILES = WIDTH / 64, VALUE_TILES = R / 64;
constexpr u32 SHARE = (VALUE_TILES + 3) / 4, VALUE_GROUPS = VALUE_TILES / SHARE;
constexpr u32 SUMS = ROWS / 2;                // of a thread, in 64 x ROWS
constexpr u32 CHAINS = ROWS == 64 ? 1 : 2;    // independent sums of scores
constexpr u32 RAW_CHUNKS = RAW_ROW / 16;      // of 16 bytes, in a row
constexpr u32 HELD = (PAGE * RAW_CHUNKS + BRINGERS - 1) / BRINGERS;

constexpr u32 TILE_BYTES = PAGE * 128, QUERY_TILE_BYTES = ROWS * 128, PAGE_BYTES = TILES * TILE_BYTES;
constexpr u32 QUERIES = 0;
constexpr u32 PAGES = QUERIES + TILES * QUERY_TILE_BYTES;
constexpr u32 CHANCES = PAGES + BUFFERS * PAGE_BYTES;  // bf16 [ROWS, PAGE]: exp2(score - largest score)
constexpr u32 LARGEST = CHANCES + ROWS * 128;          // float32 [4, ROWS]: the largest scores of a page, by warp
constexpr u32 TOTALS = LARGEST + 16 * ROWS;            // float32 [4, ROWS]: sums of CHANCES, by warp
constexpr u32 MOST = TOTALS + 16 * ROWS;               // float32 [ROWS]: the largest score so far
constexpr u32 FADING = MOST + 4 * ROWS;                // float32 [ROWS]: the factor that rescales sums of earlier pages
constexpr u32 LENGTHS = FADING + 4 * ROWS;             // int32 [ROWS], if TOGETHER > 1
constexpr u32 SHARED = LENGTHS + LENGTHS_BYTES;

static_assert(ROWS == 16 || ROWS == 32 || ROWS == 64, "a head has a thread of a warpgroup");
static_assert(R % 64 == 0 && P % 64 == 0 && SHARE <= 2 && VALUE_TILES % SHARE == 0, "whole tiles, few enough for registers");
static_assert(BUFFERS == 1 || BUFFERS == 2, "one where no split has two pages");
static_assert(THREADS == 4 * GROUP && SHARED <= 232448, "a block");

// Broadcast from lane 0, so that the compiler knows that the value is uniform in a warp.
FN u32 warpgroup() { return shuffle(warp_index() / 4, 0); }

// The address offset of 16 bytes of a row, with this number of bytes per tile.
FN u32 chunk_at(u32 row, u32 chunk, u32 tile_bytes) { return chunk / 8 * tile_bytes + 128 * row + 16 * ((chunk ^ row) % 8); }

// Stores a thread's 64 x ROWS sums as bf16, one row of 128 bytes for each column.
FN void store_transposed(u32 tile, const float (&c)[SUMS]) {
    u32 lane = lane_index(), to = tile + chunk_at(lane / 16 * 8 + lane % 8, warp_index() % 4 * 2 + lane / 8 % 2, 0);
    for (u32 j = 0; j < SUMS; j += 8) {
        u32x4 v = {pack_bf16(c[j], c[j + 1]), pack_bf16(c[j + 2], c[j + 3]), pack_bf16(c[j + 4], c[j + 5]),
                   pack_bf16(c[j + 6], c[j + 7])};
        store_tiles_transposed(to + 256 * j, v);
    }
}

// ---- loads

// Eight threads copy 128 bytes of a row, 16 bytes each.
FN u32 piece() { return thread_index() % 8; }

// Called by all threads: copies a row for each head, zeros for rows that do not exist.
FN void copy_queries(const AttendLaunch& a, u32 base, const Work& w) {
    // Each thread looks up one head: for one query the first, from which the others follow; for several the only one it
    // copies.
    u32 known = TOGETHER > 1 ? smaller(thread_index() / 8 % ROWS, w.rows - 1) : 0;
    const char* from = head_of(a, w, known);
#pragma unroll 3
    for (u32 n = 0; n < (ROWS * TILES + THREADS / 8 - 1) / (THREADS / 8); n++) {
        u32 i = n * (THREADS / 8) + thread_index() / 8;
        if (ROWS * TILES % (THREADS / 8) && i >= ROWS * TILES) break;
        u32 row = i % ROWS, chunk = i / ROWS * 8 + piece(), to = base + QUERIES + chunk_at(row, chunk, QUERY_TILE_BYTES);
        bool real = row < w.rows;
        copy_async(to, from + (real ? (row - known) * 2 * WIDTH + 16 * chunk : 0), real);
    }
    copies_commit();
}

// The warpgroups other than the first: they load page after page.
struct Bringer {
    const AttendLaunch& a;
    const Work& w;
    u32 base, fetched, next;  // fetched: pages; next: the next page's number, read one page ahead
    typedef u32x4 Raw[CONVERT ? HELD : 1];  // a thread's part of a page
    Raw raw;

    __device__ __forceinline__ Bringer(const AttendLaunch& a, const Work& w)
        : a(a), w(w), base(shared_base_1024()), fetched(0), next(load_global_fresh(w.table)) {}

    __device__ __forceinline__ u32 thread() const { return forget(thread_index() - GROUP); }
    __device__ __forceinline__ u32 buffer(u32 page) const { return base + PAGES + page % BUFFERS * PAGE_BYTES; }
    __device__ __forceinline__ const char* from() const { return a.plane + (u64)next * a.page_stride; }
    __device__ __forceinline__ bool is_real(u32 row) const { return is_seen(a, w, (w.first + fetched) * PAGE + row); }
    __device__ __forceinline__ void count_fetched() {
        if (++fetched < w.count) next = load_global_fresh(w.table + fetched);
    }

    __device__ __forceinline__ void copy() {
        if (fetched < w.count) {
#pragma unroll 4
            for (u32 n = 0; n < (PAGE * TILES + BRINGERS / 8 - 1) / (BRINGERS / 8); n++) {
                u32 i = n * (BRINGERS / 8) + thread() / 8;
                if (PAGE * TILES % (BRINGERS / 8) && i >= PAGE * TILES) break;
                u32 row = i % PAGE, chunk = i / PAGE * 8 + piece();
                copy_async(buffer(fetched) + chunk_at(row, chunk, TILE_BYTES), from() + row * RAW_ROW + 16 * chunk, is_real(row));
            }
            count_fetched();
        }
        copies_commit();
    }

    __device__ __forceinline__ void load(Raw& raw) {
        if (fetched == w.count) return;
#pragma unroll
        for (u32 k = 0; k < HELD; k++) {
            u32 n = thread() + k * BRINGERS;
            raw[k] = {0, 0, 0, 0};
            if (n < PAGE * RAW_CHUNKS && is_real(n / RAW_CHUNKS)) raw[k] = load_global_4_fresh(from() + 16 * n);
        }
        count_fetched();
    }
    FN u32x4 widen(u32 x, u32 y) {
        return {widen_apart(pick_bytes<0x1404>(x)), widen_apart(pick_bytes<0x3424>(x)), widen_apart(pick_bytes<0x1404>(y)),
                widen_apart(pick_bytes<0x3424>(y))};
    }
    // Of eight lanes that store at the same time, four have another tile and store their second half first: so they use
    // all banks.
    __device__ __forceinline__ void convert(const Raw& raw, u32 page) {
#pragma unroll
        for (u32 k = 0; k < HELD; k++) {
            u32 n = thread() + k * BRINGERS, row = n / RAW_CHUNKS, chunk = n % RAW_CHUNKS, turned = chunk / 4 % 2;
            if (n >= PAGE * RAW_CHUNKS) break;
            u32 first = buffer(page) + chunk_at(row, 2 * chunk + turned, TILE_BYTES);
            u32x4 v = raw[k];
            store_shared_4(first, turned ? widen(v.z, v.w) : widen(v.x, v.y));
            store_shared_4(first ^ 16, turned ? widen(v.x, v.y) : widen(v.z, v.w));
        }
    }

    // Loads of the first page are issued before the previous grid has ended; then come the queries, and the second
    // page.
    __device__ __forceinline__ void begin() {
        if (CONVERT) {
            Raw first;
            load(first), load(raw);
            wait_for_previous_grid();
            copy_queries(a, base, w);
            convert(first, 0);
        } else {
            copy();
            wait_for_previous_grid();
            copy_queries(a, base, w);
            if (BUFFERS > 1) copy();
        }
    }
    __device__ __forceinline__ void show() {  // makes the next page visible to MMAs after a barrier
        copies_wait<CONVERT ? 0 : BUFFERS - 1>();
        show_products();
    }
    __device__ __forceinline__ void while_scored(u32 page) {
        if (CONVERT && page + 1 < w.count) convert(raw, page + 1), load(raw);
    }
    __device__ __forceinline__ void after(u32) {  // called after a page, when its buffer is free
        if (!CONVERT) copy();
    }
};

// ---- scores, softmax

struct Largest { FN float join(float a, float b) { return larger(a, b); } };
struct Sum { FN float join(float a, float b) { return a + b; } };

// Each lane exchanges half of its values with a partner lane and joins the other half with the partner's values.
template <class Way, u32 LEFT, u32 VALUES>
FN void trade(float (&v)[VALUES], u32 partner) {
    bool upper = lane_index() & partner;
    if constexpr (LEFT == 0)
        v[0] = Way::join(v[0], shuffle_xor(v[0], partner));
    else
        for (u32 i = 0; i < LEFT; i++) {
            float mine = upper ? v[i + LEFT] : v[i], theirs = upper ? v[i] : v[i + LEFT];
            v[i] = Way::join(mine, shuffle_xor(theirs, partner));
        }
}

// Lane 4g + t has two heads of each eight, 2t and 2t + 1, and two tokens of its warp's 16, g and g + 8 (`lower`).
struct Scorer {
    static constexpr u32 HEADS = ROWS / 4, KEPT = HEADS > 8 ? HEADS / 8 : 1;  // of a lane, before and after joining
    const AttendLaunch& a;
    const Work& w;
    u32 base;
    float total[KEPT] = {};

    __device__ __forceinline__ Scorer(const AttendLaunch& a, const Work& w) : a(a), w(w), base(shared_base_1024()) {}

    template <class Way>
    FN void join_tokens(float (&v)[HEADS]) {
        trade<Way, HEADS / 2>(v, 16), trade<Way, HEADS / 4>(v, 8), trade<Way, HEADS / 8>(v, 4);
    }
    FN u32 kept_head(u32 k) {
        u32 lane = lane_index(), i = lane / 16 * (HEADS / 2) + lane / 8 % 2 * (HEADS / 4) + lane / 4 % 2 * (HEADS / 8) + k;
        return i / 2 * 8 + lane % 4 * 2 + i % 2;
    }
    __device__ __forceinline__ u32 by_warp(u32 table, u32 head) const { return base + table + 4 * (warp_index() * ROWS + head); }

    __device__ __forceinline__ void begin() {
        wait_for_previous_grid();
        copy_queries(a, base, w);
        if (thread_index() < ROWS) {
            store_shared_f32(base + MOST + 4 * thread_index(), -infinity());
            store_length(a, w, base + LENGTHS, thread_index());
        }
    }
    __device__ __forceinline__ void show() {
        copies_wait<0>();
        show_products();
    }
    __device__ __forceinline__ void while_scored(u32 page) {
        float s[SUMS];
        score(s, base + PAGES + page % BUFFERS * PAGE_BYTES);
        mask(s, page);
        share_largest(s);
        sync_threads(1, GROUP);
        join_largest();
        sync_threads(1, GROUP);
        soften(s);
        show_products();
    }
    __device__ __forceinline__ void after(u32) {}

    // Uses several independent sums if an MMA is so short that each would wait for the one before it.
    __device__ __forceinline__ void score(float (&s)[SUMS], u32 page) const {
        Operand rows = operand(page), queries = operand(base + QUERIES);
        float chains[CHAINS][SUMS] = {};
        products_begin();
#pragma unroll
        for (u32 tile = 0; tile < TILES; tile++)
#pragma unroll
            for (u32 k = 0; k < 4; k++)
                multiply_shared<ROWS, false>(chains[k % CHAINS], further(rows, tile * TILE_BYTES + 32 * k),
                                             further(queries, tile * QUERY_TILE_BYTES + 32 * k));
        products_commit();
        products_wait();
        for (u32 c = 0; c < CHAINS; c++) settle(chains[c]);
        for (u32 i = 0; i < SUMS; i++) {
            s[i] = chains[0][i];
            for (u32 c = 1; c < CHAINS; c++) s[i] += chains[c][i];
        }
    }

    __device__ __forceinline__ void mask(float (&s)[SUMS], u32 page) const {
        u32 token = (w.first + page) * PAGE + 16 * warp_index() + lane_index() / 4;
        bool seen[2] = {is_seen(a, w, token), is_seen(a, w, token + 8)};
        for (u32 i = 0; i < SUMS; i++) s[i] = seen[i / 2 % 2] ? s[i] * a.scale : -infinity();
        if (!ends_within(w, w.first + page)) return;
        for (u32 j = 0; j < ROWS / 8; j++) {
            u32x2 length = load_shared_2(base + LENGTHS + 4 * (8 * j + lane_index() % 4 * 2));
            for (u32 e = 0; e < 4; e++)
                if (token + 8 * (e / 2) >= (e % 2 ? length.y : length.x)) s[4 * j + e] = -infinity();
        }
    }

    __device__ __forceinline__ void share_largest(const float (&s)[SUMS]) const {
        float most[HEADS];
        for (u32 i = 0; i < HEADS; i++) most[i] = larger(s[i / 2 * 4 + i % 2], s[i / 2 * 4 + i % 2 + 2]);
        join_tokens<Largest>(most);
        for (u32 k = 0; k < KEPT; k++) store_shared_f32(by_warp(LARGEST, kept_head(k)), most[k]);
    }

    __device__ __forceinline__ void join_largest() const {
        u32 head = thread_index();
        if (head >= ROWS) return;
        float before = load_shared_f32(base + MOST + 4 * head), most = before;
        for (u32 warp = 0; warp < 4; warp++) most = larger(most, load_shared_f32(base + LARGEST + 4 * (warp * ROWS + head)));
        store_shared_f32(base + MOST + 4 * head, most);
        store_shared_f32(base + FADING + 4 * head, exp2_fast(before - most));
    }

    // Converts scores to exp2(score - largest score so far) and rescales the previous total.
    __device__ __forceinline__ void soften(float (&s)[SUMS]) {
        float sum[HEADS];
        for (u32 j = 0; j < ROWS / 8; j++) {
            u32x2 most = load_shared_2(base + MOST + 4 * (8 * j + lane_index() % 4 * 2));
            for (u32 e = 0; e < 4; e++) s[4 * j + e] = exp2_fast(s[4 * j + e] - as_float(e % 2 ? most.y : most.x));
            for (u32 e = 0; e < 2; e++) sum[2 * j + e] = s[4 * j + e] + s[4 * j + e + 2];
        }
        store_transposed(base + CHANCES, s);
        join_tokens<Sum>(sum);
        for (u32 k = 0; k < KEPT; k++) {
            total[k] = total[k] * load_shared_f32(base + FADING + 4 * kept_head(k)) + sum[k];
            store_shared_f32(by_warp(TOTALS, kept_head(k)), total[k]);
        }
    }
};

// ---- values

// Multiplies the sums of a lane's pairs of heads by `factors(first head of the pair)`.
template <class Factors>
FN void multiply_heads(float (&o)[SHARE][SUMS], Factors factors) {
    for (u32 j = 0; j < ROWS / 8; j++) {
        f32x2 f = factors(8 * j + lane_index() % 4 * 2);
        for (u32 k = 0; k < SHARE; k++)
            for (u32 e = 0; e < 4; e++) o[k][4 * j + e] *= e % 2 ? f.y : f.x;
    }
}
FN f32x2 load_pair(u32 at) {
    u32x2 v = load_shared_2(at);
    return {as_float(v.x), as_float(v.y)};
}
FN f32x2 totals_of(u32 base, u32 head) {
    f32x2 total = {0, 0};
    for (u32 warp = 0; warp < 4; warp++) {
        f32x2 v = load_pair(base + TOTALS + 4 * (warp * ROWS + head));
        total.x += v.x, total.y += v.y;
    }
    return total;
}

FN void add_values(float (&o)[SHARE][SUMS], u32 base, u32 page, u32 group) {
    Operand values = transposed_operand(page + group * TILE_BYTES), chances = operand(base + CHANCES);
    products_begin();
#pragma unroll
    for (u32 k = 0; k < SHARE; k++)
#pragma unroll
        for (u32 quarter = 0; quarter < 4; quarter++)
            multiply_shared<ROWS, true>(o[k], further(values, 4 * k * TILE_BYTES + 2048 * quarter),
                                        further(chances, 32 * quarter));
    products_commit();
    products_wait();
    for (u32 k = 0; k < SHARE; k++) settle(o[k]);
}

// Stores through shared memory, in the place of this warpgroup's tiles of the page, so that whole cache lines are
// written.
FN void store_latents(const AttendLaunch& a, const Work& w, const float (&o)[SHARE][SUMS], u32 page, u32 group) {
    sync_threads(1 + group, GROUP);
    for (u32 k = 0; k < SHARE; k++) store_transposed(page + (group + 4 * k) * TILE_BYTES, o[k]);
    sync_threads(1 + group, GROUP);
    u32 thread = forget(thread_index()), row = thread % GROUP / 8, chunk = thread % 8;
    for (u32 k = 0; k < SHARE; k++)
        for (u32 first = 0; first < ROWS; first += GROUP / 8) {
            u32 tile = group + 4 * k;
            u32x4 v = load_shared_4(page + tile * TILE_BYTES + chunk_at(first + row, chunk, 0));
            if (first + row < w.rows && sees(a, w, shared_base_1024() + LENGTHS, first + row))
                store_global_4(latents_of(a, w, first + row) + 128 * tile + 16 * chunk, v);
        }
}

// Processes all pages in the role `Part`, Scorer or Bringer. The three barriers: a page has arrived; its probabilities
// are stored; its buffer is free.
template <class Part>
FN void run(Part& part, const AttendLaunch& a, const Work& w, u32 group) {
    u32 base = shared_base_1024(), page = base + PAGES;
    float o[SHARE][SUMS] = {};
    for (u32 i = 0; i < w.count; i++) {
        page = base + PAGES + i % BUFFERS * PAGE_BYTES;
        part.show();
        sync_block();
        part.while_scored(i);
        sync_block();
        if (ends_within(w, w.first + i)) {
            mend_unseen(w, w.first + i, [=](u32 row, u32 chunk) { return page + chunk_at(row, chunk, TILE_BYTES); });
            show_products();
            sync_block();
        }
        if (group < VALUE_GROUPS) {
            multiply_heads(o, [=](u32 head) { return load_pair(base + FADING + 4 * head); });
            add_values(o, base, page, group);
        }
        if (i + 1 == w.count) break;
        sync_block();
        part.after(i);
    }
    if (group >= VALUE_GROUPS) return;
    multiply_heads(o, [=](u32 head) {
        f32x2 total = totals_of(base, head);
        return f32x2{reciprocal_fast(total.x), reciprocal_fast(total.y)};
    });
    store_latents(a, w, o, page, group);
}

FN void store_lse(const AttendLaunch& a, const Work& w, u32 base) {
    u32 head = thread_index();
    if (head >= w.rows) return;
    float total = 0, most = load_shared_f32(base + MOST + 4 * head);
    for (u32 warp = 0; warp < 4; warp++) total += load_shared_f32(base + TOTALS + 4 * (warp * ROWS + head));
    store_global_f32(lse_of(a, w, head), sees(a, w, base + LENGTHS, head) ? (most + log2_fast(total)) * LN_2 : -infinity());
}

KERNEL_BESIDE(attend, AttendLaunch, ROWS == 16 && BUFFERS == 1 && !CONVERT ? 2 : 1) {
    let_next_grid_start();
    // find_work and the loads of pages come before the wait. The newest row of a page was written by the grid before
    // `absorb`; `absorb` calls let_next_grid_start only after it has waited for that grid.
    Work w = find_work(a);
    u32 group = warpgroup();
    if (w.count == 0) {
        wait_for_previous_grid();
        if (thread_index() < w.rows) store_global_f32(lse_of(a, w, thread_index()), -infinity());
    } else if (group == 0) {
        Scorer scorer(a, w);
        scorer.begin();
        run(scorer, a, w, group);
        store_lse(a, w, shared_base_1024());
    } else {
        Bringer bringer(a, w);
        bringer.begin();
        run(bringer, a, w, group);
    }
}
