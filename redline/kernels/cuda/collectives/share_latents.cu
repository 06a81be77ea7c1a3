// Sends each rank's partial attention results to the rank that owns the head: see share_latents.py.
//
// With context parallelism a rank attends with the heads of all ranks to its own part of every context, in splits. This
// kernel combines the splits of a (query, head) row to one latent and its log-sum-exp, and sends them to the rank that
// owns the head. That rank ends up with one result per rank: RANKS splits, which `unabsorb` combines. A thread block
// combines other ranks' heads first, so that their words are in flight while it combines its own.
//
// A thread block has the same set of places (query, head of a rank) for each owner, so it waits only for words from the
// thread blocks with its own index. With up to `few` splits each of its warps combines a row. With more, all its warps
// combine one row, every WARPS-th split each, and their sums are added in shared memory. Block (x, y) has the latent's
// numbers [256 y, 256 y + 256), a lane eight of them.
// Macros: RANKS, R (a multiple of 256), MAX_SPLITS.
#include "core.cuh"
#include "all_reduce.cuh"

constexpr u32 WARPS = THREADS / 32, SLICE = 256;
constexpr u32 AT_ONCE = 8;                    // splits that a lane loads at once
constexpr u32 HELD = (MAX_SPLITS + 31) / 32;  // log-sum-exps that a lane holds
constexpr float LOG2_E = 1.44269504f, LN_2 = 0.69314718f;

constexpr u32 SHARES = 0;                              // float32 [WARPS, MAX_SPLITS]: each split's weight in its row
constexpr u32 SUMS = SHARES + 4 * WARPS * MAX_SPLITS;  // float32 [WARPS, SLICE]

static_assert(R % SLICE == 0 && RANKS <= WARPS && MAX_SPLITS % 4 == 0, "whole slices, a warp for each rank, whole 16 bytes");

struct ShareLatentsLaunch {
    const char* partial;  // bf16 [Q, H, splits, R], H heads of all ranks
    const float* lse;     // [Q, H, splits], natural logarithm; -inf: this split and all later ones are empty
    char* out;            // bf16 [Q, H / RANKS, RANKS, R]
    float* lse_out;       // [Q, H / RANKS, RANKS]
    u64 inbox_0, inbox_1, inbox_2, inbox_3, inbox_4, inbox_5, inbox_6, inbox_7;  // of RANKS ranks
    u64* control;  // described in all_reduce.cuh
    u64 site;      // first word in an inbox: [rank][Q H / RANKS][R / 2] words, then [Q H / RANKS]
    u32 queries, heads, splits, few, rank, room;  // heads: of one rank
};

// The weights of a row's splits, in this warp's part of shared memory. A row is a (query, head) pair.
struct Shares {
    u32 table, count;  // shared-memory address, and the number of splits that are not empty
    float lse;         // of all splits
};
FN Shares find_shares(const ShareLatentsLaunch& a, u32 row) {
    Shares found = {shared_base() + SHARES + 4 * MAX_SPLITS * warp_index(), 0, -infinity()};
    float lse[HELD], most = -infinity(), sum = 0;
#pragma unroll
    for (u32 i = 0; i < HELD; i++) {
        u32 split = 32 * i + lane_index();
        lse[i] = split < a.splits ? load_global_f32(a.lse + row * a.splits + split) : -infinity();
        if (lse[i] != lse[i]) lse[i] = infinity();  // makes all results of the row NaN
        most = larger(most, lse[i]);
        found.count += count_bits(warp_ballot(lse[i] > -infinity()));
    }
    for (u32 i = 16; i; i >>= 1) most = larger(most, shuffle_xor(most, i));
#pragma unroll
    for (u32 i = 0; i < HELD; i++) sum += lse[i] = lse[i] > -infinity() ? exp2_fast((lse[i] - most) * LOG2_E) : 0.f;
    sum = warp_sum(sum);
    sync_warp();  // all lanes have finished with the previous row's weights
#pragma unroll
    for (u32 i = 0; i < HELD; i++) {
        u32 split = 32 * i + lane_index();
        if (split < found.count) store_shared_f32(found.table + 4 * split, lse[i] / sum);
    }
    sync_warp();
    if (found.count) found.lse = most + log2_fast(sum) * LN_2;
    return found;
}

// Called by a warp: adds every `step`-th split of a row from `first` on, multiplied by its weight.
FN void sum_splits(const ShareLatentsLaunch& a, u32 row, const Shares& shares, u32 first, u32 step, float (&sum)[8]) {
    const char* from = a.partial + (u64)row * a.splits * (2 * R) + block_index_y() * (2 * SLICE) + 16 * lane_index();
    for (u32 at = first; at < shares.count; at += AT_ONCE * step) {
        u32x4 v[AT_ONCE];
#pragma unroll
        for (u32 i = 0; i < AT_ONCE; i++)
            if (at + i * step < shares.count) v[i] = load_global_4(from + (u64)(at + i * step) * (2 * R));
#pragma unroll
        for (u32 i = 0; i < AT_ONCE; i++) {
            if (at + i * step >= shares.count) break;
            float share = load_shared_f32(shares.table + 4 * (at + i * step));
            sum[0] += share * bf16_lo(v[i].x), sum[1] += share * bf16_hi(v[i].x);
            sum[2] += share * bf16_lo(v[i].y), sum[3] += share * bf16_hi(v[i].y);
            sum[4] += share * bf16_lo(v[i].z), sum[5] += share * bf16_hi(v[i].z);
            sum[6] += share * bf16_lo(v[i].w), sum[7] += share * bf16_hi(v[i].w);
        }
    }
}

