// Emulates a CUDA thread block on a CPU, for tests: each thread is a fiber, and functions here replace the PTX
// instructions of core.cuh. To expose missing waits, bulk copies complete late and in any order, their destination is
// filled with NaNs before, and the order in which warps run is random, from a seed. Thread blocks run one after
// another.
//
// A wrong address, a lane that calls another operation than its warp, or a deadlock ends the run with a message.
//
// Every variant of a kernel compiles this file, so it includes no headers and contains only what should be inlined. The
// rest, in emulate.cpp and emulate_products.cpp, is compiled once and linked to each variant.
#pragma once

#define FN static inline
#define __device__
#define __forceinline__ inline
#define __restrict__ __restrict

#pragma GCC visibility push(hidden)
namespace emulated {

constexpr u32 SHARED_BASE = 1024;  // so that address 0 is an error

struct State {  // of the thread that runs, and of its thread block
    u32 thread, block, block_y, grid, threads;
    char* shared;
    u32 shared_bytes;
    bool progress;  // whether any thread has made progress in this round
};
extern State state;

[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));
[[noreturn]] void wrong_address(u32 address, u32 bytes);
void yield();
void wait(const u32& counter);  // until the counter changes
u32 draw();  // a random number, from the run's seed
const char* run(void (*body)(const void*), const void* arguments, u32 grid, u32 grid_y, u32 threads, u32 shared, u32 seed);

static inline char* at(u32 address, u32 bytes) {
    if (address < SHARED_BASE || address - SHARED_BASE + bytes > state.shared_bytes || address % bytes) wrong_address(address, bytes);
    return state.shared + (address - SHARED_BASE);
}
template <class T>
static inline T load(u32 address) {
    T v;
    __builtin_memcpy(&v, at(address, sizeof v), sizeof v);
    return v;
}
template <class T>
static inline void store(u32 address, T v) {
    __builtin_memcpy(at(address, sizeof v), &v, sizeof v);
}
template <class T>
static inline T* aligned(void* p) {
    if ((u64)p % sizeof(T)) fail("global memory: an address is no multiple of %u", (u32)sizeof(T));
    return (T*)p;
}
template <class T>
static inline const T* aligned(const void* p) { return aligned<T>((void*)p); }

static inline float f16_to_f32(u16 h) {
    u32 w = (u32)(h & 0x7fff) << 13; float f; __builtin_memcpy(&f, &w, 4);
    f *= 0x1p112f;  // from the exponent bias of f16 to that of float32, which also normalises subnormal numbers
    __builtin_memcpy(&w, &f, 4);
    w |= ((h & 0x7c00) == 0x7c00 ? 0x7f800000 : 0) | (u32)(h & 0x8000) << 16;
    __builtin_memcpy(&f, &w, 4);
    return f;
}
static inline u16 f32_to_f16(float v) { _Float16 f = (_Float16)v; u16 h; __builtin_memcpy(&h, &f, 2); return h; }
static inline float bf16_to_f32_(u16 h) { u32 w = (u32)h << 16; float f; __builtin_memcpy(&f, &w, 4); return f; }
static inline u16 f32_to_bf16_(float v) {
    u32 w; __builtin_memcpy(&w, &v, 4);
    if ((w & 0x7fffffff) > 0x7f800000) return 0x7fff;
    return (u16)((w + 0x7fff + (w >> 16 & 1)) >> 16);
}
float e4m3(u8 v);
u8 to_e4m3(float v);
void copies_wait(u32 left);

// wgmma.cuh
void begin_product(float* sums, const u32* a, u32 b, u32 n, float (*to)(u16));
void end_group();
void finish_groups();
void expect_arrivals(u32 barrier, u32 count);
bool last_arrival(u32 barrier);
// wgmma_attention.cuh
void begin_shared_product(float* sums, u32 a, u32 b, u32 n, bool transposed);
void end_shared_group();
void finish_shared_group();
void forget_products();

}  // namespace emulated

FN u32 thread_index() { return emulated::state.thread; }
FN u32 block_index() { return emulated::state.block; }
FN u32 block_index_y() { return emulated::state.block_y; }
FN u32 grid_size() { return emulated::state.grid; }

FN u32 forget(u32 v) { return v; }

