// Warpgroup MMAs (wgmma) on Hopper: sums[64 x N] += a[64 x 16] b[16 x N], a from registers, b from shared memory.
//
// All functions are called by four warps together, of which the first has an index divisible by 4. Warp w holds rows
// 16w to 16w + 15 of a and of the sums, laid out in its lanes as for mma.sync: a0 (g, 2t..), a1 (g + 8, 2t..), a2 (g,
// 2t + 8..), a3 (g + 8, 2t + 8..); of columns 8j to 8j + 7, sums[4j..] are (g, 2t), (g, 2t + 1), (g + 8, 2t), (g + 8,
// 2t + 1).
//
// b is 16 of the 64 values along k (`quarter`) of a tile of N columns, 128 bytes each, in the 128-byte swizzle: the 16
// bytes numbered c of column n are at 128 n + 16 (c ^ n % 8), from an address divisible by 1024.
//
// MMAs are asynchronous. Until `products_wait` returns, the sums of a group are undefined, and its a and b must not
// change. To test this, the emulator does all the arithmetic in `products_wait`, which is as late as possible.
#pragma once
#include "core.cuh"

#ifdef REDLINE_EMULATE

FN void products_begin() {}
template <u32 N, u32 SUMS>
FN void multiply_as(float (*to)(u16), float (&sums)[SUMS], u32 (&a)[4], u32 tile, u32 quarter) {
    static_assert(N % 8 == 0 && N / 2 <= SUMS, "columns come by eight");
    if (tile % 1024) emulated::fail("a tile of columns is not at a multiple of 1024");
    emulated::begin_product(sums, a, tile + 32 * quarter, N, to);
}
template <u32 N, u32 SUMS>
FN void multiply_f16(float (&sums)[SUMS], u32 (&a)[4], u32 tile, u32 quarter) {
    multiply_as<N>(emulated::f16_to_f32, sums, a, tile, quarter);
}
template <u32 N, u32 SUMS>
FN void multiply_bf16(float (&sums)[SUMS], u32 (&a)[4], u32 tile, u32 quarter) {
    multiply_as<N>(emulated::bf16_to_f32_, sums, a, tile, quarter);
}
FN void products_commit() { emulated::end_group(); }
FN void products_wait() { emulated::finish_groups(); }
template <u32 LENGTH>
FN void settle(float (&)[LENGTH]) {}
template <u32 LENGTH>
FN void settle(u32 (&)[LENGTH][4]) {}
FN u32 unknown(u32 v) { return v; }

FN void barrier_init(u32 barrier, u32 arrivals) { barrier_init(barrier), emulated::expect_arrivals(barrier, arrivals); }
FN void barrier_arrive(u32 barrier) {
    if (emulated::last_arrival(barrier)) barrier_expect(barrier, 0);
}
FN u32 multiply_add_f16(u32 a, u32 b, u32 c) {
    f32x2 x = unpack_f16(a), y = unpack_f16(b), z = unpack_f16(c);
    return pack_f16(__builtin_fmaf(x.x, y.x, z.x), __builtin_fmaf(x.y, y.y, z.y));
}

#else

