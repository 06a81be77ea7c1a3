// The kernels, as each file defines them and block.cpp calls them.
#pragma once
#include <cstdint>

struct bf16;
struct BlockWeights;

// A step, as block.py lays it out.
struct Chunk {
    int first, count, start, slot;
};

struct BlockTokens {
    const int64_t* ids;
    const float *cos, *sin;
    const int64_t* rows;
    const Chunk* chunks;
    const int32_t *tokens, *slots, *lengths, *tables;
    int64_t table_width;
    int T, C, Q;
};

extern "C" {
void redline_linear(const float* x, int64_t ldx, const bf16* w, float* y, int64_t ldy, int T, int N, int K,
                    int rounded);
void redline_add_norm(float* residual, const float* partial, const float* w, float* y, float eps, int T, int D);
void redline_route_experts(const float* x, const bf16* w, const float* bias, int32_t* ids, float* weights, int T, int D,
                           int E, int k, int normalise, float scale);
void redline_moe(const float* x, const int32_t* ids, const float* weights, const void* gate_up,
                 const bf16* gate_up_scales, const void* down, const bf16* down_scales, const bf16* shared_gate_up,
                 const bf16* shared_down, float* y, int T, int D, int E, int k, int I, int Is,
                 int rounded);
void redline_mla_qkv(const float* x, const bf16* wa, const float* q_norm, const float* kv_norm, const bf16* wq,
                     const float* cos, const float* sin, const int64_t* slots, void* plane, int kv_type, float* q,
                     float eps, int T, int D, int Rq, int R, int P, int H, int Nn);
void redline_mla_decode(const float* q, const int32_t* tokens, const int32_t* slots, const int32_t* lengths,
                        const int32_t* tables, int64_t table_width, const void* plane, int kv_type, const bf16* w_uk,
                        const bf16* w_uv, float* y, float scale, int Q, int H, int Nn, int P, int R, int V, int skip);
void redline_mla_prefill(const float* q, int start, int count, const int32_t* pages, const void* plane, int kv_type,
                         const bf16* w_uk, const bf16* w_uv, float* y, float scale, int H, int Nn, int P, int R, int V,
                         int skip);
void redline_block(const BlockWeights* weights, const BlockTokens* tokens, void* plane, int kv_type, float* residual,
                   const float* partial, float* y);
void redline_best(const float* x, int64_t ldx, int64_t* ids, uint8_t* finite, int R, int V);
void redline_sample(const float* x, int64_t ldx, const double* odds, int64_t* ids, int R, int V);
}
