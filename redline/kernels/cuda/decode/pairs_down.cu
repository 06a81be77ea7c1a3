// y = down h for each (expert, token) pair, for more tokens than experts_down can add in shared memory.
//
// A team of SLICES groups of four warps has a run of slabs: 64 rows of one slot (an expert and up to eight of its
// pairs). A group multiplies its slice of K, each warp one row tile of the slab, and keeps that slice of h in registers
// until the slot changes. The team's partial sums are added in shared memory. h comes through the ring of stages before
// the weights of its slot, as x does in experts_up.
//
// Macros. SLICES (1, 2 or 4), SLICE: number of slices of K, and inputs of a slice. SLABS: of an expert. FORMAT: of the
// weights, and so of h, in the form that experts_up writes. ROOM_PAIRS, ROOM_SLOTS: the largest numbers of pairs and
// slots.
#include "expert_formats.cuh"
#include "ring.cuh"
#include "slots.cuh"
#if FORMAT == INT4
#include "int4_chains.cuh"
#elif FORMAT == NVFP4
#include "nvfp4_chains.cuh"
#endif

struct PairsDownLaunch {
    const char* weights;     // [E][SLABS][SLICES][4] records
    const char* h;           // f16 [pairs, SLICES SLICE]
    const int* origin;       // [pairs]: the row of y
    const int* slot_expert;  // [slots]
    const int* slot_first;   // [slots + 1]
    const int* count;        // [1]
    char* y;                 // bf16 [pairs, 64 SLABS]: of each 16 rows, row g and row g + 8 in a word
    int pairs, slots;
};

constexpr u32 GROUPS = SLICE / 32, MOST = 8;
constexpr u32 RECORD = FORMAT == NVFP4 ? 9 * SLICE + 16 : 9 * SLICE, PIECE = 4 * RECORD;
constexpr u32 STAGE = PIECE > MOST * 2 * SLICE ? PIECE : MOST * 2 * SLICE;
constexpr u32 TEAMS = 4 / SLICES, TEAM_THREADS = 128 * SLICES;
constexpr u32 SUMS = 16 * MOST * 4;  // bytes of a warp's partial sums; there are two buffers
static_assert(THREADS == 512 && TEAMS * SLICES == 4, "a group has a slice");

using Stages = Ring<STAGES, STAGE>;
constexpr u32 SUM_AT = Stages::MEMORY;
constexpr u32 ORIGIN_AT = SUM_AT + 16 * 2 * SUMS;
constexpr u32 SLOT_AT = ORIGIN_AT + ROOM_PAIRS * 4;

FN u32 expert_of(u32 slot) { return slot_of(SLOT_AT, slot).expert; }
FN u32 first_of(u32 slot) { return slot_of(SLOT_AT, slot).first; }
FN u32 pairs_of(u32 slot) { return first_of(slot + 1) - first_of(slot); }

// Item: a slab of a slot, slot * SLABS + slab.
struct Team {
    const PairsDownLaunch& a;
    Stages ring;
    u32 fetch, end;  // fetch: the item that the ring's next stage is for
    bool h_next;     // whether that stage is for its slot's h
    u32 buffer;

    __device__ __forceinline__ u32 warp() const { return forget(warp_index()); }
    __device__ __forceinline__ u32 number() const { return warp() / (4 * SLICES); }
    __device__ __forceinline__ u32 slice() const { return SLICES == 1 ? 0 : warp() / 4 % SLICES; }

