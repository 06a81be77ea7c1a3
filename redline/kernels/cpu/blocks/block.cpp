// One transformer block: runs its ops one after another, in the order of `block` in redline/model/k2/forward.py,
// without returning to Python in between.
#include "blocks/blocks.h"

#include <vector>

#include "core/kernels.h"
#include "core/pages.h"

extern "C" void redline_block(const BlockCall& call) {
    static thread_local struct {
        std::vector<float> x, q, o, part, shares;
        std::vector<int32_t> ids;
    } scratch;
    const BlockWeights& w = *call.weights;
    const BlockTokens& t = *call.tokens;
    const int64_t T = t.T, head = w.Nn + w.P;
    const int rounded = rounds(call.kv_type);
    auto room = [](auto& buffer, int64_t size) {
        if ((int64_t)buffer.size() < size) buffer.resize(size);
        return buffer.data();
    };
    float *x = room(scratch.x, T * w.D), *part = room(scratch.part, T * w.D);
    float *q = room(scratch.q, T * w.H * head), *o = room(scratch.o, T * w.H * w.V);

    redline_add_norm({.residual = call.residual, .partial = call.partial, .w = w.attention_norm, .y = x,
                      .eps = w.norm_eps, .T = t.T, .D = w.D});
    redline_mla_qkv({.x = x, .w_a = w.w_a, .q_norm = w.q_norm, .kv_norm = w.kv_norm, .w_q = w.w_q,
                     .cos = t.cos, .sin = t.sin, .rows = t.rows, .plane = call.plane, .kv_type = call.kv_type,
                     .q = q, .eps = w.low_rank_eps,
                     .T = t.T, .D = w.D, .Rq = w.Rq, .R = w.R, .P = w.P, .H = w.H, .Nn = w.Nn});
    for (int c = 0; c < t.C; c++) {
        const Chunk& chunk = t.chunks[c];
        redline_mla_prefill({.q = q + chunk.first * w.H * head, .start = chunk.start, .count = chunk.count,
                             .pages = t.tables + chunk.slot * t.table_width, .plane = call.plane, .kv_type = call.kv_type,
                             .w_uk = w.w_uk, .w_uv = w.w_uv, .y = o + (int64_t)chunk.first * w.H * w.V,
                             .scale = w.softmax_scale,
                             .H = w.H, .Nn = w.Nn, .P = w.P, .R = w.R, .V = w.V, .skip = 0});
    }
    if (t.Q)
        redline_mla_decode({.q = q, .tokens = t.tokens, .slots = t.slots, .lengths = t.lengths,
                            .tables = t.tables, .table_width = t.table_width, .plane = call.plane, .kv_type = call.kv_type,
                            .w_uk = w.w_uk, .w_uv = w.w_uv, .y = o, .scale = w.softmax_scale,
                            .Q = t.Q, .H = w.H, .Nn = w.Nn, .P = w.P, .R = w.R, .V = w.V, .skip = 0});
    redline_linear({.x = o, .ldx = (int64_t)w.H * w.V, .w = w.o_proj, .y = part, .ldy = w.D,
                    .T = t.T, .N = w.D, .K = w.H * w.V, .rounded = rounded});
    redline_add_norm({.residual = call.residual, .partial = part, .w = w.mlp_norm, .y = x,
                      .eps = w.norm_eps, .T = t.T, .D = w.D});
    int32_t* ids = room(scratch.ids, T * w.k);
    float* shares = room(scratch.shares, T * w.k);
    if (w.E)
        redline_route_experts({.x = x, .w = w.router, .bias = w.bias, .ids = ids, .weights = shares,
                               .T = t.T, .D = w.D, .E = w.E, .k = w.k, .normalise = w.normalise,
                               .scale = w.routed_scale, .groups = w.groups, .chosen_groups = w.chosen_groups});
    redline_moe({.x = x, .ids = ids, .weights = shares,
                 .gate_up = w.gate_up, .gate_up_scales = w.gate_up_scales, .gate_up_wholes = w.gate_up_wholes,
                 .down = w.down, .down_scales = w.down_scales, .down_wholes = w.down_wholes,
                 .shared_gate_up = w.shared_gate_up, .shared_down = w.shared_down, .y = call.y,
                 .T = t.T, .D = w.D, .E = w.E, .k = w.k, .I = w.I, .Is = w.Is, .rounded = rounded});
}
