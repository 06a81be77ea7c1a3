// What an EAGLE-3 drafter does between two steps: fuses features, makes a pass of latent attention, and the greedy chain
// of them. The ops one after another, as draft_pass.py's references call them, without a word to Python between.
#include <algorithm>
#include <vector>

#include "core/kernels.h"
#include "core/norm.h"
#include "core/pages.h"
#include "core/pool.h"

constexpr int PAGE_TOKENS = 64, PANEL_OUTPUTS = 32;

// As draft_pass.py lays them out.
struct DraftWeights {
    const bf16* embedding;
    const float *input_norm, *hidden_norm;
    const bf16* w_a;
    const float *q_norm, *kv_norm;
    const bf16 *w_q, *w_uk, *w_uv, *o_proj;
    const float* mlp_norm;
    const bf16 *gate_up, *down;
    const float* norm;
    const bf16* head;
    float eps, low_rank_eps, softmax_scale;
    int D, Rq, H, Nn, P, R, V, I, vocabulary, norm_before_residual, norm_output;
};

struct DraftPages {
    const int64_t* tokens;
    const int32_t* tables;
    const float *cos, *sin;
    int64_t tokens_width, table_width;
};

namespace {

struct Scratch {
    std::vector<float> x, cos, sin, q, q_asked, o, residual, part, normed, fed, logits;
    std::vector<int64_t> rows, best;
    std::vector<int32_t> slots, positions, ids, asked, tokens, slots_asked, lengths;
    std::vector<uint8_t> finite;
};

template <class T> T* room(std::vector<T>& buffer, int64_t size) {
    if ((int64_t)buffer.size() < size) buffer.resize(size);
    return buffer.data();
}

// Rows of positions [T], the token of each `ids` (null: its slot's own), features [T, D]; queries [R] of them are
// finished: normed, fed [R, D], neither of which may be `feature`.
void pass(const DraftWeights& w, const DraftPages& pages, Scratch& s, const float* feature, const int32_t* slots,
          const int32_t* positions, const int32_t* ids, const int32_t* queries, int T, int R, void* plane,
          int kv_type, float* normed, float* fed) {
    const int64_t D = w.D, half = w.P / 2, head = (int64_t)w.H * (w.Nn + w.P), values = (int64_t)w.H * w.V;
    float *x = room(s.x, T * 2 * D), *cos = room(s.cos, T * half), *sin = room(s.sin, T * half);
    int64_t* rows = room(s.rows, T);
    int tasks = T <= 4 ? 1 : Pool::get().threads() * 2;
    parallel(tasks, [&](int task) {
        Range share_ = share(T, tasks, task);
        for (int t = share_.begin; t < share_.end; t++) {
            int64_t slot = slots[t], place = positions[t] + 1;
            const bf16* embedding = w.embedding + D * (ids ? ids[t] : pages.tokens[slot * pages.tokens_width + place]);
            float* row = x + t * 2 * D;
            for (int64_t i = 0; i < D; i++) row[i] = to_float(embedding[i]);
            rms_norm_row(row, w.input_norm, w.eps, w.D, row);
            rms_norm_row(feature + t * D, w.hidden_norm, w.eps, w.D, row + D);
            std::copy_n(pages.cos + positions[t] * half, half, cos + t * half);
            std::copy_n(pages.sin + positions[t] * half, half, sin + t * half);
            rows[t] = (int64_t)pages.tables[slot * pages.table_width + place / PAGE_TOKENS] * PAGE_TOKENS + place % PAGE_TOKENS;
        }
    });
    float* q = room(s.q, T * head);
    redline_mla_qkv({.x = x, .w_a = w.w_a, .q_norm = w.q_norm, .kv_norm = w.kv_norm, .w_q = w.w_q,
                     .cos = cos, .sin = sin, .rows = rows, .plane = plane, .kv_type = kv_type,
                     .q = q, .eps = w.low_rank_eps,
                     .T = T, .D = 2 * w.D, .Rq = w.Rq, .R = w.R, .P = w.P, .H = w.H, .Nn = w.Nn});
    if (!R) return;

    float *q_asked = room(s.q_asked, R * head), *o = room(s.o, R * values), *residual = w.norm_output ? room(s.residual, R * D) : fed;
    int32_t *tokens = room(s.tokens, R), *slots_asked = room(s.slots_asked, R), *lengths = room(s.lengths, R);
    for (int r = 0; r < R; r++) {
        int t = queries[r];
        std::copy_n(q + t * head, head, q_asked + r * head);
        std::copy_n(w.norm_before_residual ? x + (2 * t + 1) * D : feature + t * D, D, residual + r * D);
        tokens[r] = r, slots_asked[r] = slots[t], lengths[r] = positions[t] + 2;
    }
    redline_mla_decode({.q = q_asked, .tokens = tokens, .slots = slots_asked, .lengths = lengths,
                        .tables = pages.tables, .table_width = pages.table_width, .plane = plane, .kv_type = kv_type,
                        .w_uk = w.w_uk, .w_uv = w.w_uv, .y = o, .scale = w.softmax_scale,
                        .Q = R, .H = w.H, .Nn = w.Nn, .P = w.P, .R = w.R, .V = w.V, .skip = 1});
    float* part = room(s.part, R * D);
    redline_linear({.x = o, .ldx = values, .w = w.o_proj, .y = part, .ldy = D,
                    .T = R, .N = w.D, .K = (int)values, .rounded = rounds(kv_type)});
    redline_add_norm({.residual = residual, .partial = part, .w = w.mlp_norm, .y = x, .eps = w.eps, .T = R, .D = w.D});
    redline_moe({.x = x, .ids = nullptr, .weights = nullptr,
                 .gate_up = nullptr, .gate_up_scales = nullptr, .down = nullptr, .down_scales = nullptr,
                 .shared_gate_up = w.gate_up, .shared_down = w.down, .y = part,
                 .T = R, .D = w.D, .E = 0, .k = 0, .I = 0, .Is = w.I, .rounded = rounds(kv_type)});
    redline_add_norm({.residual = residual, .partial = part, .w = w.norm, .y = normed, .eps = w.eps, .T = R, .D = w.D});
    if (w.norm_output) std::copy_n(normed, R * D, fed);
}

}  // namespace

