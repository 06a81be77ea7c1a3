// The passes of an EAGLE-3 drafter: fusion of features, one pass of latent attention, and a greedy chain of passes.
// Runs ops in the order of redline.model.eagle3.forward, without returning to Python in between.
#include "draft_pass.h"

#include <algorithm>
#include <vector>

#include "core/kernels.h"
#include "core/norm.h"
#include "core/pages.h"
#include "core/pool.h"

constexpr int PAGE_TOKENS = 64, PANEL_OUTPUTS = 32;

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

void pass(const DraftPassCall& call, Scratch& s) {
    const DraftWeights& w = *call.weights;
    const DraftPages& pages = *call.pages;
    const float* feature = call.feature;
    const int32_t *slots = call.slots, *positions = call.positions, *ids = call.ids, *queries = call.queries;
    void* plane = call.plane;
    float *normed = call.normed, *fed = call.fed;
    const int T = call.T, R = call.R, kv_type = call.kv_type;
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
                 .gate_up = nullptr, .gate_up_scales = nullptr, .gate_up_wholes = nullptr,
                 .down = nullptr, .down_scales = nullptr, .down_wholes = nullptr,
                 .shared_gate_up = w.gate_up, .shared_down = w.down, .y = part,
                 .T = R, .D = w.D, .E = 0, .k = 0, .I = 0, .Is = w.I, .rounded = rounds(kv_type)});
    redline_add_norm({.residual = residual, .partial = part, .w = w.norm, .y = normed, .eps = w.eps, .T = R, .D = w.D});
    if (w.norm_output) std::copy_n(normed, R * D, fed);
}

}  // namespace

extern "C" void redline_draft_fuse(const DraftFuseCall& call) {
    static thread_local std::vector<float> buffer;
    const int T = call.T, W = call.W, D = call.D;
    const int64_t F = (int64_t)call.S * W;
    float* x = room(buffer, T * F);
    int tasks = T <= 4 ? 1 : Pool::get().threads() * 2;
    parallel(tasks, [&](int task) {
        Range rows = share(T, tasks, task);
        for (int t = rows.begin; t < rows.end; t++) {
            const float* from = call.features + call.sources[t] * F;
            if (!call.norms) std::copy_n(from, F, x + t * F);
            for (int64_t i = 0; call.norms && i < F; i += W)
                rms_norm_row(from + i, call.norms + i, call.eps, W, x + t * F + i);
        }
    });
    redline_linear({.x = x, .ldx = F, .w = call.fc, .y = call.fused, .ldy = D, .T = T, .N = D, .K = (int)F, .rounded = 0});
}

extern "C" void redline_draft_pass(const DraftPassCall& call) {
    static thread_local Scratch scratch;
    pass(call, scratch);
}

extern "C" void redline_draft_chain(const DraftChainCall& call) {
    static thread_local Scratch s;
    const DraftWeights& w = *call.weights;
    const int R = call.R;
    const int64_t D = w.D, width = (w.vocabulary + PANEL_OUTPUTS - 1) / PANEL_OUTPUTS * PANEL_OUTPUTS;
    // The second half holds the input of a pass, the first half its output.
    float *normed = room(s.normed, R * D), *fed = room(s.fed, 2 * R * D), *going = fed + R * D;
    DraftPassCall one;
    one.weights = call.weights, one.pages = call.pages, one.feature = call.feature;
    one.slots = call.slots, one.positions = call.positions, one.ids = nullptr, one.queries = call.queries;
    one.plane = call.plane, one.kv_type = call.kv_type, one.T = call.T, one.R = R;
    one.normed = normed, one.fed = fed;
    pass(one, s);
    float* logits = room(s.logits, R * width);
    int64_t* best = room(s.best, R);
    uint8_t* finite = room(s.finite, R);
    int32_t *chain_slots = room(s.slots, R), *chain_positions = room(s.positions, R), *ids = room(s.ids, R);
    int32_t *asked = room(s.asked, 2 * R), *each = asked + R;  // asked: for each row the query that it continues
    for (int r = 0; r < R; r++) {
        asked[r] = each[r] = r;
        chain_slots[r] = call.slots[call.queries[r]], chain_positions[r] = call.positions[call.queries[r]];
    }
    one.feature = going, one.slots = chain_slots, one.positions = chain_positions, one.ids = ids, one.queries = each;
    for (int done = 0, rows = R; rows;) {
        redline_linear({.x = normed, .ldx = D, .w = w.head, .y = logits, .ldy = width,
                        .T = rows, .N = (int)width, .K = w.D, .rounded = 0});
        redline_best({.x = logits, .ldx = width, .ids = best, .finite = finite, .R = rows, .V = w.vocabulary});
        int kept = 0;
        for (int r = 0; r < rows; r++) {
            call.drafted[(int64_t)asked[r] * call.k + done] = best[r];
            if (call.wanted[asked[r]] <= done + 1) continue;
            std::copy_n(fed + r * D, D, going + kept * D);
            asked[kept] = asked[r], chain_slots[kept] = chain_slots[r], chain_positions[kept] = chain_positions[r] + 1;
            ids[kept++] = (int32_t)best[r];
        }
        one.T = one.R = rows = kept, done++;
        if (rows) pass(one, s);
    }
}
