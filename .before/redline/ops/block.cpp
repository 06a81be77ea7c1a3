// One block whole: the ops one after another, as block.py's reference calls them, without a word to Python between.
#include <vector>

#include "cpu/kernels.h"
#include "cpu/pages.h"

// As block.py lays them out.
struct BlockWeights {
    const float* attention_norm;
    const bf16* w_a;
    const float *q_norm, *kv_norm;
    const bf16 *w_q, *w_uk, *w_uv, *o_proj;
    const float* mlp_norm;
    const bf16 *shared_gate_up, *shared_down, *router;
    const float* bias;
    const void* gate_up;
    const bf16* gate_up_scales;
    const void* down;
    const bf16* down_scales;
    float norm_eps, low_rank_eps, softmax_scale, routed_scale;
    int D, Rq, H, Nn, P, R, V, Is, E, k, I, normalise;
};

// residual [T, D] += partial (null: nothing), then += the attention's part; y [T, D]: the experts' part, which may lie
// where partial lies. plane: as in mla_qkv; the other products follow it.
extern "C" void redline_block(const BlockWeights* weights, const BlockTokens* tokens, void* plane, int kv_type, float* residual,
                              const float* partial, float* y) {
    static thread_local struct {
        std::vector<float> x, q, o, part, shares;
        std::vector<int32_t> ids;
    } scratch;
    const BlockWeights& w = *weights;
    const BlockTokens& t = *tokens;
    const int64_t T = t.T, head = w.Nn + w.P;
    auto room = [](auto& buffer, int64_t size) {
        if ((int64_t)buffer.size() < size) buffer.resize(size);
        return buffer.data();
    };
    float *x = room(scratch.x, T * w.D), *part = room(scratch.part, T * w.D);
    float *q = room(scratch.q, T * w.H * head), *o = room(scratch.o, T * w.H * w.V);

    redline_add_norm(residual, partial, w.attention_norm, x, w.norm_eps, t.T, w.D);
    redline_mla_qkv(x, w.w_a, w.q_norm, w.kv_norm, w.w_q, t.cos, t.sin, t.rows, plane, kv_type, q, w.low_rank_eps,
                    t.T, w.D, w.Rq, w.R, w.P, w.H, w.Nn);
    for (int c = 0; c < t.C; c++) {
        const Chunk& chunk = t.chunks[c];
        redline_mla_prefill(q + chunk.first * w.H * head, chunk.start, chunk.count, t.tables + chunk.slot * t.table_width,
                            plane, kv_type, w.w_uk, w.w_uv, o + (int64_t)chunk.first * w.H * w.V, w.softmax_scale,
                            w.H, w.Nn, w.P, w.R, w.V, 0);
    }
    if (t.Q)
        redline_mla_decode(q, t.tokens, t.slots, t.lengths, t.tables, t.table_width, plane, kv_type, w.w_uk, w.w_uv,
                           o, w.softmax_scale, t.Q, w.H, w.Nn, w.P, w.R, w.V, 0);
    redline_linear(o, (int64_t)w.H * w.V, w.o_proj, part, w.D, t.T, w.D, w.H * w.V, rounds(kv_type));
    redline_add_norm(residual, part, w.mlp_norm, x, w.norm_eps, t.T, w.D);
    int32_t* ids = room(scratch.ids, T * w.k);
    float* shares = room(scratch.shares, T * w.k);
    if (w.E)
        redline_route_experts(x, w.router, w.bias, ids, shares, t.T, w.D, w.E, w.k, w.normalise, w.routed_scale);
    redline_moe(x, ids, shares, w.gate_up, w.gate_up_scales, w.down, w.down_scales, w.shared_gate_up, w.shared_down, y,
                t.T, w.D, w.E, w.k, w.I, w.Is, rounds(kv_type));
}
