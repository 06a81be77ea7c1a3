// The splits of a query's attention combined, and its latents taken out of the latent space, o = W_UV latent: see unabsorb.py.
//
// A block has one half of one head's rows of W_UV in shared memory before the grid in front ends: at V = 128, R = 512
// 64 KB. For 8 queries at a time it combines the splits of its head, then multiplies: warps are row tiles x parts of R.
//
// Splits stream through a ring of stages, eight at a time, each 8 KB in one piece of memory; the first are asked for before
// it is known how many hold something. A warp has 32 latents, its eight groups of lanes have a split of a piece each. So a
// latent is the sum of BUNDLES sums, each over every BUNDLES-th split, in an order that is the same in any company.
//
// With 5 STAGES it is small, 125 KB and 64 registers, so that its weights arrive while small blocks of `attend` still work
// beside it; with 12 it keeps the L2 cache busy; with 3 two blocks share an SM, where GROUPS blocks share many queries.
#include "core.cuh"

constexpr u32 WARPS = THREADS / 32;
constexpr float LOG2_E = 1.44269504f;
constexpr u32 ROWS = V / 2, TILES = ROWS / 16, PARTS = WARPS / TILES;
constexpr u32 UNITS = R / 32 / PARTS;  // of a warp: 32 inputs, two products each
constexpr u32 WEIGHT_BYTES = ROWS * R * 2, COPY_BYTES = 16384;
constexpr u32 COLUMNS = 8;                       // queries are the columns of a product
constexpr u32 BUNDLES = 8;                       // splits of a piece
constexpr u32 SPLIT_BYTES = 2 * R, PIECE_BYTES = BUNDLES * SPLIT_BYTES;
constexpr u32 HELD = (MAX_SPLITS + 31) / 32;      // log-sum-exps of a lane
constexpr u32 LATENT_ROW = 2 * R + 64;           // so that eight lanes of a fragment meet all banks

constexpr u32 WEIGHTS = 0;
constexpr u32 PIECES = WEIGHTS + WEIGHT_BYTES;   // bf16 [STAGES, BUNDLES, R]
constexpr u32 SHARES = PIECES + STAGES * PIECE_BYTES;      // float32 [COLUMNS, MAX_SPLITS]: of each split in its query
constexpr u32 COUNTS = SHARES + 4 * COLUMNS * MAX_SPLITS;  // [COLUMNS]: splits that hold something, the first ones
constexpr u32 LATENTS = COUNTS + 4 * COLUMNS;    // bf16 [COLUMNS, LATENT_ROW]
constexpr u32 SUMS = LATENTS + COLUMNS * LATENT_ROW;       // float32 [PARTS, ROWS, COLUMNS]
constexpr u32 BARRIERS = SUMS + 4 * PARTS * ROWS * COLUMNS;  // of each stage, and of the weights

static_assert(R % (32 * PARTS) == 0 && TILES * PARTS == WARPS, "every warp has a tile and a whole part of R");
static_assert(R <= 32 * WARPS && WARPS >= COLUMNS, "a warp has 32 latents, and a query");

struct Arguments {
    const char* partial;  // bf16 [Q, H, splits, R]
    const float* lse;     // [Q, H, splits]
    const char* weight;   // bf16 [H, V / 16, R / 32, 16, 32]
    char* out;            // bf16 [Q, width]
    int queries, heads, splits, width;
};

// One warp: the splits' shares of a query, exp(lse - the largest), over their sum.
FN void find_shares(const Arguments& a, u32 base, u32 head, u32 query, u32 column) {
    const float* from = a.lse + ((u64)query * a.heads + head) * a.splits;
    float lse[HELD], most = -infinity(), sum = 0;
    u32 count = 0;
    for (u32 i = 0; i < HELD; i++) {
        u32 split = 32 * i + lane_index();
        lse[i] = split < (u32)a.splits ? load_global_f32(from + split) : -infinity();
    }
    for (u32 i = 0; i < HELD; i++) {
        most = larger(most, lse[i]);
        count += count_bits(warp_ballot(lse[i] > -infinity()));
    }
    for (u32 i = 16; i; i >>= 1) most = larger(most, shuffle_xor(most, i));
    for (u32 i = 0; i < HELD; i++) sum += lse[i] = lse[i] > -infinity() ? exp2_fast((lse[i] - most) * LOG2_E) : 0.f;
    sum = warp_sum(sum);
    for (u32 i = 0; i < HELD; i++) {
        u32 split = 32 * i + lane_index();
        if (split < count) store_shared_f32(base + SHARES + 4 * (column * MAX_SPLITS + split), lse[i] / sum);
    }
    if (lane_index() == 0) store_shared(base + COUNTS + 4 * column, count);
}

