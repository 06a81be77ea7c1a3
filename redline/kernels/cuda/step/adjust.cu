// Applies logit bias, penalties, banned tokens and grammar masks to the logits (adjust.py).
//
// Block (p, t) has part p of position t. Macros: as in step_rows.cu; WIDTH, numbers per load: 4 if every row begins at
// a multiple of 16 bytes; PART, tokens of a thread block; and the columns of adjust.py.
#include "core.cuh"

struct AdjustLaunch {
    const float* logits;   // rows are `step` apart
    const i64* ids;        // [T]: the input ids of the positions
    const i64* plan;       // [B, PLAN_COLUMNS]
    const i64* results;    // [B or more, RESULT_COLUMNS]
    const u32* counts;     // [slots, V]
    const u32* tokens;     // [slots, TOKEN_COLUMNS]
    const float* numbers;  // [slots, NUMBER_COLUMNS]
    const u32* masks;      // [T or more, words]
    float* adjusted;       // [T, V]
    u32 positions, vocabulary, step, words;
};

// The settings of one position.
struct Position {
    const u32 *counts, *masks;
    float presence, frequency, repetition;
    u32 drafts, draft[MOST_DRAFTS];  // the drafts at or before the position
    bool adjusted, masked;
};

FN Position position_of(const AdjustLaunch& a, u32 t, i64 slot, u32 altered) {
    const float* numbers = a.numbers + slot * NUMBER_COLUMNS;
    Position p;
    p.counts = a.counts + slot * a.vocabulary, p.masks = a.masks + (u64)t * a.words;
    p.adjusted = altered & ADJUSTED, p.masked = altered & MASKED;
    p.presence = load_global_f32(numbers + NUMBER_PRESENCE_PENALTY);
    p.frequency = load_global_f32(numbers + NUMBER_FREQUENCY_PENALTY);
    p.repetition = load_global_f32(numbers + NUMBER_REPETITION_PENALTY);
    p.drafts = t % a.positions;
#pragma unroll
    for (u32 i = 0; i < MOST_DRAFTS; i++)
        if (i < p.drafts) p.draft[i] = (u32)load_global_i64(a.ids + t - i);
    return p;
}

FN float penalized(const Position& p, float x, u32 token, u32 count) {
#pragma unroll
    for (u32 i = 0; i < MOST_DRAFTS; i++)
        if (i < p.drafts) count += p.draft[i] == token;
    if (!count) return x;
    x = x > 0 ? x / p.repetition : rounded_product(x, p.repetition);
    u32 generated = count & (IN_PROMPT - 1);
    return generated ? x - (p.presence + rounded_product(p.frequency, (float)generated)) : x;
}

FN float masked(const Position& p, float x, u32 token) {
    return !p.masked || load_global(p.masks + token / 32) >> token % 32 & 1 ? x : -infinity();
}

FN void load_piece(u32 (&words)[WIDTH], const void* from) {
    if constexpr (WIDTH == 4) {
        u32x4 v = load_global_4(from);
        words[0] = v.x, words[1] = v.y, words[2] = v.z, words[3] = v.w;
    } else
        words[0] = load_global(from);
}

KERNEL_BESIDE(adjust, AdjustLaunch, 4) {
    let_next_grid_start();
    wait_for_previous_grid();
    u32 t = block_index_y(), row = t / a.positions;
    u32 first = block_index() * PART, end = smaller(first + PART, a.vocabulary);
    const i64* plan = a.plan + row * PLAN_COLUMNS;
    i64 slot = load_global_i64(plan + PLAN_SLOT);
    u32 altered = (u32)load_global_i64(plan + PLAN_ALTERED);
    const float* from = a.logits + (u64)t * a.step;
    float* to = a.adjusted + (u64)t * a.vocabulary;
    Position p = position_of(a, t, slot, altered);
    for (u32 token = first + thread_index() * WIDTH; token < end; token += THREADS * WIDTH) {
        u32 x[WIDTH], counts[WIDTH];
        load_piece(x, from + token);
        if (p.adjusted) load_piece(counts, p.counts + token);
#pragma unroll
        for (u32 j = 0; j < WIDTH; j++) {
            float y = as_float(x[j]);
            if (p.adjusted) y = penalized(p, y, token + j, counts[j]);
            x[j] = as_u32(masked(p, y, token + j));
        }
        if constexpr (WIDTH == 4)
            store_global_4(to + token, {x[0], x[1], x[2], x[3]});
        else
            store_global(to + token, x[0]);
    }
    if (!p.adjusted) return;
    const u32* tokens = a.tokens + slot * TOKEN_COLUMNS;
    const float* biases = a.numbers + slot * NUMBER_COLUMNS + NUMBER_BIASES;
    sync_block();
    for (u32 i = thread_index(); i < MOST_BIASES; i += THREADS) {
        u32 token = load_global(tokens + TOKEN_BIASED + i);
        if (token < first || token >= end) continue;
        float x = load_global_f32(from + token) + load_global_f32(biases + i);
        store_global_f32(to + token, masked(p, penalized(p, x, token, load_global(p.counts + token)), token));
    }
    if (load_global_i64(a.results + row * RESULT_COLUMNS + RESULT_BEFORE) + t % a.positions >= load_global(tokens + TOKEN_STOPS_FROM))
        return;
    sync_block();
    for (u32 i = thread_index(); i < MOST_STOPS; i += THREADS) {
        u32 token = load_global(tokens + TOKEN_STOPS + i);
        if (token >= first && token < end) store_global_f32(to + token, -infinity());
    }
}