// Before the first MMA of a group: orders earlier writes of the registers that it reads and accumulates into.
FN void products_begin() { ASM("wgmma.fence.sync.aligned;" ::: "memory"); }
// Ends a group of MMAs.
FN void products_commit() { ASM("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until all groups have ended.
FN void products_wait() { ASM("wgmma.wait_group.sync.aligned 0;" ::: "memory"); }
// A compiler barrier: code before it is not moved behind it, and these registers stay in use up to it. Call it after a
// wait for the registers of the MMAs: the compiler does not know that the MMAs used them.
template <u32 LENGTH>
FN void settle(float (&v)[LENGTH]) {
#pragma unroll
    for (u32 i = 0; i < LENGTH; i++) ASM("" : "+f"(v[i])::"memory");
}
template <u32 LENGTH>
FN void settle(u32 (&v)[LENGTH][4]) {
#pragma unroll
    for (u32 i = 0; i < LENGTH; i++) ASM("" : "+r"(v[i][0]), "+r"(v[i][1]), "+r"(v[i][2]), "+r"(v[i][3])::"memory");
}

// A number that is hidden from the optimiser.
FN u32 unknown(u32 v) {
    ASM("" : "+r"(v));
    return v;
}

// A matrix descriptor: address and stride (of 8 columns) in units of 16 bytes, swizzle mode 1 (128 bytes).
FN u64 describe(u32 tile, u32 quarter) { return (u64)((tile >> 4) + 2 * quarter) | (1024ull >> 4) << 32 | 1ull << 62; }

template <u32 N>
struct WgmmaF16;
template <u32 N>
struct WgmmaBf16;

// The four words of a and the descriptor are operands 0 to 4, so the sums begin at %5 for every N.
#define WGMMA_FOUR(i) "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3])
#define WGMMA_NAMES_8 "%5, %6, %7, %8"
#define WGMMA_NAMES_16 WGMMA_NAMES_8 ", " "%9, %10, %11, %12"
#define WGMMA_NAMES_24 WGMMA_NAMES_16 ", " "%13, %14, %15, %16"
#define WGMMA_NAMES_32 WGMMA_NAMES_24 ", " "%17, %18, %19, %20"
#define WGMMA_NAMES_40 WGMMA_NAMES_32 ", " "%21, %22, %23, %24"
#define WGMMA_NAMES_48 WGMMA_NAMES_40 ", " "%25, %26, %27, %28"
#define WGMMA_NAMES_56 WGMMA_NAMES_48 ", " "%29, %30, %31, %32"
#define WGMMA_NAMES_64 WGMMA_NAMES_56 ", " "%33, %34, %35, %36"
#define WGMMA_NAMES_72 WGMMA_NAMES_64 ", " "%37, %38, %39, %40"
#define WGMMA_NAMES_80 WGMMA_NAMES_72 ", " "%41, %42, %43, %44"
#define WGMMA_NAMES_88 WGMMA_NAMES_80 ", " "%45, %46, %47, %48"
#define WGMMA_NAMES_96 WGMMA_NAMES_88 ", " "%49, %50, %51, %52"
#define WGMMA_NAMES_104 WGMMA_NAMES_96 ", " "%53, %54, %55, %56"
#define WGMMA_NAMES_112 WGMMA_NAMES_104 ", " "%57, %58, %59, %60"
#define WGMMA_NAMES_120 WGMMA_NAMES_112 ", " "%61, %62, %63, %64"
#define WGMMA_NAMES_128 WGMMA_NAMES_120 ", " "%65, %66, %67, %68"
#define WGMMA_NAMES_136 WGMMA_NAMES_128 ", " "%69, %70, %71, %72"
#define WGMMA_NAMES_144 WGMMA_NAMES_136 ", " "%73, %74, %75, %76"
#define WGMMA_NAMES_152 WGMMA_NAMES_144 ", " "%77, %78, %79, %80"
#define WGMMA_NAMES_160 WGMMA_NAMES_152 ", " "%81, %82, %83, %84"
#define WGMMA_NAMES_168 WGMMA_NAMES_160 ", " "%85, %86, %87, %88"
#define WGMMA_NAMES_176 WGMMA_NAMES_168 ", " "%89, %90, %91, %92"
#define WGMMA_NAMES_184 WGMMA_NAMES_176 ", " "%93, %94, %95, %96"
#define WGMMA_NAMES_192 WGMMA_NAMES_184 ", " "%97, %98, %99, %100"
#define WGMMA_SUMS_8 WGMMA_FOUR(0)
#define WGMMA_SUMS_16 WGMMA_SUMS_8, WGMMA_FOUR(4)
#define WGMMA_SUMS_24 WGMMA_SUMS_16, WGMMA_FOUR(8)
#define WGMMA_SUMS_32 WGMMA_SUMS_24, WGMMA_FOUR(12)
#define WGMMA_SUMS_40 WGMMA_SUMS_32, WGMMA_FOUR(16)
#define WGMMA_SUMS_48 WGMMA_SUMS_40, WGMMA_FOUR(20)
#define WGMMA_SUMS_56 WGMMA_SUMS_48, WGMMA_FOUR(24)
#define WGMMA_SUMS_64 WGMMA_SUMS_56, WGMMA_FOUR(28)
#define WGMMA_SUMS_72 WGMMA_SUMS_64, WGMMA_FOUR(32)
#define WGMMA_SUMS_80 WGMMA_SUMS_72, WGMMA_FOUR(36)
#define WGMMA_SUMS_88 WGMMA_SUMS_80, WGMMA_FOUR(40)
#define WGMMA_SUMS_96 WGMMA_SUMS_88, WGMMA_FOUR(44)
#define WGMMA_SUMS_104 WGMMA_SUMS_96, WGMMA_FOUR(48)
#define WGMMA_SUMS_112 WGMMA_SUMS_104, WGMMA_FOUR(52)
#define WGMMA_SUMS_120 WGMMA_SUMS_112, WGMMA_FOUR(56)
#define WGMMA_SUMS_128 WGMMA_SUMS_120, WGMMA_FOUR(60)
#define WGMMA_SUMS_136 WGMMA_SUMS_128, WGMMA_FOUR(64)
#define WGMMA_SUMS_144 WGMMA_SUMS_136, WGMMA_FOUR(68)
#define WGMMA_SUMS_152 WGMMA_SUMS_144, WGMMA_FOUR(72)
#define WGMMA_SUMS_160 WGMMA_SUMS_152, WGMMA_FOUR(76)
#define WGMMA_SUMS_168 WGMMA_SUMS_160, WGMMA_FOUR(80)
#define WGMMA_SUMS_176 WGMMA_SUMS_168, WGMMA_FOUR(84)
#define WGMMA_SUMS_184 WGMMA_SUMS_176, WGMMA_FOUR(88)
#define WGMMA_SUMS_192 WGMMA_SUMS_184, WGMMA_FOUR(92)
#define WGMMA_OF(NAME, TYPES, N)                                                                                   \
    template <>                                                                                                    \
    struct NAME<N> {                                                                                               \
        template <u32 SUMS>                                                                                        \
        FN void run(float (&c)[SUMS], u32 (&a)[4], u64 b) {                                                        \
            ASM("{\n.reg .pred p;\nsetp.eq.u32 p, 0, 0;\nwgmma.mma_async.sync.aligned.m64n" #N                     \
                "k16.f32." TYPES " {" WGMMA_NAMES_##N "}, {%0, %1, %2, %3}, %4, p, 1, 1, 0;\n}"                    \
                : "+r"(a[0]), "+r"(a[1]), "+r"(a[2]), "+r"(a[3]), "+l"(b), WGMMA_SUMS_##N);                        \
        }                                                                                                          \
    };
#define WGMMA_ALL(NAME, TYPES)                                                                                     \
    WGMMA_OF(NAME, TYPES, 8) WGMMA_OF(NAME, TYPES, 16) WGMMA_OF(NAME, TYPES, 24)                                   \
    WGMMA_OF(NAME, TYPES, 32) WGMMA_OF(NAME, TYPES, 40) WGMMA_OF(NAME, TYPES, 48)                                  \
    WGMMA_OF(NAME, TYPES, 56) WGMMA_OF(NAME, TYPES, 64) WGMMA_OF(NAME, TYPES, 72)                                  \
    WGMMA_OF(NAME, TYPES, 80) WGMMA_OF(NAME, TYPES, 88) WGMMA_OF(NAME, TYPES, 96)                                  \
    WGMMA_OF(NAME, TYPES, 104) WGMMA_OF(NAME, TYPES, 112) WGMMA_OF(NAME, TYPES, 120)                               \
    WGMMA_OF(NAME, TYPES, 128) WGMMA_OF(NAME, TYPES, 136) WGMMA_OF(NAME, TYPES, 144)                               \
    WGMMA_OF(NAME, TYPES, 152) WGMMA_OF(NAME, TYPES, 160) WGMMA_OF(NAME, TYPES, 168)                               \
    WGMMA_OF(NAME, TYPES, 176) WGMMA_OF(NAME, TYPES, 184) WGMMA_OF(NAME, TYPES, 192)
WGMMA_ALL(WgmmaF16, "f16.f16")
WGMMA_ALL(WgmmaBf16, "bf16.bf16")
#undef WGMMA_ALL
#undef WGMMA_OF

template <u32 N, u32 SUMS>
FN void multiply_f16(float (&sums)[SUMS], u32 (&a)[4], u32 tile, u32 quarter) {
    static_assert(N % 8 == 0 && N / 2 <= SUMS, "columns come by eight");
    WgmmaF16<N>::run(sums, a, describe(tile, quarter));
}
template <u32 N, u32 SUMS>
FN void multiply_bf16(float (&sums)[SUMS], u32 (&a)[4], u32 tile, u32 quarter) {
    static_assert(N % 8 == 0 && N / 2 <= SUMS, "columns come by eight");
    WgmmaBf16<N>::run(sums, a, describe(tile, quarter));
}

// A barrier that completes when this number of threads has arrived.
FN void barrier_init(u32 barrier, u32 arrivals) {
    ASM("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
FN void barrier_arrive(u32 barrier) { ASM("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory"); }
// a b + c of two f16, rounded once.
FN u32 multiply_add_f16(u32 a, u32 b, u32 c) {
    u32 v;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(v) : "r"(a), "r"(b), "r"(c));
    return v;
}

#endif
