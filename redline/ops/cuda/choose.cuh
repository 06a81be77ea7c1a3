// Which experts each token takes, and the lists of choose_experts.py: by a whole block, in shared memory.
//
// A warp to a token, then a thread to an expert. The caller's Arguments have logits [T, EXPERTS], bias [EXPERTS] or null,
// forced [T, CHOSEN] or null, tokens, pairs, normalise, scale, and what block 0 writes: ids and shares [T, CHOSEN].
//
// Macros: EXPERTS (<= THREADS), CHOSEN (<= 32, and <= EXPERTS).
#pragma once
#include "running_sum.cuh"

constexpr u32 PER_LANE = (EXPERTS + 31) / 32;
constexpr u32 MOST_PAIRS = 512, SLOT_PAIRS = 8;
static_assert(EXPERTS <= THREADS && CHOSEN <= 32, "an expert has a thread, and a choice a lane");

// While it is being chosen, from some address on.
constexpr u32 TAKERS = 0;                      // [THREADS][2] u32: bit t, token t takes this expert
constexpr u32 FIRST = TAKERS + THREADS * 8;    // [THREADS] u32: an expert's first pair
constexpr u32 CHOICE = FIRST + THREADS * 4;    // [T CHOSEN] u32
constexpr u32 SHARE = CHOICE + MOST_PAIRS * 4; // [T CHOSEN] f32
constexpr u32 TOTALS = SHARE + MOST_PAIRS * 4; // [warps] u32
constexpr u32 CHOOSING_BYTES = TOTALS + THREADS / 32 * 4;

// Where the lists come to lie.
struct Lists { u32 slot_expert, slot_first, pair_token, pair_weight; };

// Larger floats have larger keys; none is 0, which stands for what is taken or does not exist.
FN u32 sort_key(float v) {
    u32 bits = as_u32(v);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// Before the grid in front has ended: what it does not write. A lane has the bias of experts 32j + lane.
template <class Arguments>
FN void prepare_choice(const Arguments& a, u32 room, float (&bias)[PER_LANE]) {
#pragma unroll
    for (u32 j = 0; j < PER_LANE; j++) {
        u32 expert = 32 * j + lane_index();
        bias[j] = a.bias && expert < EXPERTS ? load_global_f32(a.bias + expert) : 0.f;
    }
    store_shared_2(room + TAKERS + 8 * thread_index(), {0, 0});
    sync_block();
}

// Lane i's choice, best first, ties to the lower id; 0 in lanes from CHOSEN on.
template <class Arguments>
FN u32 best_experts(const Arguments& a, u32 token, const float (&bias)[PER_LANE]) {
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

// By a warp: a token's experts and shares. Forced ids take the place of the best, which are looked for all the same, so that
// a measurement has the work that serving has.
template <class Arguments>
FN void choose_for(const Arguments& a, u32 token, u32 room, const float (&bias)[PER_LANE]) {
    u32 lane = lane_index(), id = best_experts(a, token, bias), place = token * CHOSEN + lane;
    if (a.forced && lane < CHOSEN) id = load_global(a.forced + place);
    float weight = lane < CHOSEN ? sigmoid(load_global_f32(a.logits + token * EXPERTS + id)) : 0.f;
    float sum = warp_sum(weight);
    if (a.normalise) weight /= sum + 1e-20f;
    weight *= a.scale;
    if (lane >= CHOSEN) return;
    store_shared(room + CHOICE + 4 * place, id);
    store_shared_f32(room + SHARE + 4 * place, weight);
    add_shared(room + TAKERS + 8 * id + 4 * (token / 32), 1u << token % 32);  // a token takes an expert once
    if (block_index() == 0) store_global(a.ids + place, id), store_global_f32(a.shares + place, weight);
}

// By all threads; afterwards all see the lists. -> how many slots there are; slot_first has one entry more.
template <class Arguments>
FN u32 choose(const Arguments& a, u32 room, const Lists& lists, const float (&bias)[PER_LANE]) {
    u32 thread = thread_index(), pairs = a.pairs;
    for (u32 token = warp_index(); token < (u32)a.tokens; token += THREADS / 32) choose_for(a, token, room, bias);
    sync_block();

    // Thread e has expert e. Pairs in the low half of a word, slots in the high half: one sum for both.
    u32x2 takers = load_shared_2(room + TAKERS + 8 * thread);
    u32 mine = count_bits(takers.x) + count_bits(takers.y), slots = (mine + SLOT_PAIRS - 1) / SLOT_PAIRS;
    u32 total, after = running_sum(mine | slots << 16, room + TOTALS, total), count = total >> 16;
    u32 first_pair = (after & 0xffff) - mine, first_slot = (after >> 16) - slots;
    store_shared(room + FIRST + 4 * thread, first_pair);
    for (u32 i = 0; i < slots; i++) {
        store_shared(lists.slot_expert + 4 * (first_slot + i), thread);
        store_shared(lists.slot_first + 4 * (first_slot + i), first_pair + i * SLOT_PAIRS);
    }
    if (thread == 0) store_shared(lists.slot_first + 4 * count, pairs);
    sync_block();
    if (thread < pairs) {
        u32 token = thread / CHOSEN, id = load_shared(room + CHOICE + 4 * thread);
        u32x2 all = load_shared_2(room + TAKERS + 8 * id);
        u32 lower = (1u << token % 32) - 1;  // those of its own word that come before it
        u32 before = token < 32 ? count_bits(all.x & lower) : count_bits(all.x) + count_bits(all.y & lower);
        u32 pair = load_shared(room + FIRST + 4 * id) + before;
        store_shared(lists.pair_token + 4 * pair, token);
        store_shared_f32(lists.pair_weight + 4 * pair, load_shared_f32(room + SHARE + 4 * thread));
    }
    sync_block();
    return count;
}
