// h = weight silu(gate x) (up x) for each (expert, token) pair.
//
// A team of SLICES warps has a run of row tiles: 8 rows of gate and the same 8 of up, of one slot (an expert and up to
// eight of its pairs). A warp multiplies its slice of K and keeps that slice of x in registers until the slot changes.
// The team's partial sums are added in shared memory, several row tiles at a time. x also comes through the ring of
// stages, before the weights of its slot: a load outside the ring would return only after all earlier copies.
//
// Macros. SLICES, SLICE: number of slices of K, and inputs of a slice; PART: inputs of a record. X: inputs of a row of
// x. TILES: row tiles of an expert. FORMAT: of the weights, and so of h, which has the form that experts_down reads.
// ROOM_TOKENS, ROOM_PAIRS, ROOM_SLOTS: the largest numbers of tokens, pairs and slots.
#include "expert_formats.cuh"
#include "ring.cuh"
#include "slots.cuh"
#if FORMAT == INT4
#include "int4_chains.cuh"
#elif FORMAT == NVFP4
#include "nvfp4_chains.cuh"
#elif FORMAT == BF16
#include "bf16_chains.cuh"
#endif

struct ExpertsUpLaunch {
    const char* weights;       // [E][TILES][SLICES / 4][PARTS][4] records
    const char* x;             // bf16 [T, X]
    const float* rstd;         // [T]
    const int* pair_token;     // [pairs]
    const float* pair_weight;  // [pairs]
    const int* slot_expert;    // [slots]
    const int* slot_first;     // [slots + 1]
    const int* count;          // [1]
    const int* ready;          // [1]: 1 once the lists are complete; null: they are when the previous grid has ended
    char* h;                   // f16 or bf16 [pairs, 8 TILES]
    int tokens, pairs, slots;
};

constexpr u32 GROUPS = SLICE / 32, PART_GROUPS = PART / 32, PARTS = SLICE / PART;
constexpr u32 RECORD = FORMAT == BF16 ? 32 * PART : FORMAT == NVFP4 ? 9 * PART + 16 : 9 * PART;
constexpr u32 PIECE = 4 * RECORD;  // four warps' records of one row tile
constexpr u32 TEAMS = 16 / SLICES, TEAM_THREADS = 32 * SLICES;
constexpr u32 X_INPUTS = 4 * SLICE;  // of one token, in a stage
constexpr u32 X_TOKENS = 4;          // tokens of a stage
constexpr u32 STAGE = PIECE > X_TOKENS * 2 * X_INPUTS ? PIECE : X_TOKENS * 2 * X_INPUTS;
constexpr u32 SUMS = 512;  // bytes of a warp's partial sums; there are two buffers
static_assert(PARTS * PART == SLICE && THREADS == 512, "a slice comes apart into records");
static_assert(SLICES * SLICE - X < X_INPUTS, "every four slices have some of x");

using Stages = Ring<STAGES, STAGE>;
constexpr u32 SUM_AT = Stages::MEMORY;
constexpr u32 RSTD_AT = SUM_AT + 16 * 2 * SUMS;
constexpr u32 TOKEN_AT = RSTD_AT + ROOM_TOKENS * 4;
constexpr u32 WEIGHT_AT = TOKEN_AT + ROOM_PAIRS * 4;
constexpr u32 SLOT_AT = WEIGHT_AT + ROOM_PAIRS * 4;

FN u32 token_of(u32 pair) { return load_shared(shared_base() + TOKEN_AT + 4 * pair); }
FN float rstd_of(u32 pair) { return load_shared_f32(shared_base() + RSTD_AT + 4 * token_of(pair)); }
FN u32 expert_of(u32 slot) { return slot_of(SLOT_AT, slot).expert; }
FN u32 first_of(u32 slot) { return slot_of(SLOT_AT, slot).first; }
FN u32 pairs_of(u32 slot) { return first_of(slot + 1) - first_of(slot); }

// Returns the number of slots. Every thread block needs the lists, so it loads up to their capacity before it knows
// their length.
FN u32 load_lists(const ExpertsUpLaunch& a) {
    u32 base = shared_base(), count = load_global_fresh(a.count);
    load_words<ROOM_PAIRS>(base + TOKEN_AT, a.pair_token, a.pairs);
    load_words<ROOM_PAIRS>(base + WEIGHT_AT, a.pair_weight, a.pairs);
    load_slots<ROOM_SLOTS>(SLOT_AT, a.slot_expert, a.slot_first, a.slots);
    return count;
}
// Waits only for the lists while the previous grid continues with its other results. This cannot deadlock: all thread
// blocks of that grid have started.
FN void wait_for_lists(const ExpertsUpLaunch& a) {
    if (!a.ready) return wait_for_previous_grid();
    if (thread_index() == 0)
        while (!load_global_fresh(a.ready)) {}
    sync_block();
}

