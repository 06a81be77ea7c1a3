// Combines the splits of each query's attention, and multiplies the latents by W_UV, which takes them out of the latent
// space (o = W_UV latent): see unabsorb.py.
//
// A thread block loads one half of one head's rows of W_UV into shared memory before the previous grid ends: 64 KB for
// V = 128, R = 512. For 8 queries at a time it combines the splits of its head, then multiplies: each warp has a row
// tile and a part of R.
//
// A team of R / 8 threads reads a split at once, 16 bytes per thread, and issues AT_ONCE loads before it adds the first
// split, and before it knows how many splits are not empty. With up to `few` splits a team has a query, and adds its
// splits in order. With more, all teams work on one query after the other, every eighth split each, and their sums are
// added in shared memory.
//
// The kernel is small, 102 KB of shared memory and 64 registers: its weights can be loaded while small thread blocks of
// `attend` are still resident on the SM, and two of its blocks share an SM if GROUPS blocks divide many queries.
#include "core.cuh"

constexpr u32 WARPS = THREADS / 32;
constexpr float LOG2_E = 1.44269504f;
constexpr u32 ROWS = V / 2, TILES = ROWS / 16, PARTS = WARPS / TILES;
constexpr u32 UNITS = R / 32 / PARTS;  // of a warp: 32 inputs, two MMAs each
constexpr u32 WEIGHT_BYTES = ROWS * R * 2, COPY_BYTES = 16384;
constexpr u32 COLUMNS = 8;                       // the columns of an MMA are queries
constexpr u32 TEAMS = 8, TEAM = R / 8;           // threads of a team
constexpr u32 AT_ONCE = 8;                       // splits that a team loads at once
constexpr u32 HELD = (MAX_SPLITS + 31) / 32;      // log-sum-exps that a lane holds
constexpr u32 LATENT_ROW = 2 * R + 64;           // padded, so that the eight rows of a fragment use all banks

constexpr u32 WEIGHTS = 0;
constexpr u32 SHARES = WEIGHTS + WEIGHT_BYTES;             // float32 [COLUMNS, MAX_SPLITS]: weights of splits
constexpr u32 COUNTS = SHARES + 4 * COLUMNS * MAX_SPLITS;  // [COLUMNS]: splits that are not empty, the first ones
constexpr u32 LATENTS = COUNTS + 4 * COLUMNS;    // bf16 [COLUMNS, LATENT_ROW]
constexpr u32 TEAM_SUMS = LATENTS + COLUMNS * LATENT_ROW;  // float32 [TEAMS, R]
constexpr u32 SUMS = TEAM_SUMS + 4 * TEAMS * R;            // float32 [PARTS, ROWS, COLUMNS]
constexpr u32 WEIGHTS_THERE = SUMS + 4 * PARTS * ROWS * COLUMNS;  // an mbarrier

static_assert(R % (32 * PARTS) == 0 && TILES * PARTS == WARPS, "every warp has a tile and a whole part of R");
static_assert(TEAMS * TEAM <= THREADS && TEAMS == COLUMNS && WARPS >= COLUMNS, "a query has a team, and a warp");

struct UnabsorbLaunch {
    const char* partial;  // bf16 [Q, H, splits, R]
    const float* lse;     // [Q, H, splits]
    const char* weight;   // bf16 [H, V / 16, R / 32, 16, 32]
    char* out;            // bf16 [Q, width]
    int queries, heads, splits, width, few;
};

