// Top-k and the lists that the expert kernels read: one block, a warp to a token, then a thread to an expert.
#include "running_sum.cuh"

struct Arguments {
    const float* logits;  // [T, E]
    const float* bias;    // [E] or null
    const int* forced;    // [T, K] or null
    int* pair_token;
    float* pair_weight;
    int* slot_expert;
    int* slot_first;
    int* count;
    int* ids;
    float* weights;
    int tokens, slots, normalise;
    float scale;
};

constexpr u32 PER_LANE = (EXPERTS + 31) / 32;
constexpr u32 MOST_PAIRS = 512;
constexpr u32 SLOT_PAIRS = 8;

constexpr u32 TAKERS = 0;                             // [E][2] u32: bit t, token t chose this expert
constexpr u32 FIRST = TAKERS + THREADS * 8;           // [E] u32: its first pair
constexpr u32 CHOICE = FIRST + THREADS * 4;           // [T * K] u32
constexpr u32 SHARE = CHOICE + MOST_PAIRS * 4;        // [T * K] f32
constexpr u32 TOTALS = SHARE + MOST_PAIRS * 4;        // [warps] u32

// Larger floats have larger keys; none is 0, which stands for what is taken or does not exist.
FN u32 sort_key(float v) {
    u32 bits = as_u32(v);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// Lane i's choice, best first, ties to the lower id; 0 in lanes from K on. Lane i has the bias of experts 32j + i.
FN u32 choose(const Arguments& a, u32 token, const float (&bias)[PER_LANE]) {
    u32 lane = lane_index(), choice = 0, key[PER_LANE];
    float logit[PER_LANE];
#pragma unroll
    for (u32 j = 0; j < PER_LANE; j++)
        logit[j] = 32 * j + lane < EXPERTS ? load_global_f32(a.logits + token * EXPERTS + 32 * j + lane) : 0.f;
#pragma unroll
    for (u32 j = 0; j < PER_LANE; j++) key[j] = 32 * j + lane < EXPERTS ? sort_key(sigmoid(logit[j]) + bias[j]) : 0;
    for (u32 round = 0; round < CHOSEN; round++) {
        u32 best = 0;
#pragma unroll
        for (u32 j = 0; j < PER_LANE; j++) best = key[j] > best ? key[j] : best;
        best = warp_max(best);
        u32 mine = 0;  // the complement of the lowest id with this key
#pragma unroll
        for (u32 j = 0; j < PER_LANE; j++)
            if (key[j] == best && !mine) mine = ~(32 * j + lane);
        u32 id = ~warp_max(mine);
#pragma unroll
        for (u32 j = 0; j < PER_LANE; j++)
            if (32 * j + lane == id) key[j] = 0;
        if (lane == round) choice = id;
    }
    return choice;
}

KERNEL(choose_experts, Arguments) {
    let_next_grid_start();
    u32 base = shared_base(), thread = thread_index(), lane = lane_index(), pairs = a.tokens * CHOSEN;
    float bias[PER_LANE];
#pragma unroll
    for (u32 j = 0; j < PER_LANE; j++)
        bias[j] = a.bias && 32 * j + lane < EXPERTS ? load_global_f32(a.bias + 32 * j + lane) : 0.f;
    store_shared_2(base + TAKERS + 8 * thread, {0, 0});
    wait_for_previous_grid();
    sync_block();

    for (u32 token = warp_index(); token < a.tokens; token += THREADS / 32) {
        u32 id = 0;
        if (!a.forced)
            id = choose(a, token, bias);
        else if (lane < CHOSEN)
            id = load_global(a.forced + token * CHOSEN + lane);
        float weight = lane < CHOSEN ? sigmoid(load_global_f32(a.logits + token * EXPERTS + id)) : 0.f;
        float sum = warp_sum(weight);
        if (a.normalise) weight /= sum + 1e-20f;
        weight *= a.scale;
        if (lane < CHOSEN) {
            u32 place = token * CHOSEN + lane;
            store_global(a.ids + place, id);
            store_global_f32(a.weights + place, weight);
            store_shared(base + CHOICE + 4 * place, id);
            store_shared_f32(base + SHARE + 4 * place, weight);
            add_shared(base + TAKERS + 8 * id + 4 * (token / 32), 1u << token % 32);  // a token chooses an expert once
        }
    }
    sync_block();

    // Thread e has expert e. Pairs in the low half of a word, slots in the high half: one sum for both.
    u32x2 takers = load_shared_2(base + TAKERS + 8 * thread);
    u32 mine = count_bits(takers.x) + count_bits(takers.y), slots = (mine + SLOT_PAIRS - 1) / SLOT_PAIRS;
    u32 total, after = running_sum(mine | slots << 16, base + TOTALS, total), count = total >> 16;
    u32 first_pair = (after & 0xffff) - mine, first_slot = (after >> 16) - slots;
    store_shared(base + FIRST + 4 * thread, first_pair);
    for (u32 i = 0; i < slots; i++) {
        store_global(a.slot_expert + first_slot + i, thread);
        store_global(a.slot_first + first_slot + i, first_pair + i * SLOT_PAIRS);
    }
    if (thread == 0) store_global(a.count, count);
    for (u32 slot = thread; slot <= a.slots; slot += THREADS)
        if (slot >= count) {
            store_global(a.slot_first + slot, pairs);
            if (slot < a.slots) store_global(a.slot_expert + slot, 0);
        }
    sync_block();
    if (thread < pairs) {
        u32 token = thread / CHOSEN, id = load_shared(base + CHOICE + 4 * thread);
        u32x2 all = load_shared_2(base + TAKERS + 8 * id);
        u32 lower = (1u << token % 32) - 1;  // those of its own word that come before it
        u32 before = token < 32 ? count_bits(all.x & lower) : count_bits(all.x) + count_bits(all.y & lower);
        u32 pair = load_shared(base + FIRST + 4 * id) + before;
        store_global(a.pair_token + pair, token);
        store_global_f32(a.pair_weight + pair, load_shared_f32(base + SHARE + 4 * thread));
    }
}
