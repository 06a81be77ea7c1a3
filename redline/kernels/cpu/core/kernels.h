// The argument struct of each kernel, declared here once: the kernel's source includes it, and Python parses it
// (native.py). Arrays are contiguous, in the order of their shapes, unless a stride is given.
//
// T tokens, D hidden. A matrix of N outputs and K inputs is stored in panels (gemm.h). `rounded`: whether the inputs of
// products are rounded to bf16. `plane`: pages of 64 rows of R + P values, in the format `kv_type` (pages.h).
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
    const float* partial;  // [T, D], added to residual; null: residual stays as it is
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
    int groups, chosen_groups;  // of E / groups experts; only experts of the chosen groups can be selected
};

// Quantised matrices have scales: bf16 for INT4; e4m3 for NVFP4, which also has one float32 per panel (wholes).
// Pointers that a format does not use are null. k = 0: only the shared expert; pointers of routed experts may then be
// null.
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
    const int64_t* rows;  // [T]: page * 64 + place, the row of a token's latent
    void* plane;          // written
    int kv_type;
    float* q;  // [T, H (Nn + P)]
    float eps;
    int T, D, Rq, R, P, H, Nn;
};

// Query i is token tokens[i], in slot slots[i]; it sees context tokens [skip, lengths[i]), the last of which is itself.
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

// Rows [0, count) of q are positions [start, start + count) of one slot. Its pages hold the latents of all positions
// below start + count; those below skip are not read.
struct MlaPrefillCall {
    const float* q;  // [count, H (Nn + P)]
    int start, count;
    const int32_t* pages;  // of the slot
    const void* plane;
    int kv_type;
    const bf16* w_uk;  // as in MlaDecodeCall
    const bf16* w_uv;
    float* y;  // [count, H V]
    float scale;
    int H, Nn, P, R, V;
    int skip;  // 0 or 1, at most start
};

// Blocks of B positions, the first of each at `starts`, attend to all rows of their slot's pages before it and to the
// first `counts` rows of the block itself. X is a multiple of 32.
struct AttendBlockCall {
    const float* q;         // [R, B, H, X], scaled
    const float* own;       // [R, B, 2 G X]: keys, then values, of each key head
    const int64_t* starts;  // [R]
    const int64_t* counts;  // [R]
    const int32_t* tables;  // [R, P]
    const void* plane;      // rows of 2 G X values
    int64_t stride;         // values from one row to the next; a page has 64 rows
    float* y;               // [R, B, H, X]
    int kv_type, R, B, H, G, X, P;
    int window;  // a position sees itself and window - 1 positions before it, none after it; 0: all
};

struct BestCall {
    const float* x;   // [R, >= V]
    int64_t ldx;      // from one row of x to the next
    int64_t* ids;     // [R]: the argmax, the first one if several are equal; a NaN never wins
    uint8_t* finite;  // [R]: whether all numbers of the row are finite
    int R, V;
};

struct ChecksumCall {
    const uint8_t* data;  // [count]
    u64* sum;             // out
    int64_t count;
    u64 seed;
};

// N rows of `units` pieces of 1, 2 or 4 bytes -> [ceil(N / 32)][units][32]; the last panel is filled up with 0.
struct SideBySideCall {
    const void* rows;
    int64_t ld;    // bytes from one row to the next
    void* panels;  // written
    int N, units, unit;
};

// N rows of K 4-bit codes, the even input in the low bits -> [N / 32][K / 4][16][2][2] (panels.py). N is a multiple of
// 32, K of 4.
struct PackCodesCall {
    const uint8_t* rows;
    int64_t ld;      // bytes from one row to the next
    uint8_t* codes;  // written
    int N, K;
};

struct SampleOdds {  // of a row; names as in ops/sample.py
    double u, temperature, top_p, top_k, min_p;
};

struct SampleCall {
    const float* x;  // [R, >= V]
    int64_t ldx;
    const SampleOdds* odds;  // [R]
    int64_t* ids;        // [R]; -1 if no token can be sampled
    int R, V;
};

// All-reduce or all-gather of `count` floats through shared memory. Each rank has an epoch there, a word on its own
// cache line: the number of calls whose words the rank has written. Two rooms, used alternately, are enough: a rank
// writes to a room again only after all ranks have arrived at the next call, and so have finished reading this one.
struct AllReduceCall {
    uint32_t* epochs;   // [ranks], 16 words apart
    float* rooms;       // [2][ranks][room]
    const float* part;  // [count], of this rank
    float* whole;       // width = 0: [count], the sum in the order of ranks; else [count / width][ranks][width]
    int32_t* missing;   // out: the rank that did not arrive in time, or -1
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
void redline_attend_block(const AttendBlockCall& call);
void redline_best(const BestCall& call);
void redline_checksum(const ChecksumCall& call);
void redline_side_by_side(const SideBySideCall& call);
void redline_pack_codes(const PackCodesCall& call);
void redline_sample(const SampleCall& call);
}
