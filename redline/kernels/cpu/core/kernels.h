// What each kernel takes: one struct, declared here once, which the kernel's file defines and Python reads from here
// (native.py). Arrays are contiguous, in the order of their shapes, unless a stride is given.
//
// T tokens, D hidden. A matrix of N outputs and K inputs lies in panels (gemm.h). `rounded`: whether what enters products
// is rounded to bf16. `plane`: pages of 64 rows of R + P values, in the format `kv_type` (pages.h).
#pragma once
#include <cstdint>

struct bf16;
typedef uint64_t u64;

struct LinearCall {
    const float* x;  // [T, >= K]
    int64_t ldx;     // from one row of x to the next
    const bf16* w;   // ceil(N / 32) panels over K
    float* y;        // [T, >= 32 * ceil(N / 32)]: x W^T
    int64_t ldy;
    int T, N, K, rounded;
};

struct AddNormCall {
    float* residual;       // [T, D]: partial is added to it
    const float* partial;  // [T, D]; null: nothing is added
    const float* w;        // [D]
    float* y;              // [T, D]: the residual, normed
    float eps;
    int T, D;
};

struct RouteExpertsCall {
    const float* x;     // [T, D]
    const bf16* w;      // ceil(E / 32) panels over D
    const float* bias;  // [E]
    int32_t* ids;       // [T, k]: best first; ties to the lower id
    float* weights;     // [T, k]
    int T, D, E, k, normalise;
    float scale;
    int groups, chosen_groups;  // of E / groups experts; only those of the chosen groups may be chosen
};

// Codes have scales: bf16 of INT4; e4m3 of NVFP4, which also has one float32 for each panel (wholes). What a format does not
// have is null. k = 0: the shared expert alone, and what belongs to
// the routed ones may be null.
struct MoeCall {
    const float* x;        // [T, D]
    const int32_t* ids;    // [T, k]
    const float* weights;  // [T, k]
    const void* gate_up;   // [E][2 I / 32] panels over D, gate first
    const void* gate_up_scales;
    const float* gate_up_wholes;  // [E][2 I / 32]
    const void* down;             // [E][D / 32] panels over I
    const void* down_scales;
    const float* down_wholes;  // [E][D / 32]
    const bf16* shared_gate_up;  // [2 Is / 32] panels over D
    const bf16* shared_down;     // [D / 32] panels over Is
    float* y;                    // [T, D]
    int T, D, E, k, I, Is;       // Is = 0: no shared expert
    int rounded;
};

struct MlaQkvCall {
    const float* x;        // [T, D]
    const bf16* w_a;       // panels over [Rq | R | P] outputs
    const float* q_norm;   // [Rq]
    const float* kv_norm;  // [R]
    const bf16* w_q;       // panels over H (Nn + P) outputs
    const float* cos;      // [T, P / 2]
    const float* sin;
    const int64_t* rows;  // [T]: page * 64 + place, where a token's latent goes
    void* plane;          // written
    int kv_type;
    float* q;  // [T, H (Nn + P)]
    float eps;
    int T, D, Rq, R, P, H, Nn;
};

// Query i is token tokens[i], in slot slots[i], and sees context tokens [skip, lengths[i]), itself the last.
struct MlaDecodeCall {
    const float* q;          // [T, H (Nn + P)]
    const int32_t* tokens;   // [Q]
    const int32_t* slots;    // [Q]
    const int32_t* lengths;  // [Q]
    const int32_t* tables;   // [slots, table_width]: page ids
    int64_t table_width;
    const void* plane;
    int kv_type;
    const bf16* w_uk;  // W_UK^T, panels over R outputs per head
    const bf16* w_uv;  // panels over V outputs per head
    float* y;          // [T, H V], written at the query tokens only
    float scale;
    int Q, H, Nn, P, R, V;
    int skip;  // 0 or 1
};

// Rows [0, count) of q are positions [start, start + count) of one slot, whose pages hold the latents of every position
// below start + count; those below skip are not read.
struct MlaPrefillCall {
    const float* q;  // [count, H (Nn + P)]
    int start, count;
    const int32_t* pages;  // the slot's
    const void* plane;
    int kv_type;
    const bf16* w_uk;  // as in MlaDecodeCall
    const bf16* w_uv;
    float* y;  // [count, H V]
    float scale;
    int H, Nn, P, R, V;
    int skip;  // 0 or 1, at most start
};

struct BestCall {
    const float* x;   // [R, >= V]
    int64_t ldx;      // from one row of x to the next
    int64_t* ids;     // [R]: the first of the greatest; a NaN is never the greatest
    uint8_t* finite;  // [R]: whether all of the row is
    int R, V;
};

struct ChecksumCall {
    const uint8_t* data;  // [count]
    u64* sum;             // out
    int64_t count;
    u64 seed;
};

// N rows of `units` pieces of 1, 2 or 4 bytes -> [ceil(N / 32)][units][32]; what rows are short of a panel is 0.
struct SideBySideCall {
    const void* rows;
    int64_t ld;    // bytes from one row to the next
    void* panels;  // written
    int N, units, unit;
};

// N rows of K codes of 4 bits, the even input's below -> [N / 32][K / 4][16][2][2] (panels.py). N in whole panels, K in fours.
struct PackCodesCall {
    const uint8_t* rows;
    int64_t ld;      // bytes from one row to the next
    uint8_t* codes;  // written
    int N, K;
};

struct SampleOdds {  // of a row, named as in ops/sample.py
    double u, temperature, top_p, top_k, min_p;
};

struct SampleCall {
    const float* x;  // [R, >= V]
    int64_t ldx;
    const SampleOdds* odds;  // [R]
    int64_t* ids;        // [R]; -1 where nothing can be drawn
    int R, V;
};

// A rank and all others tell one another `count` floats through memory that they share. Each rank has an epoch there, a
// word on a cache line of its own, which counts the calls whose words it has written: two rooms in turn are enough,
// since a rank writes to a room again only after all have arrived at the next call, so have read this one.
struct AllReduceCall {
    uint32_t* epochs;   // [ranks], 16 words apart
    float* rooms;       // [2][ranks][room]
    const float* part;  // [count]: this rank's
    float* whole;       // width = 0: [count], the sum in the order of ranks; else [count / width][ranks][width]
    int32_t* missing;   // out: the rank that did not come in time, or -1
    int64_t count, room, width, wait_ns;
    int64_t epoch;      // of this call, from 1
    int rank, ranks;
};

extern "C" {
void redline_all_reduce(const AllReduceCall& call);
void redline_linear(const LinearCall& call);
void redline_add_norm(const AddNormCall& call);
void redline_route_experts(const RouteExpertsCall& call);
void redline_moe(const MoeCall& call);
void redline_mla_qkv(const MlaQkvCall& call);
void redline_mla_decode(const MlaDecodeCall& call);
void redline_mla_prefill(const MlaPrefillCall& call);
void redline_best(const BestCall& call);
void redline_checksum(const ChecksumCall& call);
void redline_side_by_side(const SideBySideCall& call);
void redline_pack_codes(const PackCodesCall& call);
void redline_sample(const SampleCall& call);
}