// Eight splits of a query. Every query has one piece, and pieces after that while they hold something; the first STAGES of a
// batch and one more, settled before anybody has counted, also where they do not.
struct Piece { u32 number, column, first; };

FN Piece after(const Arguments& a, u32 base, Piece p) {
    u32 end = p.number < STAGES ? a.splits : load_shared(base + COUNTS + 4 * p.column);
    bool more = p.first + BUNDLES < end;
    return {p.number + 1, more ? p.column : p.column + 1, more ? p.first + BUNDLES : 0};
}

// One thread. stage: of the ring, counted on from batch to batch.
FN void fetch(const Arguments& a, u32 base, u32 head, u32 batch, const Piece& p, u32 stage) {
    u64 row = ((u64)(batch + p.column) * a.heads + head) * a.splits + p.first;
    u32 bytes = smaller(BUNDLES, a.splits - p.first) * SPLIT_BYTES, place = stage % STAGES;
    barrier_expect(base + BARRIERS + 8 * place, bytes);
    copy_bulk(base + PIECES + place * PIECE_BYTES, a.partial + row * SPLIT_BYTES, bytes, base + BARRIERS + 8 * place);
}

// Lane 4b + c: 8 latents of split b of the piece, where that holds something.
FN void add_split(float (&sum)[8], u32 base, const Piece& p, u32 stage) {
    u32 bundle = lane_index() / 4, split = p.first + bundle;
    if (split >= load_shared(base + COUNTS + 4 * p.column)) return;
    float share = load_shared_f32(base + SHARES + 4 * (p.column * MAX_SPLITS + split));
    u32 at = base + PIECES + stage % STAGES * PIECE_BYTES + bundle * SPLIT_BYTES;
    u32x4 v = load_shared_4(at + 64 * warp_index() + 16 * (lane_index() % 4));
    sum[0] += share * bf16_lo(v.x), sum[1] += share * bf16_hi(v.x);
    sum[2] += share * bf16_lo(v.y), sum[3] += share * bf16_hi(v.y);
    sum[4] += share * bf16_lo(v.z), sum[5] += share * bf16_hi(v.z);
    sum[6] += share * bf16_lo(v.w), sum[7] += share * bf16_hi(v.w);
}

// Half of a lane's values are traded for the other half of its partner's, and so on: one is left, summed over all bundles.
template <u32 LEFT>
FN void trade(float (&sum)[8], u32 partner) {
    bool upper = lane_index() & partner;
    for (u32 i = 0; i < LEFT; i++) {
        float mine = upper ? sum[i + LEFT] : sum[i], theirs = upper ? sum[i] : sum[i + LEFT];
        sum[i] = mine + shuffle_xor(theirs, partner);
    }
}

FN void store_latent(float (&sum)[8], u32 base, u32 column) {
    trade<4>(sum, 16), trade<2>(sum, 8), trade<1>(sum, 4);
    u32 lane = lane_index(), latent = 32 * warp_index() + 8 * (lane % 4) + lane / 16 * 4 + lane / 8 % 2 * 2 + lane / 4 % 2;
    store_shared_u16(base + LATENTS + column * LATENT_ROW + 2 * latent, f32_to_bf16(sum[0]));
}

// The latents of a batch of queries. stage: as it goes on.
FN void combine(const Arguments& a, u32 base, u32 head, u32 batch, u32 columns, u32& stage) {
    Piece wanted = {0, 0, 0};
    u32 wanted_stage = stage;
    if (thread_index() == 0)
        for (; wanted.number < STAGES && wanted.column < columns; wanted = after(a, base, wanted))
            fetch(a, base, head, batch, wanted, wanted_stage++);
    if (warp_index() < columns) find_shares(a, base, head, batch + warp_index(), warp_index());
    sync_block();
    float sum[8] = {};
    for (Piece p = {0, 0, 0}; p.column < columns; stage++) {
        Piece next = after(a, base, p);
        barrier_wait(base + BARRIERS + 8 * (stage % STAGES), stage / STAGES % 2);
        if (warp_index() < R / 32) {
            add_split(sum, base, p, stage);
            sync_warp();
            if (next.column != p.column) {
                store_latent(sum, base, p.column);
                for (u32 i = 0; i < 8; i++) sum[i] = 0;
            }
        }
        sync_block();
        if (thread_index() == 0 && wanted.column < columns) {
            fetch(a, base, head, batch, wanted, wanted_stage++);
            wanted = after(a, base, wanted);
        }
        p = next;
    }
}

