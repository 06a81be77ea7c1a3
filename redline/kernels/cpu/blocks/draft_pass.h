// The argument structs of draft_pass.cpp. draft_pass.py parses each of them by name.
//
// T rows, R of which are completed (queries), D hidden, H heads, Nn nope, P rope, Rq and R ranks, V value width, I MLP
// width, S states of W values that are fused, at most k drafts.
#pragma once
#include <cstdint>

struct bf16;

// All weights of a drafter except those of the fusion; matrices are stored in panels.
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

// The tables that a row's inputs are read from.
struct DraftPages {
    const int64_t* tokens;   // [slots, tokens_width]
    const int32_t* tables;   // [slots, table_width]
    const float *cos, *sin;  // [positions, P / 2]
    int64_t tokens_width, table_width;
};

// Fuses some rows of the states: each state is normed, then they are multiplied by fc.
struct DraftFuseCall {
    const float* features;   // [., S W]
    const int32_t* sources;  // [T]: rows of features
    const float* norms;      // [S, W]; null: states are not normed
    const bf16* fc;          // [D, S W], in panels
    float* fused;            // [T, D]
    float eps;
    int T, S, W, D;
};

// One pass; attention and MLP run only for the queries among its rows.
struct DraftPassCall {
    const DraftWeights* weights;
    const DraftPages* pages;
    const float* feature;               // [T, D], at `positions`
    const int32_t *slots, *positions;   // [T]
    const int32_t* ids;                 // [T]: the rows' tokens; null: those of their slots
    const int32_t* queries;             // [R]: indices of rows
    void* plane;                        // [pages, 64, R + P]: latents are written at the rows' places
    float *normed, *fed;                // [R, D]; must not overlap `feature`
    int kv_type, T, R;                  // kv_type: core/pages.h
};

// A pass, then a greedy chain of drafts for each of its queries.
struct DraftChainCall {
    const DraftWeights* weights;
    const DraftPages* pages;
    const float* feature;              // [T, D]
    const int32_t *slots, *positions;  // [T]
    const int32_t* queries;            // [R]: indices of rows
    const int32_t* wanted;             // [R]: number of drafts for each query, 1 to k
    void* plane;
    int64_t* drafted;                  // [R, k]: for each query the first `wanted` are written
    int kv_type, T, R, k;
};

extern "C" {
void redline_draft_fuse(const DraftFuseCall& call);
void redline_draft_pass(const DraftPassCall& call);
void redline_draft_chain(const DraftChainCall& call);
}
