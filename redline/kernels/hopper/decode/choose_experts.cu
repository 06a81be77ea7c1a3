// Top-k and the lists that the expert kernels read, of any logits: one block.
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
    int tokens, slots, normalise;
    float scale;
};

KERNEL(choose_experts, ChooseExpertsLaunch) {
    let_next_grid_start();
    wait_for_previous_grid();
    choose(a, shared_base());
}
