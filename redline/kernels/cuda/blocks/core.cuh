// Building blocks of the CUDA kernels: asynchronous copies into shared memory, MMA fragments, conversions.
//
// All inline PTX and CUDA intrinsics are in this file and wgmma*.cuh; `emulate.h` defines the same functions in C++, so
// that tests run a kernel's source on a CPU, thread by thread. No CUDA header is included.
//
// Shared memory is addressed by 32-bit byte offsets, as in PTX. A kernel's argument is one struct, passed by value.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

struct alignas(8) u32x2 { u32 x, y; };
struct alignas(16) u32x4 { u32 x, y, z, w; };
struct f32x2 { float x, y; };

#ifdef REDLINE_EMULATE
#include "emulate.h"
#else

#define FN static __device__ __forceinline__
#define KERNEL(name, Arguments) extern "C" __global__ void __launch_bounds__(THREADS, 1) name(const __grid_constant__ Arguments a)
#define SHARED_MEMORY extern __shared__ __align__(128) char shared_memory_[]
#define ASM asm volatile

FN u32 thread_index() { return threadIdx.x; }
FN u32 block_index() { return blockIdx.x; }
FN u32 block_index_y() { return blockIdx.y; }
FN u32 grid_size() { return gridDim.x; }

// Returns v, hidden from the optimiser: values derived from it are recomputed where they are used instead of being kept
// in registers.
FN u32 forget(u32 v) {
    ASM("" : "+r"(v));
    return v;
}

// ---- shared memory

