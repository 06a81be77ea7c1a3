// All blocks, one after another, then the last norm. What enters some layers is kept for a drafter.
#include "cpu/kernels.h"

// weights: of each block. planes: one of `plane_bytes` a block. residual [T, D] is changed; y [T, D]: scratch; x [T, D].
// places: of each block and of what enters the norm, where its entering state goes in features [T, kept, D], or -1.
extern "C" void redline_blocks(const BlockWeights* const* weights, const BlockTokens* tokens, char* planes,
                               int64_t plane_bytes, int kv_type, float* residual, float* y, const float* norm, float* x,
                               const int32_t* places, float* features, float eps, int blocks, int kept, int T, int D) {
    auto keep = [&](int layer, const float* partial) {
        for (int t = 0; places[layer] >= 0 && t < T; t++) {
            const float* from = residual + (int64_t)t * D;
            float* to = features + ((int64_t)t * kept + places[layer]) * D;
            for (int i = 0; i < D; i++) to[i] = partial ? from[i] + partial[(int64_t)t * D + i] : from[i];
        }
    };
    const float* partial = nullptr;
    for (int layer = 0; layer < blocks; layer++, partial = y) {
        keep(layer, partial);
        redline_block(weights[layer], tokens, planes + layer * plane_bytes, kv_type, residual, partial, y);
    }
    redline_add_norm(residual, partial, norm, x, eps, T, D);
    keep(blocks, nullptr);
}