// One warp: 16 rows x 8 queries over its part of R. A column past the last query is never stored.
FN void multiply(float (&c)[4], u32 base, u32 tile, u32 part) {
    u32 lane = lane_index(), unit = part * UNITS;
    u32 w = base + WEIGHTS + (tile * (R / 32) + unit) * 1024 + 16 * lane;
    u32 x = base + LATENTS + lane / 4 * LATENT_ROW + 64 * unit + 16 * (lane % 4);
    for (u32 u = 0; u < UNITS; u++) {
        u32x4 upper = load_shared_4(w + 1024 * u), lower = load_shared_4(w + 1024 * u + 512), v = load_shared_4(x + 64 * u);
        mma_bf16(c, upper.x, lower.x, upper.y, lower.y, v.x, v.y);
        mma_bf16(c, upper.z, lower.z, upper.w, lower.w, v.z, v.w);
    }
}

FN void store_sums(const float (&c)[4], u32 base, u32 tile, u32 part) {
    u32 g = lane_index() / 4, t = lane_index() % 4;
    u32 at = base + SUMS + 4 * ((part * ROWS + 16 * tile + g) * COLUMNS + 2 * t);
    store_shared_2(at, {as_u32(c[0]), as_u32(c[1])});
    store_shared_2(at + 4 * 8 * COLUMNS, {as_u32(c[2]), as_u32(c[3])});
}

FN void store_outputs(const Arguments& a, u32 base, u32 first, u32 columns, u32 place) {
    for (u32 i = thread_index(); i < columns * ROWS; i += THREADS) {
        u32 column = i / ROWS, row = i % ROWS, at = base + SUMS + 4 * (row * COLUMNS + column);
        float sum = 0;
        for (u32 part = 0; part < PARTS; part++) sum += load_shared_f32(at + 4 * part * ROWS * COLUMNS);
        store_global_u16(a.out + 2 * ((u64)(first + column) * a.width + place + row), f32_to_bf16(sum));
    }
}

// What follows the last head, so that rows are whole 128 inputs of the next product.
FN void store_padding(const Arguments& a) {
    u32 used = a.heads * V, padding = a.width - used;
    for (u32 i = thread_index(); i < padding * a.queries; i += THREADS)
        store_global_u16(a.out + 2 * ((u64)(i / padding) * a.width + used + i % padding), 0);
}

// Block (head, 2 group + half of V): every GROUPS-th batch of queries.
KERNEL_BESIDE(unabsorb, Arguments, 2) {
    let_next_grid_start();
    u32 base = shared_base(), head = block_index(), half = block_index_y() % 2, warp = warp_index();
    u32 weights_there = base + BARRIERS + 8 * STAGES, stage = 0;
    if (thread_index() == 0) {
        const char* from = a.weight + (u64)(2 * head + half) * WEIGHT_BYTES;
        u64 policy = read_once();
        for (u32 i = 0; i <= STAGES; i++) barrier_init(base + BARRIERS + 8 * i);
        barrier_init_done();
        barrier_expect(weights_there, WEIGHT_BYTES);
        for (u32 i = 0; i < WEIGHT_BYTES; i += COPY_BYTES)
            copy_bulk(base + WEIGHTS + i, from + i, smaller(COPY_BYTES, WEIGHT_BYTES - i), weights_there, policy);
    }
    sync_block();
    wait_for_previous_grid();
    u32 first = block_index_y() / 2 * COLUMNS;
    for (u32 batch = first; batch < (u32)a.queries; batch += GROUPS * COLUMNS) {
        u32 columns = smaller(COLUMNS, a.queries - batch);
        combine(a, base, head, batch, columns, stage);
        if (batch == first) barrier_wait(weights_there, 0);
        float c[4] = {};
        multiply(c, base, warp % TILES, warp / TILES);
        store_sums(c, base, warp % TILES, warp / TILES);
        sync_block();
        store_outputs(a, base, batch, columns, head * V + half * ROWS);
    }
    if (head + 1 == (u32)a.heads && half && first == 0) store_padding(a);
}