    __device__ __forceinline__ void fill(u32 stage) const {
        u32 slot = fetch / SLABS, barrier = ring.barrier(stage);
        if (!h_next) {
            u64 piece = ((u64)expert_of(slot) * SLABS + fetch % SLABS) * SLICES + slice();
            barrier_expect(barrier, PIECE);
            copy_bulk(stage, a.weights + piece * PIECE, PIECE, barrier, read_once());
            return;
        }
        u32 first = first_of(slot), n = pairs_of(slot);
        barrier_expect(barrier, n * 2 * SLICE);
#pragma unroll 1
        for (u32 i = 0; i < n; i++)
            copy_bulk(stage + i * 2 * SLICE, a.h + 2 * SLICE * ((u64)(first + i) * SLICES + slice()), 2 * SLICE, barrier);
    }
    __device__ __forceinline__ void filled() {
        if (h_next)
            h_next = false;
        else
            h_next = ++fetch < end && fetch % SLABS == 0;
    }
    __device__ __forceinline__ void release() { release_stage(*this); }
    template <u32 COLUMNS>
    __device__ __forceinline__ void load_h(Fragments<GROUPS>& f, u32 n) {
        u32 lane = forget(lane_index()), t = lane & 3, mine = (lane >> 2) % COLUMNS, place = (lane >> 2) / COLUMNS;
        u32 row = ring.wait() + 2 * (mine * SLICE + LANE_INPUTS * t);
#pragma unroll
        for (u32 i = 0; i < GROUPS; i++) {
            f.x[i][0] = f.x[i][1] = f.x[i][2] = f.x[i][3] = 0;
            load_group<COLUMNS>(f.x[i], row + 64 * i, mine < n, i, place);
        }
        release();
#if FORMAT == INT4
        correct(f);
#endif
    }
    // Processes slabs of a slot from `slab` on, for n <= COLUMNS pairs from `first` on.
    template <u32 COLUMNS>
    __device__ __forceinline__ void run(u32 first, u32 n, u32 slab, u32 slabs) {
        Fragments<GROUPS> f;
        load_h<COLUMNS>(f, n);
#pragma unroll 1
        for (u32 stop = slab + slabs; slab < stop; slab++) {
            float acc[4] = {};
            multiply_record<GROUPS, COLUMNS>(ring.wait() + warp() % 4 * RECORD, f, acc);
            release();
            fold<COLUMNS>(acc);
            u32 lane = forget(lane_index()), g = lane >> 2, t = lane & 3, at = sums(warp());
            if (COLUMNS == 1 && t == 0) {
                store_shared_2(at + 8 * g, {as_u32(acc[0]), as_u32(acc[2])});
            } else if (2 * t < COLUMNS) {
                store_shared_2(at + 8 * (2 * t * 8 + g), {as_u32(acc[0]), as_u32(acc[2])});
                store_shared_2(at + 8 * ((2 * t + 1) * 8 + g), {as_u32(acc[1]), as_u32(acc[3])});
            }
            sync_threads(1 + number(), TEAM_THREADS);
            finish<COLUMNS>(first, n, slab);
            buffer ^= 1;
        }
    }
    // A thread has rows g and g + 8 of a row tile, of one pair.
    template <u32 COLUMNS>
    __device__ __forceinline__ void finish(u32 first, u32 n, u32 slab) const {
        for (u32 o = thread_index() % TEAM_THREADS; o < 32 * COLUMNS; o += TEAM_THREADS) {
            u32 mine = o / 32, tile = o / 8 % 4, g = o % 8;
            if (mine >= n) continue;
            u32 at = sums(number() * 4 * SLICES + tile) + 8 * (mine * 8 + g);
            float upper = 0, lower = 0;
#pragma unroll
            for (u32 s = 0; s < SLICES; s++) {
                u32x2 part = load_shared_2(at + s * 4 * 2 * SUMS);
                upper += as_float(part.x), lower += as_float(part.y);
            }
            u64 row = load_shared(shared_base() + ORIGIN_AT + 4 * (first + mine));
            store_global(a.y + 2 * (row * (64 * SLABS) + slab * 64 + 16 * tile + 2 * g), pack_bf16(upper, lower));
        }
    }
    __device__ __forceinline__ u32 sums(u32 w) const { return shared_base() + SUM_AT + (2 * w + buffer) * SUMS; }
};

KERNEL(pairs_down, PairsDownLaunch) {
    u32 warp = warp_index();
    Stages ring(shared_base(), warp / 4);
    if (thread_index() % 128 == 0) ring.make();
    let_next_grid_start();
    // The lists were written two grids ago: experts_up, the grid between, calls let_next_grid_start only when they are
    // complete.
    u32 count = load_global_fresh(a.count);
    load_words<ROOM_PAIRS>(shared_base() + ORIGIN_AT, a.origin, a.pairs);
    load_slots<ROOM_SLOTS>(SLOT_AT, a.slot_expert, a.slot_first, a.slots);
    sync_block();

    u32 items = count * SLABS, worker = block_index() * TEAMS + warp / (4 * SLICES), workers = grid_size() * TEAMS;
    u32 item = (u64)items * worker / workers, end = (u64)items * (worker + 1) / workers;
    wait_for_previous_grid();
    Team team = {a, ring, item, end, item < end, 0};
    fill_stages(team);
    while (item < end) {
        u32 slot = item / SLABS, slab = item % SLABS, slabs = smaller(end - item, SLABS - slab);
        u32 first = first_of(slot), n = pairs_of(slot);
        if (n == 1)
            team.run<1>(first, n, slab, slabs);
        else if (n <= 4)
            team.run<4>(first, n, slab, slabs);
        else
            team.run<8>(first, n, slab, slabs);
        item += slabs;
    }
}
