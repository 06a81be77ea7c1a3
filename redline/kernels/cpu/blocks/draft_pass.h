// What draft_pass.cpp takes. draft_pass.py reads each struct from here, by name.
//
// T rows, R of them that are finished, D hidden, H heads, Nn nope, P rope, Rq and R ranks, V value width, I MLP width,
// S states of W values that are fused, k drafts at most.
#pragma once
#include <cstdint>

struct bf16;

// All of a drafter but its fusion; matrices in panels.
struct DraftWeights {
    const bf16* embedding;                   // [vocabulary, D]
    const float *input_norm, *hidden_norm;   // [D] each
    const bf16* w_a;                         // [Rq + R + P, 2 D]
    const float *q_norm, *kv_norm;           // [Rq], [R]
    const bf16 *w_q, *w_uk, *w_uv, *o_proj;  // [H (Nn + P), Rq], [H, R, Nn], [H, V, R], [D, H V]
    const float* mlp_norm;                   // [D]
    const bf16 *gate_up, *down;              // [2 I, D], [D, I]
    const float* norm;                       // [D]
    const bf16* head;                        // [vocabulary, D]
    float eps, low_rank_eps, softmax_scale;
    int D, Rq, H, Nn, P, R, V, I, vocabulary;
    int norm_before_residual, norm_output;
};

// What rows are looked up in.
struct DraftPages {
    const int64_t* tokens;   // [slots, tokens_width]
    const int32_t* tables;   // [slots, table_width]
    const float *cos, *sin;  // [positions, P / 2]
    int64_t tokens_width, table_width;
};

// Some rows of the states, each state normed, times fc.
struct DraftFuseCall {
    const float* features;   // [., S W]
    const int32_t* sources;  // [T]: rows of features
    const float* norms;      // [S, W]; null: states go in as they are
    const bf16* fc;          // [D, S W], in panels
    float* fused;            // [T, D]
    float eps;
    int T, S, W, D;
};

// One pass; the rows that are finished go on through attention and MLP.
struct DraftPassCall {
    const DraftWeights* weights;
    const DraftPages* pages;
    const float* feature;               // [T, D], of `positions`
    const int32_t *slots, *positions;   // [T]
    const int32_t* ids;                 // [T]: the rows' tokens; null: those that their slots have
    const int32_t* queries;             // [R] of the rows
    void* plane;                        // [pages, 64, R + P]: written at the rows' places
    float *normed, *fed;                // [R, D], neither of which may be `feature`
    int kv_type, T, R;                  // kv_type: core/pages.h
};

// A pass, and a greedy chain of drafts behind each of its queries.
struct DraftChainCall {
    const DraftWeights* weights;
    const DraftPages* pages;
    const float* feature;              // [T, D]
    const int32_t *slots, *positions;  // [T]
    const int32_t* queries;            // [R] of the rows
    const int32_t* wanted;             // [R]: drafts of each, 1 to k
    void* plane;
    int64_t* drafted;                  // [R, k]: of each query as many as it wants are written
    int kv_type, T, R, k;
};

extern "C" {
void redline_draft_fuse(const DraftFuseCall& call);
void redline_draft_pass(const DraftPassCall& call);
void redline_draft_chain(const DraftChainCall& call);
}
