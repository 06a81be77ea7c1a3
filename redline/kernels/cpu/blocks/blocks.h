// The argument structs of this folder's kernels: as in core/kernels.h, declared once here and parsed by Python.
//
// T tokens, C chunks, Q queries, D hidden, H heads, R latent rank, P rope, V value. Matrices are stored in panels.
#pragma once
#include <cstdint>

struct bf16;

// Tokens [first, first + count) of the step are positions [start, start + count) of a prompt.
struct Chunk {
    int first, count, start, slot;
};

// A step's tokens. Every token belongs to one chunk or is one query.
struct BlockTokens {
    const int64_t* ids;  // [T]
    const float* cos;    // [T, P / 2]
    const float* sin;
    const int64_t* rows;     // [T]: page * 64 + place, the row of a token's latent
    const Chunk* chunks;     // [C]
    const int32_t* tokens;   // [Q]
    const int32_t* slots;    // [Q]
    const int32_t* lengths;  // [Q]: context of each query, itself included
    const int32_t* tables;   // [slots, table_width]: page ids
    int64_t table_width;
    int T, C, Q;
};

// E = 0: there are no routed experts, and their pointers are null.
struct BlockWeights {
    const float* attention_norm;  // [D]
    const bf16* w_a;              // over [Rq | R | P] outputs
    const float* q_norm;          // [Rq]
    const float* kv_norm;         // [R]
    const bf16* w_q;              // over H (Nn + P) outputs
    const bf16* w_uk;             // W_UK^T, over R outputs per head
    const bf16* w_uv;             // over V outputs per head
    const bf16* o_proj;           // over D outputs
    const float* mlp_norm;        // [D]
    const bf16* shared_gate_up;   // over 2 Is outputs, gate first: of the shared expert, or of the dense MLP
    const bf16* shared_down;      // over D outputs
    const bf16* router;           // over E outputs
    const float* bias;            // [E]
    const void* gate_up;          // [E], over 2 I outputs
    const void* gate_up_scales;   // as in MoeCall
    const float* gate_up_wholes;
    const void* down;  // [E], over D outputs
    const void* down_scales;
    const float* down_wholes;
    float norm_eps, low_rank_eps, softmax_scale, routed_scale;
    int D, Rq, H, Nn, P, R, V, Is, E, k, I, normalise, groups, chosen_groups;
};

struct BlockCall {
    const BlockWeights* weights;
    const BlockTokens* tokens;
    void* plane;  // the block's pages
    int kv_type;
    float* residual;       // [T, D]: partial and then the attention's output are added
    const float* partial;  // [T, D]; null: nothing is added
    float* y;              // [T, D]: the experts' output; may be the same array as partial
};

struct TransformerWeights {
    const bf16* embedding;              // [V, D], not in panels
    const BlockWeights* const* blocks;  // [L]
    const float* norm;                  // [D]
    const bf16* head;                   // over V outputs
    float eps;
    int L, D, V;
};

struct TransformerCall {
    const TransformerWeights* weights;
    const BlockTokens* tokens;
    void* planes;         // L planes
    int64_t plane_bytes;  // of one
    int kv_type;
    const int32_t* places;  // [L + 1]: index in features of the state before each block and before the norm, or -1
    int kept;               // number of states that are kept
    float* features;        // [T, kept, D]
    const int32_t* asked;   // [R]: tokens whose next token is wanted
    int R;
    float* x;            // [T, D]: the last state, normed
    float* logits;       // [R, V rounded up to 32]
    int64_t* likeliest;  // [R]; -1 where a logit is not finite
};

// The outputs of step_inputs for a step of decode tokens, and the tables that they are read from.
struct StepMemory {
    const int32_t* tables;  // [slots, table_width]: page ids
    const float* cos;       // [positions, pairs]
    const float* sin;
    int64_t* ids;  // [T]: an output, as are the five arrays below
    float* cos_T;  // [T, pairs]
    float* sin_T;
    int64_t* rows;     // [T]
    int32_t* slots;    // [T]
    int32_t* lengths;  // [T]
    int64_t table_width;
    int pairs, page_tokens;
};

struct StepInputsCall {
    const int64_t* tokens;  // [slots, reach]
    int64_t reach;
    const StepMemory* memory;
    const int32_t* spans;  // [S, 3]: slot, start, count: positions [start, start + count) of the slot
    int S;
};

extern "C" {
void redline_block(const BlockCall& call);
void redline_transformer(const TransformerCall& call);
void redline_step_inputs(const StepInputsCall& call);
}
