// Top-k experts of each token, and the lists that the expert kernels read, from logits in global memory: a warp per
// token.
#include "choose.cuh"

struct ChooseExpertsLaunch {
    const float* logits;  // [T, E]
    const float* bias;    // [E] or null
    const int* forced;    // [T, K] or null
    int* pair_token;      // [T K]
    float* pair_weight;   // [T K]
    int* slot_expert;     // [slots]
    int* slot_first;      // [slots + 1]
    int* count;           // [1]
    int* ids;             // [T, K]
    float* shares;        // [T, K]
    int* origin;          // [T K]
    int* done;            // [1]: thread blocks that have finished; zero between launches
    int tokens, slots, normalise;
    float scale;
};

struct InMemory {
    const float* logits;
    __device__ __forceinline__ float operator()(u32 token, u32 expert) const {
        return load_global_f32(logits + token * EXPERTS + expert);
    }
};

KERNEL(choose_experts, ChooseExpertsLaunch) {
    let_next_grid_start();
    wait_for_previous_grid();
    if (grid_size() == 1)
        choose(a, InMemory{a.logits}, shared_base());
    else
        choose_together(a, InMemory{a.logits}, shared_base(), a.done);
}
