// Top-k and the lists that the expert kernels read, of any logits: one block.
#include "choose.cuh"

struct Arguments {
    const float* logits;  // [T, E]
    const float* bias;    // [E] or null
    const int* forced;    // [T, K] or null
    int* pair_token;
    float* pair_weight;
    int* slot_expert;
    int* slot_first;
    int* count;
    int* ids;
    float* shares;
    int tokens, slots, normalise;
    float scale;
};

KERNEL(choose_experts, Arguments) {
    let_next_grid_start();
    wait_for_previous_grid();
    choose(a, shared_base());
}
