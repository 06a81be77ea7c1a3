// Warpgroup MMAs (wgmma) on Hopper, both operands from shared memory: sums[64 x N] += a[64 x 16] b[16 x N], of bf16.
//
// All functions are called by four warps together, of which the first has an index divisible by 4. Warp w holds rows
// 16w to 16w + 15 of the sums: of columns 8j to 8j + 7, lane 4g + t has (g, 2t), (g, 2t + 1), (g + 8, 2t), (g + 8, 2t +
// 1) in sums[4j..].
//
// Operands are stored in rows of 128 bytes in the 128-byte swizzle: the 16 bytes numbered c of row r are at 128 r + 16
// (c ^ r % 8), from a base divisible by 1024. b has a row for each column, with k along the row. a has a row for each
// of its 64 rows, with k along the row; or, if TRANSPOSED, a row for each k, with its 64 rows along it. `further` moves
// an operand to the next 16 of k, which are 32 bytes or 16 rows away.
//
// MMAs are asynchronous. Until `products_wait` returns, their sums are undefined and their operands must not change. To
// test this, the emulator does all the arithmetic in `products_wait`, which is as late as possible, and compares the
// operands with their values at the start of the MMA.
#pragma once
#include "core.cuh"

#ifdef REDLINE_EMULATE

struct Operand { u32 at; };

FN u32 shared_base_1024() { return shared_base(); }
FN Operand operand(u32 at) { return {at}; }
FN Operand transposed_operand(u32 at) { return {at}; }
FN Operand further(Operand o, u32 bytes) { return {o.at + bytes}; }
FN void products_begin() {}
template <u32 N, bool TRANSPOSED>
FN void multiply_shared(float (&sums)[N / 2], Operand a, Operand b) {
    emulated::begin_shared_product(sums, a.at, b.at, N, TRANSPOSED);
}
FN void products_commit() { emulated::end_shared_group(); }
FN void products_wait() { emulated::finish_shared_group(); }
template <u32 LENGTH>
FN void settle(float (&)[LENGTH]) {}
FN void show_products() {}
FN u32x4 load_global_4_fresh(const void* at) { return load_global_4(at); }
template <u32 ORDER>
FN u32 pick_bytes(u32 v) {
    u32 out = 0;
    for (u32 i = 0; i < 4; i++) {
        u32 from = ORDER >> 4 * i & 7;
        out |= (from < 4 ? v >> 8 * from & 0xff : 0) << 8 * i;
    }
    return out;
}

#else

// The base of shared memory, divisible by 1024.
FN u32 shared_base_1024() {
    extern __shared__ __align__(1024) char swizzled_shared_memory_[];
    return (u32)__cvta_generic_to_shared(swizzled_shared_memory_);
}
// Before the first MMA of a group: orders earlier writes of the registers that it accumulates into.
FN void products_begin() { ASM("wgmma.fence.sync.aligned;" ::: "memory"); }
// Ends a group of MMAs.
FN void products_commit() { ASM("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until all groups have ended. Call `settle` for their sums afterwards: the compiler does not know that the MMAs
// used them.
FN void products_wait() { ASM("wgmma.wait_group.sync.aligned 0;" ::: "memory"); }
template <u32 LENGTH>
FN void settle(float (&v)[LENGTH]) {
#pragma unroll
    for (u32 i = 0; i < LENGTH; i++) ASM("" : "+f"(v[i])::"memory");
}
// After this thread's writes to shared memory, before the barrier after which MMAs may read them.
FN void show_products() { ASM("fence.proxy.async.shared::cta;" ::: "memory"); }

// The low half of a matrix descriptor: the address and the leading-dimension offset (unused for one atom of 64), in
// units of 16 bytes. The high half is always the same: 1024 bytes from eight rows to the next, swizzle mode 1 (128
// bytes).
struct Operand { u32 low; };
FN Operand operand(u32 at) { return {(at & 0x3ffff) >> 4 | 1u << 16}; }
FN Operand transposed_operand(u32 at) { return {(at & 0x3ffff) >> 4 | 1024u / 16 << 16}; }
FN Operand further(Operand o, u32 bytes) { return {o.low + bytes / 16}; }
FN u64 describe(Operand o) { return o.low | (u64)(1024 / 16 | 1u << 30) << 32; }

#define FOUR_SUMS(i) "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3])
#define EIGHT_SUMS(i) FOUR_SUMS(i), FOUR_SUMS(i + 4)
#define PRODUCT(N, NAMES, A, B, T)                                                                                     \
    "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" NAMES "}, %" #A ", %" #B ", 1, 1, 1, %" #T ", 0;"
template <bool TRANSPOSED>
FN void multiply_tiles(float (&c)[8], u64 a, u64 b) {
    ASM(PRODUCT(16, "%0,%1,%2,%3,%4,%5,%6,%7", 8, 9, 10) : EIGHT_SUMS(0) : "l"(a), "l"(b), "n"((u32)TRANSPOSED));
}
template <bool TRANSPOSED>
FN void multiply_tiles(float (&c)[16], u64 a, u64 b) {
    ASM(PRODUCT(32, "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15", 16, 17, 18)
        : EIGHT_SUMS(0), EIGHT_SUMS(8)
        : "l"(a), "l"(b), "n"((u32)TRANSPOSED));
}
template <bool TRANSPOSED>
FN void multiply_tiles(float (&c)[32], u64 a, u64 b) {
    ASM(PRODUCT(64,
                "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
                "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31",
                32, 33, 34)
        : EIGHT_SUMS(0), EIGHT_SUMS(8), EIGHT_SUMS(16), EIGHT_SUMS(24)
        : "l"(a), "l"(b), "n"((u32)TRANSPOSED));
}
#undef PRODUCT
#undef EIGHT_SUMS
#undef FOUR_SUMS
template <u32 N, bool TRANSPOSED>
FN void multiply_shared(float (&sums)[N / 2], Operand a, Operand b) {
    multiply_tiles<TRANSPOSED>(sums, describe(a), describe(b));
}

// Four 8 x 8 tiles of 16-bit values: lane i gives the address of row i % 8 of tile i / 8; lane 4g + t has elements (2t,
// g), (2t + 1, g) of each tile.
FN void store_tiles_transposed(u32 row, u32x4 v) {
    ASM("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(row), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
        : "memory");
}
// As `load_global_fresh`.
FN u32x4 load_global_4_fresh(const void* at) {
    u32x4 v;
    ASM("ld.relaxed.gpu.global.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at) : "memory");
    return v;
}
// Byte i of the result is the byte of v that digit i of ORDER names, 0 for digit 4.
template <u32 ORDER>
FN u32 pick_bytes(u32 v) {
    u32 out;
    asm("prmt.b32 %0, %1, 0, %2;" : "=r"(out) : "r"(v), "n"(ORDER));
    return out;
}

#endif