FN u32 shared_base() { return emulated::SHARED_BASE; }
FN u32x4 load_shared_4(u32 at) { return emulated::load<u32x4>(at); }
FN u32x2 load_shared_2(u32 at) { return emulated::load<u32x2>(at); }
FN u32 load_shared(u32 at) { return emulated::load<u32>(at); }
FN float load_shared_f32(u32 at) { return emulated::load<float>(at); }
FN void store_shared(u32 at, u32 v) { emulated::store(at, v); }
FN void store_shared_u16(u32 at, u16 v) { emulated::store(at, v); }
FN void store_shared_f32(u32 at, float v) { emulated::store(at, v); }
FN void store_shared_2(u32 at, u32x2 v) { emulated::store(at, v); }
FN void store_shared_4(u32 at, u32x4 v) { emulated::store(at, v); }
FN u32 add_shared(u32 at, u32 v) {
    u32 old = emulated::load<u32>(at);
    emulated::store(at, old + v);
    return old;
}

FN u32x4 load_global_4(const void* p) { return *emulated::aligned<u32x4>(p); }
FN u32x2 load_global_2(const void* p) { return *emulated::aligned<u32x2>(p); }
FN u32 load_global(const void* p) { return *emulated::aligned<u32>(p); }
FN u32 load_global_fresh(const void* p) { return load_global(p); }
FN u8 load_global_u8(const void* p) { return *(const u8*)p; }
FN float load_global_f32(const void* p) { return *emulated::aligned<float>(p); }
FN void store_global_4(void* p, u32x4 v) { *emulated::aligned<u32x4>(p) = v; }
FN void store_global_2(void* p, u32x2 v) { *emulated::aligned<u32x2>(p) = v; }
FN void store_global(void* p, u32 v) { *emulated::aligned<u32>(p) = v; }
FN void store_global_fresh(void* p, u32 v) { store_global(p, v); }
FN void store_global_u16(void* p, u16 v) { *emulated::aligned<u16>(p) = v; }
FN void store_global_u8(void* p, u8 v) { *(u8*)p = v; }
FN void store_global_f32(void* p, float v) { *emulated::aligned<float>(p) = v; }
FN u32 add_global(void* p, u32 v) {
    u32* word = emulated::aligned<u32>(p);
    u32 old = *word;
    *word += v;
    return old;
}

// Other ranks are other processes, which share this memory.
FN void load_system(const void* p, u32& v) { v = __atomic_load_n(emulated::aligned<u32>(p), __ATOMIC_RELAXED); }
FN void load_system(const void* p, u32x2& v) { load_system(p, v.x), load_system((const u32*)p + 1, v.y); }
FN void load_system(const void* p, u32x4& v) {
    load_system(p, v.x), load_system((const u32*)p + 1, v.y), load_system((const u32*)p + 2, v.z), load_system((const u32*)p + 3, v.w);
}
FN void store_system(void* p, u32 v) { __atomic_store_n(emulated::aligned<u32>(p), v, __ATOMIC_RELAXED); }
FN void store_system(void* p, u32x2 v) { store_system(p, v.x), store_system((u32*)p + 1, v.y); }
FN void store_system(void* p, u32x4 v) {
    store_system(p, v.x), store_system((u32*)p + 1, v.y), store_system((u32*)p + 2, v.z), store_system((u32*)p + 3, v.w);
}
FN u64 load_system_64(const void* p) { return __atomic_load_n(emulated::aligned<u64>(p), __ATOMIC_RELAXED); }
FN void store_system_64(void* p, u64 v) { __atomic_store_n(emulated::aligned<u64>(p), v, __ATOMIC_RELAXED); }
u64 nanoseconds();
void wait_a_little();  // yields to other threads, and sometimes sleeps so that other ranks run

void barrier_init(u32 barrier);
FN void barrier_init_done() {}
FN void writes_before_copies() {}
void barrier_expect(u32 barrier, u32 bytes);
void barrier_wait(u32 barrier, u32 parity);
void copy_bulk(u32 to, const void* from, u32 bytes, u32 barrier);
FN u64 read_once() { return 0; }
FN void copy_bulk(u32 to, const void* from, u32 bytes, u32 barrier, u64) { copy_bulk(to, from, bytes, barrier); }