FN u32 x_stages(u32 slot) { return pairs_of(slot) > X_TOKENS ? 2 : 1; }

// Item: a row tile of a slot, slot * TILES + tile. Piece: item * PARTS + part.
struct Team {
    const ExpertsUpLaunch& a;
    Stages ring;
    u32 fetch, end, x_left;  // fetch: the piece that the ring's next stage is for; x_left: stages of x before it
    u32 buffer;

    __device__ __forceinline__ u32 warp() const { return forget(warp_index()); }
    __device__ __forceinline__ u32 number() const { return TEAMS == 1 ? 0 : warp() / SLICES; }
    __device__ __forceinline__ u32 slice() const { return TEAMS == 1 ? warp() : warp() % SLICES; }
    __device__ __forceinline__ u32 quad() const { return slice() / 4; }  // which four slices of K its group has

    __device__ __forceinline__ void fill(u32 stage) const {
        u32 slot = fetch / (TILES * PARTS), barrier = ring.barrier(stage);
        if (!x_left) {
            u64 record = ((u64)expert_of(slot) * TILES + fetch / PARTS % TILES) * SLICES + 4 * quad();
            if (PARTS > 1) record = record * PARTS + 4 * (fetch % PARTS);
            barrier_expect(barrier, PIECE);
            copy_bulk(stage, a.weights + record * RECORD, PIECE, barrier, read_once());
            return;
        }
        u32 skip = (x_stages(slot) - x_left) * X_TOKENS, first = first_of(slot) + skip;
        u32 n = smaller(pairs_of(slot) - skip, X_TOKENS);
        u32 from = quad() * X_INPUTS, bytes = 2 * smaller(X_INPUTS, X - from);
        barrier_expect(barrier, n * bytes);
        for (u32 i = 0; i < n; i++)
            copy_bulk(stage + i * 2 * X_INPUTS, a.x + 2 * ((u64)token_of(first + i) * X + from), bytes, barrier);
    }
    __device__ __forceinline__ void filled() {
        if (x_left)
            x_left--;
        else if (++fetch < end && fetch % (TILES * PARTS) == 0)
            x_left = x_stages(fetch / (TILES * PARTS));
    }
    __device__ __forceinline__ void release() { release_stage(*this); }
    template <u32 COLUMNS>
    __device__ __forceinline__ void load_x(Fragments<GROUPS>& f, u32 first, u32 n) {
        u32 lane = forget(lane_index()), t = lane & 3, mine = (lane >> 2) % COLUMNS, place = (lane >> 2) / COLUMNS;
        u32 k = slice() % 4 * PART + LANE_INPUTS * t;  // within the inputs of a stage
#pragma unroll
        for (u32 i = 0; i < GROUPS; i++) f.x[i][0] = f.x[i][1] = f.x[i][2] = f.x[i][3] = 0;
#pragma unroll
        for (u32 part = 0; part < (COLUMNS + X_TOKENS - 1) / X_TOKENS; part++) {
            u32 row = ring.wait() + 2 * ((mine - part * X_TOKENS) * X_INPUTS + k);
            bool here = mine < n && mine / X_TOKENS == part;
#pragma unroll
            for (u32 i = 0; i < GROUPS; i++) {
                u32 first = PARTS == 1 ? 32 * i : i / PART_GROUPS * (4 * PART) + i % PART_GROUPS * 32;  // relative to k
                bool exists = SLICES * SLICE == X || quad() * X_INPUTS + slice() % 4 * PART + first < X;
                load_group<COLUMNS>(f.x[i], row + 2 * first, here && exists, i, place);
            }
            release();
        }
#if FORMAT != BF16
        norm(f, mine < n ? rstd_of(first + mine) : 0.f);
#endif
    }
    // Processes `tiles` row tiles of a slot, from `tile` on, for n <= COLUMNS pairs from `first` on.
    template <u32 COLUMNS>
    __device__ __forceinline__ void run(u32 first, u32 n, u32 tile, u32 tiles) {
        constexpr u32 BATCH = COLUMNS == 1 ? 4 : 8 / COLUMNS;  // row tiles whose sums are added at once
        constexpr u32 TILE_SUMS = 16 * COLUMNS * 4;
        static_assert(BATCH * TILE_SUMS <= SUMS, "a warp's sums fit");
        Fragments<GROUPS> f;
        load_x<COLUMNS>(f, first, n);
        for (u32 stop = tile + tiles; tile < stop; tile += BATCH) {
            u32 batch = smaller(stop - tile, BATCH);
            for (u32 i = 0; i < batch; i++) {
                float acc[4] = {};
#if FORMAT == BF16
#pragma unroll
                for (u32 part = 0; part < PARTS; part++) {
                    multiply_tiles<GROUPS, PART_GROUPS>(ring.wait() + slice() % 4 * RECORD, f, part * PART_GROUPS, acc);
                    release();
                }
#else
                multiply_record<GROUPS, COLUMNS>(ring.wait() + slice() % 4 * RECORD, f, acc);
                release();
#endif
                fold<COLUMNS>(acc);
                u32 lane = forget(lane_index()), g = lane >> 2, t = lane & 3, at = sums(warp()) + i * TILE_SUMS;
                if (COLUMNS == 1 && t == 0) {
                    store_shared_f32(at + 4 * g, acc[0]), store_shared_f32(at + 4 * (g + 8), acc[2]);
                } else if (2 * t < COLUMNS) {
                    store_shared_2(at + 4 * (g * COLUMNS + 2 * t), {as_u32(acc[0]), as_u32(acc[1])});
                    store_shared_2(at + 4 * ((g + 8) * COLUMNS + 2 * t), {as_u32(acc[2]), as_u32(acc[3])});
                }
            }
            sync_threads(1 + number(), TEAM_THREADS);
            finish<COLUMNS>(first, n, tile, batch);
            buffer ^= 1;
        }
    }
    template <u32 COLUMNS>
    __device__ __forceinline__ void finish(u32 first, u32 n, u32 tile, u32 tiles) {
        for (u32 o = thread_index() % TEAM_THREADS; o < tiles * 8 * COLUMNS; o += TEAM_THREADS) {
            u32 part = o / (8 * COLUMNS), row = o / COLUMNS % 8, mine = o % COLUMNS;
            u32 at = sums(number() * SLICES) + 4 * (part * 16 * COLUMNS + row * COLUMNS + mine);
            float gate = 0, up = 0;
#pragma unroll
            for (u32 s = 0; s < SLICES; s++) {
                gate += load_shared_f32(at + s * 2 * SUMS);
                up += load_shared_f32(at + s * 2 * SUMS + 4 * 8 * COLUMNS);
            }
            if (mine >= n) continue;
            float weight = load_shared_f32(shared_base() + WEIGHT_AT + 4 * (first + mine));
            if (FORMAT == BF16) gate *= rstd_of(first + mine), up *= rstd_of(first + mine);
            float h = silu(gate) * up * (FORMAT == INT4 && row & 2 ? weight * 0.0625f : weight);
            u64 place = (u64)(first + mine) * (8 * TILES) + (tile + part) * 8 + row;
            store_global_u16(a.h + 2 * place, FORMAT == BF16 ? f32_to_bf16(h) : (u16)pack_f16(h, 0.f));
        }
    }
    __device__ __forceinline__ u32 sums(u32 w) const { return shared_base() + SUM_AT + (2 * w + buffer) * SUMS; }
};