// Rows `sources` [T] of features [., S W], each of their S states normed (norms [S, W]; null: as they are), times fc
// [D, S W]. y [T, D].
extern "C" void redline_draft_fuse(const float* features, const int32_t* sources, const float* norms, const bf16* fc,
                                   float* y, float eps, int T, int S, int W, int D) {
    static thread_local std::vector<float> buffer;
    const int64_t F = (int64_t)S * W;
    float* x = room(buffer, T * F);
    int tasks = T <= 4 ? 1 : Pool::get().threads() * 2;
    parallel(tasks, [&](int task) {
        Range rows = share(T, tasks, task);
        for (int t = rows.begin; t < rows.end; t++) {
            const float* from = features + sources[t] * F;
            if (!norms) std::copy_n(from, F, x + t * F);
            for (int64_t i = 0; norms && i < F; i += W) rms_norm_row(from + i, norms + i, eps, W, x + t * F + i);
        }
    });
    redline_linear({.x = x, .ldx = F, .w = fc, .y = y, .ldy = D, .T = T, .N = D, .K = (int)F, .rounded = 0});
}

// normed, fed [R, D] of one pass.
extern "C" void redline_draft_pass(const DraftWeights* weights, const DraftPages* pages, const float* feature,
                                   const int32_t* slots, const int32_t* positions, const int32_t* ids,
                                   const int32_t* queries, int T, int R, void* plane, int kv_type, float* normed,
                                   float* fed) {
    static thread_local Scratch scratch;
    pass(*weights, *pages, scratch, feature, slots, positions, ids, queries, T, R, plane, kv_type, normed, fed);
}

// drafted [R, k]: query r drafts wanted[r] of them, one at least, each the likeliest after those before it.
extern "C" void redline_draft_chain(const DraftWeights* weights, const DraftPages* pages, const float* feature,
                                    const int32_t* slots, const int32_t* positions, const int32_t* queries,
                                    const int32_t* wanted, int T, int R, void* plane, int kv_type, int64_t* drafted,
                                    int k) {
    static thread_local Scratch s;
    const DraftWeights& w = *weights;
    const int64_t D = w.D, width = (w.vocabulary + PANEL_OUTPUTS - 1) / PANEL_OUTPUTS * PANEL_OUTPUTS;
    // What a pass is fed lies in the second half, what it gives in the first.
    float *normed = room(s.normed, R * D), *fed = room(s.fed, 2 * R * D), *going = fed + R * D;
    pass(w, *pages, s, feature, slots, positions, nullptr, queries, T, R, plane, kv_type, normed, fed);
    float* logits = room(s.logits, R * width);
    int64_t* best = room(s.best, R);
    uint8_t* finite = room(s.finite, R);
    int32_t *chain_slots = room(s.slots, R), *chain_positions = room(s.positions, R), *ids = room(s.ids, R);
    int32_t *asked = room(s.asked, 2 * R), *each = asked + R;  // asked: the query of each row that goes on
    for (int r = 0; r < R; r++) {
        asked[r] = each[r] = r;
        chain_slots[r] = slots[queries[r]], chain_positions[r] = positions[queries[r]];
    }
    for (int done = 0, rows = R; rows;) {
        redline_linear({.x = normed, .ldx = D, .w = w.head, .y = logits, .ldy = width,
                        .T = rows, .N = (int)width, .K = w.D, .rounded = 0});
        redline_best({.x = logits, .ldx = width, .ids = best, .finite = finite, .R = rows, .V = w.vocabulary});
        int kept = 0;
        for (int r = 0; r < rows; r++) {
            drafted[(int64_t)asked[r] * k + done] = best[r];
            if (wanted[asked[r]] <= done + 1) continue;
            std::copy_n(fed + r * D, D, going + kept * D);
            asked[kept] = asked[r], chain_slots[kept] = chain_slots[r], chain_positions[kept] = chain_positions[r] + 1;
            ids[kept++] = (int32_t)best[r];
        }
        rows = kept, done++;
        if (rows)
            pass(w, *pages, s, going, chain_slots, chain_positions, ids, each, rows, rows, plane, kv_type, normed, fed);
    }
}
