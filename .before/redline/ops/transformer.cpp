// A model whole: the embedding, all blocks, the last norm; then head and likeliest token where they are asked for.
#include <vector>

#include "cpu/kernels.h"
#include "cpu/vec.h"

// As transformer.py lays them out. embedding [V, D]; head in ceil(V / 32) panels; L blocks.
struct TransformerWeights {
    const bf16* embedding;
    const BlockWeights* const* blocks;
    const float* norm;
    const bf16* head;
    float eps;
    int L, D, V;
};

// planes: one of `plane_bytes` a block. places: of each block and of what enters the norm, where its entering
// state goes in features [T, kept, D], or -1. asked: R of the tokens. x [T, D]; logits [R, V rounded up to 32];
// likeliest [R]: -1 where a logit is not finite.
extern "C" void redline_transformer(const TransformerWeights* weights, const BlockTokens* tokens, char* planes,
                                    int64_t plane_bytes, int kv_type, const int32_t* places, int kept,
                                    float* features, const int32_t* asked, int R, float* x, float* logits,
                                    int64_t* likeliest) {
    static thread_local struct {
        std::vector<float> residual, partial, rows;
        std::vector<uint8_t> finite;
    } scratch;
    const TransformerWeights& w = *weights;
    const int64_t T = tokens->T, D = w.D;
    auto room = [](auto& buffer, int64_t size) {
        if ((int64_t)buffer.size() < size) buffer.resize(size);
        return buffer.data();
    };
    float *residual = room(scratch.residual, T * D), *y = room(scratch.partial, T * D);
    for (int64_t t = 0; t < T; t++)
        for (int64_t i = 0; i < D; i++) residual[t * D + i] = to_float(w.embedding[tokens->ids[t] * D + i]);

    auto keep = [&](int layer, const float* partial) {
        for (int64_t t = 0; places[layer] >= 0 && t < T; t++) {
            const float* from = residual + t * D;
            float* to = features + (t * kept + places[layer]) * D;
            for (int64_t i = 0; i < D; i++) to[i] = partial ? from[i] + partial[t * D + i] : from[i];
        }
    };
    const float* partial = nullptr;
    for (int layer = 0; layer < w.L; layer++, partial = y) {
        keep(layer, partial);
        redline_block(w.blocks[layer], tokens, planes + layer * plane_bytes, kv_type, residual, partial, y);
    }
    redline_add_norm(residual, partial, w.norm, x, w.eps, tokens->T, w.D);
    keep(w.L, nullptr);
    if (!R) return;

    float* rows = room(scratch.rows, R * D);
    for (int64_t r = 0; r < R; r++) std::memcpy(rows + r * D, x + asked[r] * D, D * sizeof(float));
    const int padded = (w.V + 31) / 32 * 32;
    redline_linear(rows, D, w.head, logits, padded, R, padded, w.D, 0);
    uint8_t* finite = room(scratch.finite, R);
    redline_best(logits, padded, likeliest, finite, R, w.V);
    for (int r = 0; r < R; r++)
        if (!finite[r]) likeliest[r] = -1;
}