// Called by a warp: sends a result to the rank that owns the head. `place` is the row's index among the owner's rows.
FN void hand_over(const ShareLatentsLaunch& a, const Ranks& ranks, u32 owner, u32 place, const float (&sum)[8], float lse) {
    u32x4 v = {pack_bf16(sum[0], sum[1]), pack_bf16(sum[2], sum[3]), pack_bf16(sum[4], sum[5]), pack_bf16(sum[6], sum[7])};
    u32 number = block_index_y() * SLICE + 8 * lane_index();
    bool has_lse = block_index_y() == 0 && lane_index() == 0;
    if (owner == a.rank) {
        store_global_4(a.out + ((u64)place * RANKS + a.rank) * (2 * R) + 2 * number, v);
        if (has_lse) store_global_f32(a.lse_out + place * RANKS + a.rank, lse);
    } else {
        send_to(ranks, owner, place * (R / 2) + number / 2, v);
        if (has_lse) send_to(ranks, owner, a.queries * a.heads * (R / 2) + place, as_u32(lse));
    }
}

// Called by a warp: receives a result from another rank.
FN void take_over(const ShareLatentsLaunch& a, const Ranks& ranks, u32 source, u32 place) {
    u32 number = block_index_y() * SLICE + 8 * lane_index();
    store_global_4(a.out + ((u64)place * RANKS + source) * (2 * R) + 2 * number,
                   receive_from<u32x4>(ranks, source, place * (R / 2) + number / 2));
    if (block_index_y() == 0 && lane_index() == 0) {
        float lse = as_float(receive_from<u32>(ranks, source, a.queries * a.heads * (R / 2) + place));
        store_global_f32(a.lse_out + place * RANKS + source, lse == lse ? lse : infinity());  // NaN: a lost rank
    }
}

FN u32 row_of(const ShareLatentsLaunch& a, u32 owner, u32 place) {
    return place / a.heads * (a.heads * RANKS) + owner * a.heads + place % a.heads;
}

FN void combine_few(const ShareLatentsLaunch& a, const Ranks& ranks, u32 places) {
    u32 first = block_index() * WARPS + warp_index(), step = grid_size() * WARPS;
    for (u32 other = 1; other <= RANKS; other++)  // this rank's own rows last
        for (u32 place = first; place < places; place += step) {
            u32 owner = (a.rank + other) % RANKS, row = row_of(a, owner, place);
            Shares shares = find_shares(a, row);
            float sum[8] = {};
            sum_splits(a, row, shares, 0, 1, sum);
            hand_over(a, ranks, owner, place, sum, shares.lse);
        }
    for (u32 place = first; place < places; place += step)
        for (u32 other = 1; other < RANKS; other++) take_over(a, ranks, (a.rank + other) % RANKS, place);
}

FN void combine_many(const ShareLatentsLaunch& a, const Ranks& ranks, u32 places) {
    u32 sums = shared_base() + SUMS, mine = 32 * lane_index();
    for (u32 other = 1; other <= RANKS; other++)
        for (u32 place = block_index(); place < places; place += grid_size()) {
            u32 owner = (a.rank + other) % RANKS, row = row_of(a, owner, place), to = sums + 4 * SLICE * warp_index() + mine;
            Shares shares = find_shares(a, row);
            float sum[8] = {};
            sum_splits(a, row, shares, warp_index(), WARPS, sum);
            store_shared_4(to, {as_u32(sum[0]), as_u32(sum[1]), as_u32(sum[2]), as_u32(sum[3])});
            store_shared_4(to + 16, {as_u32(sum[4]), as_u32(sum[5]), as_u32(sum[6]), as_u32(sum[7])});
            sync_block();
            if (warp_index() == 0) {
                float all[8] = {};
                for (u32 warp = 0; warp < WARPS; warp++)
                    for (u32 half = 0; half < 2; half++) {
                        u32x4 v = load_shared_4(sums + 4 * SLICE * warp + mine + 16 * half);
                        all[4 * half] += as_float(v.x), all[4 * half + 1] += as_float(v.y);
                        all[4 * half + 2] += as_float(v.z), all[4 * half + 3] += as_float(v.w);
                    }
                hand_over(a, ranks, owner, place, all, shares.lse);
            }
            sync_block();
        }
    u32 source = warp_index();
    if (source >= RANKS || source == a.rank) return;
    for (u32 place = block_index(); place < places; place += grid_size()) take_over(a, ranks, source, place);
}

KERNEL_BESIDE(share_latents, ShareLatentsLaunch, 2) {
    let_next_grid_start();
    Ranks ranks = ranks_of(a, a.site);
    wait_for_previous_grid();
    if (a.splits <= a.few)
        combine_few(a, ranks, a.queries * a.heads);
    else
        combine_many(a, ranks, a.queries * a.heads);
}