FN u32 shared_base() {
    SHARED_MEMORY;
    return (u32)__cvta_generic_to_shared(shared_memory_);
}
FN u32x4 load_shared_4(u32 at) {
    u32x4 v;
    ASM("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at) : "memory");
    return v;
}
FN u32x2 load_shared_2(u32 at) {
    u32x2 v;
    ASM("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(at) : "memory");
    return v;
}
FN u32 load_shared(u32 at) {
    u32 v;
    ASM("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(at) : "memory");
    return v;
}
FN float load_shared_f32(u32 at) {
    float v;
    ASM("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(at) : "memory");
    return v;
}
FN void store_shared(u32 at, u32 v) { ASM("st.shared.u32 [%0], %1;" ::"r"(at), "r"(v) : "memory"); }
FN void store_shared_u16(u32 at, u16 v) { ASM("st.shared.u16 [%0], %1;" ::"r"(at), "h"(v) : "memory"); }
FN void store_shared_f32(u32 at, float v) { ASM("st.shared.f32 [%0], %1;" ::"r"(at), "f"(v) : "memory"); }
FN void store_shared_2(u32 at, u32x2 v) { ASM("st.shared.v2.u32 [%0], {%1,%2};" ::"r"(at), "r"(v.x), "r"(v.y) : "memory"); }
FN void store_shared_4(u32 at, u32x4 v) {
    ASM("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(at), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
// Returns the old value. Orders this thread's earlier reads before the addition, and later reads of a thread that sees
// the sum after it.
FN u32 add_shared(u32 at, u32 v) {
    u32 old;
    ASM("atom.acq_rel.cta.shared.add.u32 %0, [%1], %2;" : "=r"(old) : "r"(at), "r"(v) : "memory");
    return old;
}

// ---- global memory. No load uses the read-only cache (ld.global.nc): the previous grid may still be writing.

FN u32x4 load_global_4(const void* at) {
    u32x4 v;
    ASM("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at) : "memory");
    return v;
}
FN u32x2 load_global_2(const void* at) {
    u32x2 v;
    ASM("ld.global.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(at) : "memory");
    return v;
}
FN u32 load_global(const void* at) {
    u32 v;
    ASM("ld.global.u32 %0, [%1];" : "=r"(v) : "l"(at) : "memory");
    return v;
}
// Reads what a grid before the previous one wrote, for which this grid did not itself wait: bypasses the SM's L1 cache.
FN u32 load_global_fresh(const void* at) {
    u32 v;
    ASM("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(at) : "memory");
    return v;
}
FN u8 load_global_u8(const void* at) {
    u32 v;
    ASM("ld.global.u8 %0, [%1];" : "=r"(v) : "l"(at) : "memory");
    return (u8)v;
}
FN float load_global_f32(const void* at) {
    float v;
    ASM("ld.global.f32 %0, [%1];" : "=f"(v) : "l"(at) : "memory");
    return v;
}
FN void store_global_4(void* at, u32x4 v) {
    ASM("st.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(at), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
FN void store_global_2(void* at, u32x2 v) { ASM("st.global.v2.u32 [%0], {%1,%2};" ::"l"(at), "r"(v.x), "r"(v.y) : "memory"); }
FN void store_global(void* at, u32 v) { ASM("st.global.u32 [%0], %1;" ::"l"(at), "r"(v) : "memory"); }
FN void store_global_fresh(void* at, u32 v) { ASM("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(at), "r"(v) : "memory"); }
FN void store_global_u16(void* at, u16 v) { ASM("st.global.u16 [%0], %1;" ::"l"(at), "h"(v) : "memory"); }
FN void store_global_u8(void* at, u8 v) { ASM("st.global.u8 [%0], %1;" ::"l"(at), "r"((u32)v) : "memory"); }
FN void store_global_f32(void* at, float v) { ASM("st.global.f32 [%0], %1;" ::"l"(at), "f"(v) : "memory"); }
// A GPU-wide fence: after this thread's writes to global memory, before the write that lets other threads read them.
FN void show_all() { ASM("fence.acq_rel.gpu;" ::: "memory"); }
// Returns the old value. Atomic among all thread blocks of the grid.
FN u32 add_global(void* at, u32 v) {
    u32 old;
    ASM("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;" : "=r"(old) : "l"(at), "r"(v) : "memory");
    return old;
}

// ---- memory that several GPUs, or a GPU and the host, write: system scope, bypasses all caches that might be stale

FN void load_system(const void* at, u32& v) { ASM("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(at) : "memory"); }
FN void load_system(const void* at, u32x2& v) {
    ASM("ld.relaxed.sys.global.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(at) : "memory");
}
FN void load_system(const void* at, u32x4& v) {
    ASM("ld.relaxed.sys.global.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at) : "memory");
}
FN void store_system(void* at, u32 v) { ASM("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(at), "r"(v) : "memory"); }
FN void store_system(void* at, u32x2 v) {
    ASM("st.relaxed.sys.global.v2.u32 [%0], {%1,%2};" ::"l"(at), "r"(v.x), "r"(v.y) : "memory");
}
FN void store_system(void* at, u32x4 v) {
    ASM("st.relaxed.sys.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(at), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
FN u64 load_system_64(const void* at) {
    u64 v;
    ASM("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(at) : "memory");
    return v;
}
FN void store_system_64(void* at, u64 v) { ASM("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(at), "l"(v) : "memory"); }
FN u64 nanoseconds() {  // since an epoch common to all thread blocks
    u64 v;
    ASM("mov.u64 %0, %%globaltimer;" : "=l"(v));
    return v;
}
FN void wait_a_little() {}

// ---- bulk copies. An mbarrier expects one arrival, that of `barrier_expect`, and completes when all bytes have
// arrived.

FN void barrier_init(u32 barrier) { ASM("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier) : "memory"); }
// After the last `barrier_init`, by the thread that called them, before a block-wide barrier.
FN void barrier_init_done() {
    ASM("fence.mbarrier_init.release.cluster;" ::: "memory");
    ASM("fence.proxy.async.shared::cta;" ::: "memory");
}
FN void barrier_expect(u32 barrier, u32 bytes) {
    ASM("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
FN void barrier_wait(u32 barrier, u32 parity) {
    ASM("{\n.reg .pred p;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@!p bra again;\n}" ::"r"(barrier),
        "r"(parity)
        : "memory");
}
// `bytes`, `from` and `to` are multiples of 16.
FN void copy_bulk(u32 to, const void* from, u32 bytes, u32 barrier) {
    ASM("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from), "r"(bytes),
        "r"(barrier)
        : "memory");
}
// The same for data that a step reads once: L2 evicts it first.
FN u64 read_once() {
    u64 policy;
    ASM("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}
FN void copy_bulk(u32 to, const void* from, u32 bytes, u32 barrier, u64 policy) {
    ASM("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(to),
        "l"(from), "r"(bytes), "r"(barrier), "l"(policy)
        : "memory");
}

// After this thread's own writes to shared memory and before a bulk copy into the same place (a barrier among the
// threads must come between).
FN void writes_before_copies() { ASM("fence.proxy.async.shared::cta;" ::: "memory"); }

// ---- 16-byte copies of one thread: after `copies_wait` the thread itself can read them, after a block-wide barrier
// all threads.

// If not `real`, writes zeros and reads nothing.
FN void copy_async(u32 to, const void* from, bool real) {
    ASM("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(real ? 16 : 0) : "memory");
}
// Ends a group of copies.
FN void copies_commit() { ASM("cp.async.commit_group;" ::: "memory"); }
// Waits for all of this thread's groups except the last `LEFT`.
template <u32 LEFT>
FN void copies_wait() {
    ASM("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}

// ---- programmatic dependent launch

FN void let_next_grid_start() { ASM("griddepcontrol.launch_dependents;" ::: "memory"); }
FN void wait_for_previous_grid() { ASM("griddepcontrol.wait;" ::: "memory"); }

// ---- synchronisation and exchange among threads

FN void sync_block() { ASM("bar.sync 0;" ::: "memory"); }
FN void sync_warp() { __syncwarp(); }
FN void sync_threads(u32 name, u32 threads) { ASM("bar.sync %0, %1;" ::"r"(name), "r"(threads) : "memory"); }
FN float shuffle_xor(float v, u32 mask) { return __shfl_xor_sync(~0u, v, mask); }
FN u32 shuffle_xor(u32 v, u32 mask) { return __shfl_xor_sync(~0u, v, mask); }
FN u32 shuffle(u32 v, u32 lane) { return __shfl_sync(~0u, v, lane); }
FN u32 warp_ballot(bool v) { return __ballot_sync(~0u, v); }
FN u32 warp_max(u32 v) { return __reduce_max_sync(~0u, v); }
FN u32 count_bits(u32 v) { return __popc(v); }

// ---- MMA: c[16 x 8] += a[16 x 16] b[16 x 8]. Lane 4g + t: a0 (g, 2t..), a1 (g + 8, 2t..), a2 (g, 2t + 8..), a3 (g +
// 8, 2t + 8..); b0 (2t.., g), b1 (2t + 8.., g); c (g, 2t), (g, 2t + 1), (g + 8, 2t), (g + 8, 2t + 1).

FN void mma_bf16(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
FN void mma_f16(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
// Four 8 x 8 tiles of 16-bit values: lane i gives the address of row i % 8 of tile i / 8; lane 4g + t gets elements
// (g, 2t), (g, 2t + 1) of each tile; transposed: (2t, g), (2t + 1, g).
FN u32x4 load_tiles(u32 row) {
    u32x4 v;
    ASM("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
        : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
        : "r"(row)
        : "memory");
    return v;
}
FN u32x4 load_tiles_transposed(u32 row) {
    u32x4 v;
    ASM("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
        : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
        : "r"(row)
        : "memory");
    return v;
}

// ---- arithmetic and conversions

FN float as_float(u32 v) { return __uint_as_float(v); }
FN u32 as_u32(float v) { return __float_as_uint(v); }
// Two bf16 of one word; `lo` is the first in memory.
FN u32 pack_bf16(float lo, float hi) {
    u32 v;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(hi), "f"(lo));
    return v;
}
FN u32 pack_f16(float lo, float hi) {
    u32 v;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(hi), "f"(lo));
    return v;
}
FN f32x2 unpack_f16(u32 v) {
    f32x2 f;
    asm("{\n.reg .f16 lo, hi;\nmov.b32 {lo, hi}, %2;\ncvt.f32.f16 %0, lo;\ncvt.f32.f16 %1, hi;\n}" : "=f"(f.x), "=f"(f.y) : "r"(v));
    return f;
}
FN u32 multiply_f16(u32 a, u32 b) {
    u32 v;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(v) : "r"(a), "r"(b));
    return v;
}
FN u32 multiply_bf16(u32 a, u32 b) {
    u32 v;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(v) : "r"(a), "r"(b));
    return v;
}
// Two e4m3 of 16 bits, from two float32 (to nearest, saturating).
FN u16 pack_e4m3(float lo, float hi) {
    u16 v;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(v) : "f"(hi), "f"(lo));
    return v;
}
// Two e4m3 of 16 bits as f16, exactly.
FN u32 widen_e4m3(u16 v) {
    u32 both;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(both) : "h"(v));
    return both;
}
// The first two or (SECOND) the last two of four int8 as bf16, exactly. 0x43ss without bit 7 is 128 + the low seven
// bits of the int8 ss; 0x43ss without those seven bits is 128, or 256 if ss is negative, since its sign bit is the
// lowest bit of the exponent. The difference is ss.
template <u32 SECOND>
FN u32 widen_s8(u32 w) {
    u32 v, difference;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(v) : "r"(w), "r"(0x43434343u), "n"(SECOND ? 0x4342 : 0x4140));
    asm("sub.rn.bf16x2 %0, %1, %2;" : "=r"(difference) : "r"(v & 0xff7fff7fu), "r"(v & 0xff80ff80u));
    return difference;
}
// (w & mask) | magic
template <u32 MASK, u32 MAGIC>
FN u32 and_or(u32 w) {
    u32 v;
    asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(v) : "r"(w), "n"(MASK), "n"(MAGIC));
    return v;
}
FN float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
FN float log2_fast(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
FN float reciprocal_fast(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
FN float reciprocal_root(float x) { return rsqrtf(x); }
FN float exp_exact(float x) { return expf(x); }
FN float cos_exact(float x) { return cosf(x); }
FN float sin_exact(float x) { return sinf(x); }
FN float larger(float a, float b) { return fmaxf(a, b); }
// The product is rounded: it is not fused with a following addition.
FN float rounded_product(float a, float b) { return __fmul_rn(a, b); }

#endif

// ---- for the GPU and the emulator

FN float bf16_lo(u32 v) { return as_float(v << 16); }
FN float bf16_hi(u32 v) { return as_float(v & 0xffff0000u); }
FN float infinity() { return as_float(0x7f800000); }
FN u16 f32_to_bf16(float v) { return (u16)pack_bf16(v, 0.f); }
FN u32 lane_index() { return thread_index() & 31; }
FN u32 warp_index() { return thread_index() >> 5; }
FN float sigmoid(float x) { return 1.f / (1.f + exp_exact(-x)); }
FN float silu(float x) { return x * sigmoid(x); }
FN u32 smaller(u32 a, u32 b) { return a < b ? a : b; }
FN float warp_sum(float v) {  // the sum over all lanes, the same bits in each
    for (u32 i = 16; i; i >>= 1) v += shuffle_xor(v, i);
    return v;
}

// A KERNEL limited in registers so that BLOCKS thread blocks fit on an SM: it, or the grid after it, can start while
// other blocks are still resident.
#ifdef REDLINE_EMULATE
#define KERNEL_BESIDE(name, Arguments, BLOCKS) KERNEL(name, Arguments)
#else
#define KERNEL_BESIDE(name, Arguments, BLOCKS) \
    extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) name(const __grid_constant__ Arguments a)
#endif

typedef long long i64;
FN i64 load_global_i64(const i64* at) {
    u32x2 v = load_global_2(at);
    return (i64)((u64)v.y << 32 | v.x);
}
FN void store_global_i64(i64* at, i64 v) { store_global_2(at, {(u32)v, (u32)((u64)v >> 32)}); }