void copy_async(u32 to, const void* from, bool real);
void copies_commit();
template <u32 LEFT>
FN void copies_wait() { emulated::copies_wait(LEFT); }

FN void show_all() {}
FN void let_next_grid_start() {}
FN void wait_for_previous_grid() {}

void sync_threads(u32 name, u32 threads);
FN void sync_block() { sync_threads(0, emulated::state.threads); }
void sync_warp();
u32 shuffle_xor(u32 v, u32 mask);
u32 shuffle(u32 v, u32 lane);
u32 warp_ballot(bool v);
u32 warp_max(u32 v);
FN u32 count_bits(u32 v) { return __builtin_popcount(v); }

void mma_bf16(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1);
void mma_f16(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1);
u32x4 load_tiles(u32 row);
u32x4 load_tiles_transposed(u32 row);
void store_tiles_transposed(u32 row, u32x4 v);
#pragma GCC visibility pop

FN float as_float(u32 v) { float f; __builtin_memcpy(&f, &v, 4); return f; }
FN u32 as_u32(float v) { u32 w; __builtin_memcpy(&w, &v, 4); return w; }
FN float shuffle_xor(float v, u32 mask) { return as_float(shuffle_xor(as_u32(v), mask)); }
FN u32 pack_bf16(float lo, float hi) { return emulated::f32_to_bf16_(lo) | (u32)emulated::f32_to_bf16_(hi) << 16; }
FN u32 pack_f16(float lo, float hi) { return emulated::f32_to_f16(lo) | (u32)emulated::f32_to_f16(hi) << 16; }
FN f32x2 unpack_f16(u32 v) { return {emulated::f16_to_f32((u16)v), emulated::f16_to_f32((u16)(v >> 16))}; }
FN u32 multiply_f16(u32 a, u32 b) { f32x2 x = unpack_f16(a), y = unpack_f16(b); return pack_f16(x.x * y.x, x.y * y.y); }
FN u32 multiply_bf16(u32 a, u32 b) { return pack_bf16(as_float(a << 16) * as_float(b << 16), as_float(a & 0xffff0000u) * as_float(b & 0xffff0000u)); }
template <u32 SECOND>
FN u32 widen_s8(u32 w) { u32 two = SECOND ? w >> 16 : w; return pack_bf16((float)(signed char)two, (float)(signed char)(two >> 8)); }
FN u32 widen_e4m3(u16 v) { return pack_f16(emulated::e4m3((u8)v), emulated::e4m3((u8)(v >> 8))); }
FN u16 pack_e4m3(float lo, float hi) { return emulated::to_e4m3(lo) | (u16)emulated::to_e4m3(hi) << 8; }
template <u32 MASK, u32 MAGIC>
FN u32 and_or(u32 w) { return (w & MASK) | MAGIC; }
FN float exp2_fast(float x) { return __builtin_exp2f(x); }
FN float log2_fast(float x) { return __builtin_log2f(x); }
FN float reciprocal_fast(float x) { return 1.f / x; }
FN float reciprocal_root(float x) { return 1.f / __builtin_sqrtf(x); }
FN float exp_exact(float x) { return __builtin_expf(x); }
FN float cos_exact(float x) { return __builtin_cosf(x); }
FN float sin_exact(float x) { return __builtin_sinf(x); }
FN float larger(float a, float b) { return __builtin_fmaxf(a, b); }
FN float rounded_product(float a, float b) { return a * b; }

// Makes `name` callable from Python: run_<name>(arguments, grid, grid_y, threads, shared, seed, message, room).
#define KERNEL(name, Arguments)                                                                                              \
    static void name##_body(const Arguments& a);                                                                             \
    extern "C" int run_##name(const void* arguments, u32 grid, u32 grid_y, u32 threads, u32 shared, u32 seed, char* message, u32 room) { \
        auto body = [](const void* p) { name##_body(*(const Arguments*)p); };                                                \
        const char* error = emulated::run(body, arguments, grid, grid_y, threads, shared, seed);                             \
        if (error) __builtin_snprintf(message, room, "%s", error);                                                           \
        return error != nullptr;                                                                                             \
    }                                                                                                                        \
    static void name##_body(const Arguments& a)
