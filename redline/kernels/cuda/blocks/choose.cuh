// Selects each token's experts, and builds the lists that the expert kernels read (choose_experts.py). Runs in one
// thread block of 512 threads, or in several, of which the last to finish builds the lists.
//
// First a warp handles a token, then a thread an expert. The caller's Arguments have bias [EXPERTS] or null, forced [T,
// CHOSEN] or null; the outputs ids and shares [T, CHOSEN], pair_token, pair_weight, origin, slot_expert, slot_first and
// count; tokens, slots, normalise, scale. Its Logits return the logit of (token, expert).
//
// Macros: EXPERTS (<= THREADS), CHOSEN (<= 32, and <= EXPERTS), MOST_TOKENS (the capacity in tokens).
#pragma once
#include "running_sum.cuh"

constexpr u32 PER_LANE = (EXPERTS + 31) / 32;
constexpr u32 SLOT_PAIRS = 8;
constexpr u32 MOST_PAIRS = MOST_TOKENS * CHOSEN, WORDS = (MOST_TOKENS + 31) / 32;

// Byte offsets in the shared memory at `room`.
constexpr u32 TAKERS_AT = 0;                                // [EXPERTS][WORDS] u32: bit t: token t chose this expert
constexpr u32 FIRST_AT = TAKERS_AT + EXPERTS * WORDS * 4;   // [EXPERTS] u32: an expert's first pair
constexpr u32 CHOICE_AT = FIRST_AT + EXPERTS * 4;           // [T * K] u32
constexpr u32 SHARE_AT = CHOICE_AT + MOST_PAIRS * 4;        // [T * K] f32
constexpr u32 TOTALS_AT = SHARE_AT + MOST_PAIRS * 4;        // [warps] u32
constexpr u32 CHOOSING_BYTES = TOTALS_AT + THREADS / 32 * 4;

FN u32 takers_at(u32 room, u32 expert) { return room + TAKERS_AT + 4 * WORDS * expert; }

