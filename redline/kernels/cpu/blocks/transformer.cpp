// A whole model: the embedding, all blocks, the last norm; then the head and the argmax of logits for the rows that
// need them.
#include <vector>

#include "blocks/blocks.h"
#include "core/kernels.h"
#include "core/vec.h"

extern "C" void redline_transformer(const TransformerCall& call) {
    static thread_local struct {
        std::vector<float> residual, partial, rows;
        std::vector<uint8_t> finite;
    } scratch;
    const TransformerWeights& w = *call.weights;
    const BlockTokens& tokens = *call.tokens;
    const int64_t T = tokens.T, D = w.D;
    const int R = call.R;
    auto room = [](auto& buffer, int64_t size) {
        if ((int64_t)buffer.size() < size) buffer.resize(size);
        return buffer.data();
    };
    float *residual = room(scratch.residual, T * D), *y = room(scratch.partial, T * D);
    for (int64_t t = 0; t < T; t++)
        for (int64_t i = 0; i < D; i++) residual[t * D + i] = to_float(w.embedding[tokens.ids[t] * D + i]);

    auto keep = [&](int layer, const float* partial) {
        const int place = call.places[layer];
        for (int64_t t = 0; place >= 0 && t < T; t++) {
            const float* from = residual + t * D;
            float* to = call.features + (t * call.kept + place) * D;
            for (int64_t i = 0; i < D; i++) to[i] = partial ? from[i] + partial[t * D + i] : from[i];
        }
    };
    const float* partial = nullptr;
    for (int layer = 0; layer < w.L; layer++, partial = y) {
        keep(layer, partial);
        redline_block({.weights = w.blocks[layer], .tokens = &tokens,
                       .plane = (char*)call.planes + layer * call.plane_bytes, .kv_type = call.kv_type,
                       .residual = residual, .partial = partial, .y = y});
    }
    redline_add_norm({.residual = residual, .partial = partial, .w = w.norm, .y = call.x,
                      .eps = w.eps, .T = tokens.T, .D = w.D});
    keep(w.L, nullptr);
    if (!R) return;

    float* rows = room(scratch.rows, R * D);
    for (int64_t r = 0; r < R; r++) std::memcpy(rows + r * D, call.x + call.asked[r] * D, D * sizeof(float));
    const int padded = (w.V + 31) / 32 * 32;
    redline_linear({.x = rows, .ldx = D, .w = w.head, .y = call.logits, .ldy = padded,
                    .T = R, .N = padded, .K = w.D, .rounded = 0});
    uint8_t* finite = room(scratch.finite, R);
    redline_best({.x = call.logits, .ldx = padded, .ids = call.likeliest, .finite = finite, .R = R, .V = w.V});
    for (int r = 0; r < R; r++)
        if (!finite[r]) call.likeliest[r] = -1;
}