KERNEL(experts_up, ExpertsUpLaunch) {
    u32 warp = warp_index();
    Stages ring(shared_base(), warp / 4);
    if (thread_index() % 128 == 0) ring.make();
    // The next grid may start only after this wait: what it reads before its own wait, the choice of experts, is then
    // complete.
    wait_for_lists(a);
    let_next_grid_start();
    u32 items = load_lists(a) * TILES;
    sync_block();

    u32 worker = block_index() * TEAMS + warp / SLICES, workers = grid_size() * TEAMS;
    u32 item = items * worker / workers, end = items * (worker + 1) / workers;
    Team team = {a, ring, item * PARTS, end * PARTS, item < end ? x_stages(item / TILES) : 0, 0};
    fill_stages(team);
    wait_for_previous_grid();
    static_assert(ROOM_TOKENS <= THREADS, "a thread has a token");
    u32 i = thread_index();
    if (i < a.tokens) store_shared_f32(shared_base() + RSTD_AT + 4 * i, load_global_f32(a.rstd + i));
    sync_block();
    while (item < end) {
        u32 slot = item / TILES, tile = item % TILES, tiles = smaller(end - item, TILES - tile);
        u32 first = first_of(slot), n = pairs_of(slot);
        if (n == 1)
            team.run<1>(first, n, tile, tiles);
        else if (n <= 4)
            team.run<4>(first, n, tile, tiles);
        else
            team.run<8>(first, n, tile, tiles);
        item += tiles;
    }
}