// Larger floats have larger keys. No float has key 0, which marks experts that are already chosen or do not exist.
FN u32 sort_key(float v) {
    u32 bits = as_u32(v);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// Lane i gets the id of the i-th best expert, ties to the lower id; 0 in lanes from CHOSEN on.
template <class Arguments, class Logits>
FN u32 best_experts(const Arguments& a, const Logits& logits, u32 token) {
    u32 lane = lane_index(), choice = 0, key[PER_LANE];
    float logit[PER_LANE], bias[PER_LANE];
#pragma unroll
    for (u32 j = 0; j < PER_LANE; j++) {
        bool exists = 32 * j + lane < EXPERTS;
        logit[j] = exists ? logits(token, 32 * j + lane) : 0.f;
        bias[j] = exists && a.bias ? load_global_f32(a.bias + 32 * j + lane) : 0.f;
    }
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

struct Choice { u32 id; float weight; };

// Called by a warp: a token's experts and weights; lane i returns the i-th best. Forced ids replace the best ones,
// which are computed all the same, so that a measurement does the same work as serving.
template <class Arguments, class Logits>
FN Choice choose_for(const Arguments& a, const Logits& logits, u32 token) {
    u32 lane = lane_index(), place = token * CHOSEN + lane;
    bool given = a.forced && lane < CHOSEN;
    u32 forced = given ? load_global(a.forced + place) : 0;  // the load is in flight during the selection
    u32 id = best_experts(a, logits, token);
    if (given) id = forced;
    float weight = lane < CHOSEN ? sigmoid(logits(token, id)) : 0.f;
    float sum = warp_sum(weight);
    if (a.normalise) weight /= sum + 1e-20f;
    weight *= a.scale;
    if (lane >= CHOSEN) return {0, 0.f};
    store_global(a.ids + place, id);
    store_global_f32(a.shares + place, weight);
    return {id, weight};
}

FN void clear_takers(u32 room) {
    for (u32 i = thread_index(); i < EXPERTS * WORDS; i += THREADS) store_shared(room + TAKERS_AT + 4 * i, 0);
}
FN void take(u32 room, u32 place, Choice choice) {
    store_shared(room + CHOICE_AT + 4 * place, choice.id);
    store_shared_f32(room + SHARE_AT + 4 * place, choice.weight);
    u32 token = place / CHOSEN;
    add_shared(takers_at(room, choice.id) + 4 * (token / 32), 1u << token % 32);  // a token has an expert at most once
}

// Builds the lists from the bit masks of all experts.
template <class Arguments>
FN void list_pairs(const Arguments& a, u32 room) {
    u32 thread = thread_index(), pairs = a.tokens * CHOSEN, mine = 0;
    // Thread e has expert e. One prefix sum counts both: pairs in the low half of a word, slots in the high half.
    if (thread < EXPERTS)
#pragma unroll
        for (u32 i = 0; i < WORDS; i++) mine += count_bits(load_shared(takers_at(room, thread) + 4 * i));
    u32 slots = (mine + SLOT_PAIRS - 1) / SLOT_PAIRS;
    u32 total, after = running_sum(mine | slots << 16, room + TOTALS_AT, total), count = total >> 16;
    u32 first_pair = (after & 0xffff) - mine, first_slot = (after >> 16) - slots;
    if (thread < EXPERTS) store_shared(room + FIRST_AT + 4 * thread, first_pair);
    for (u32 i = 0; i < slots; i++) {
        store_global(a.slot_expert + first_slot + i, thread);
        store_global(a.slot_first + first_slot + i, first_pair + i * SLOT_PAIRS);
    }
    if (thread == 0) store_global(a.count, count);
    for (u32 slot = thread; slot <= (u32)a.slots; slot += THREADS)
        if (slot >= count) {
            store_global(a.slot_first + slot, pairs);
            if (slot < (u32)a.slots) store_global(a.slot_expert + slot, 0);
        }
    sync_block();
    for (u32 i = thread; i < pairs; i += THREADS) {
        u32 token = i / CHOSEN, id = load_shared(room + CHOICE_AT + 4 * i), pair = load_shared(room + FIRST_AT + 4 * id);
        u32 takers = takers_at(room, id), lower = (1u << token % 32) - 1;  // earlier tokens of its word
#pragma unroll
        for (u32 w = 0; w < WORDS; w++) {
            u32 before = w < token / 32 ? ~0u : w == token / 32 ? lower : 0;
            pair += count_bits(load_shared(takers + 4 * w) & before);
        }
        store_global(a.pair_token + pair, token);
        store_global_f32(a.pair_weight + pair, load_shared_f32(room + SHARE_AT + 4 * i));
        store_global(a.origin + pair, i);
    }
}

// Called by all threads of a grid with one thread block.
template <class Arguments, class Logits>
FN void choose(const Arguments& a, const Logits& logits, u32 room) {
    clear_takers(room);
    sync_block();
    for (u32 token = warp_index(); token < (u32)a.tokens; token += THREADS / 32) {
        Choice choice = choose_for(a, logits, token);
        if (lane_index() < CHOSEN) take(room, token * CHOSEN + lane_index(), choice);
    }
    sync_block();
    list_pairs(a, room);
}

// Called by all threads of a grid with several thread blocks. done: a counter, zero before and afterwards.
template <class Arguments, class Logits>
FN void choose_together(const Arguments& a, const Logits& logits, u32 room, int* done) {
    u32 token = block_index() * (THREADS / 32) + warp_index(), pairs = a.tokens * CHOSEN;
    if (token < (u32)a.tokens) choose_for(a, logits, token);
    show_all();
    sync_block();
    if (thread_index() == 0) store_shared(room + TOTALS_AT, add_global(done, 1) == grid_size() - 1);
    clear_takers(room);
    sync_block();
    if (!load_shared(room + TOTALS_AT)) return;
    show_all();
    for (u32 i = thread_index(); i < pairs; i += THREADS)
        take(room, i, {(u32)load_global_fresh(a.ids + i), as_float(load_global_fresh((const int*)a.shares + i))});
    if (thread_index() == 0) store_global(done, 0);
    sync_block();
    list_pairs(a, room);
}