// Called by a warp: the weights of a query's splits, exp(lse - the largest), divided by their sum.
FN void find_shares(const UnabsorbLaunch& a, u32 base, u32 head, u32 query, u32 column) {
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

// What a team adds: every STEP-th split of a query, from `first` on. from: the address of the thread's part of the
// query's first split.
template <u32 STEP>
struct Splits {
    const char* from;
    u32 first;
    u32x4 v[AT_ONCE];

    __device__ __forceinline__ void load(u32 i, u32 split) { v[i] = load_global_4(from + split * (2 * R)); }
    __device__ __forceinline__ void begin(const UnabsorbLaunch& a, u32 query, u32 head) {
        from = a.partial + ((u64)query * a.heads + head) * a.splits * (2 * R) + thread_index() % TEAM * 16;
#pragma unroll
        for (u32 i = 0; i < AT_ONCE; i++)
            if (first + i * STEP < (u32)a.splits) load(i, first + i * STEP);
    }
    __device__ __forceinline__ void add_to(float (&sum)[8], u32 base, u32 column) {
        u32 count = load_shared(base + COUNTS + 4 * column), shares = base + SHARES + 4 * column * MAX_SPLITS;
#pragma unroll 1
        for (u32 at = first; at < count; at += AT_ONCE * STEP)
#pragma unroll
            for (u32 i = 0; i < AT_ONCE; i++) {
                u32 split = at + i * STEP, later = split + AT_ONCE * STEP;
                if (split >= count) break;
                float share = load_shared_f32(shares + 4 * split);
                sum[0] += share * bf16_lo(v[i].x), sum[1] += share * bf16_hi(v[i].x);
                sum[2] += share * bf16_lo(v[i].y), sum[3] += share * bf16_hi(v[i].y);
                sum[4] += share * bf16_lo(v[i].z), sum[5] += share * bf16_hi(v[i].z);
                sum[6] += share * bf16_lo(v[i].w), sum[7] += share * bf16_hi(v[i].w);
                if (later < count) load(i, later);
            }
    }
};

// Called by all threads: the split weights of a batch of queries.
FN void share_out(const UnabsorbLaunch& a, u32 base, u32 head, u32 batch, u32 columns) {
    if (warp_index() < columns) find_shares(a, base, head, batch + warp_index(), warp_index());
    sync_block();
}

// The latents of a batch of queries, for few splits per query.
FN void combine_few(const UnabsorbLaunch& a, u32 base, u32 head, u32 batch, u32 columns) {
    u32 column = thread_index() / TEAM;
    Splits<1> splits = {nullptr, 0};
    if (column < columns) splits.begin(a, batch + column, head);
    share_out(a, base, head, batch, columns);
    if (column >= columns) return;
    float sum[8] = {};
    splits.add_to(sum, base, column);
    u32x4 v = {pack_bf16(sum[0], sum[1]), pack_bf16(sum[2], sum[3]), pack_bf16(sum[4], sum[5]), pack_bf16(sum[6], sum[7])};
    store_shared_4(base + LATENTS + column * LATENT_ROW + thread_index() % TEAM * 16, v);
}

// The same for many splits. Loads of the next query are issued before the sums of this one are added.
FN void combine_many(const UnabsorbLaunch& a, u32 base, u32 head, u32 batch, u32 columns) {
    u32 thread = thread_index(), team = thread / TEAM, to = base + TEAM_SUMS + team * (4 * R) + thread % TEAM * 32;
    Splits<TEAMS> splits = {nullptr, team};
    if (team < TEAMS) splits.begin(a, batch, head);
    share_out(a, base, head, batch, columns);
    for (u32 column = 0; column < columns; column++) {
        if (team < TEAMS) {
            float sum[8] = {};
            splits.add_to(sum, base, column);
            if (column + 1 < columns) splits.begin(a, batch + column + 1, head);
            store_shared_4(to, {as_u32(sum[0]), as_u32(sum[1]), as_u32(sum[2]), as_u32(sum[3])});
            store_shared_4(to + 16, {as_u32(sum[4]), as_u32(sum[5]), as_u32(sum[6]), as_u32(sum[7])});
        }
        sync_block();
        if (thread < R) {
            float sum = 0;
            for (u32 i = 0; i < TEAMS; i++) sum += load_shared_f32(base + TEAM_SUMS + 4 * (i * R + thread));
            store_shared_u16(base + LATENTS + column * LATENT_ROW + 2 * thread, f32_to_bf16(sum));
        }
        sync_block();
    }
}

// Called by a warp: 16 rows x 8 queries over its part of R. Columns past the last query are computed but not stored.
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

FN void store_outputs(const UnabsorbLaunch& a, u32 base, u32 first, u32 columns, u32 place) {
    for (u32 i = thread_index(); i < columns * ROWS; i += THREADS) {
        u32 column = i / ROWS, row = i % ROWS, at = base + SUMS + 4 * (row * COLUMNS + column);
        float sum = 0;
        for (u32 part = 0; part < PARTS; part++) sum += load_shared_f32(at + 4 * part * ROWS * COLUMNS);
        store_global_u16(a.out + 2 * ((u64)(first + column) * a.width + place + row), f32_to_bf16(sum));
    }
}

// Zeros after the last head, so that rows have whole units of 128 inputs for the next product.
FN void store_padding(const UnabsorbLaunch& a) {
    u32 used = a.heads * V, padding = a.width - used;
    for (u32 i = thread_index(); i < padding * a.queries; i += THREADS)
        store_global_u16(a.out + 2 * ((u64)(i / padding) * a.width + used + i % padding), 0);
}

// Block (head, 2 group + half of V) has every GROUPS-th batch of queries.
KERNEL_BESIDE(unabsorb, UnabsorbLaunch, 2) {
    let_next_grid_start();
    u32 base = shared_base(), head = block_index(), half = block_index_y() % 2, warp = warp_index(), there = base + WEIGHTS_THERE;
    if (thread_index() == 0) {
        const char* from = a.weight + (u64)(2 * head + half) * WEIGHT_BYTES;
        u64 policy = read_once();
        barrier_init(there);
        barrier_init_done();
        barrier_expect(there, WEIGHT_BYTES);
        for (u32 i = 0; i < WEIGHT_BYTES; i += COPY_BYTES)
            copy_bulk(base + WEIGHTS + i, from + i, smaller(COPY_BYTES, WEIGHT_BYTES - i), there, policy);
    }
    sync_block();
    wait_for_previous_grid();
    u32 first = block_index_y() / 2 * COLUMNS;
    for (u32 batch = first; batch < (u32)a.queries; batch += GROUPS * COLUMNS) {
        u32 columns = smaller(COLUMNS, a.queries - batch);
        if (a.splits <= a.few)
            combine_few(a, base, head, batch, columns);
        else
            combine_many(a, base, head, batch, columns);
        sync_block();
        if (batch == first) barrier_wait(there, 0);
        float c[4] = {};
        multiply(c, base, warp % TILES, warp / TILES);
        store_sums(c, base, warp % TILES, warp / TILES);
        sync_block();
        store_outputs(a, base, batch, columns, head * V + half * ROWS);
    }
    if (head + 1 == (u32)a.heads && half && first == 0) store_padding(a);
}
