// A CUDA block on a CPU, for tests: each thread is a fiber, and what core.cuh does with the chip's instructions is done
// here by hand. Bulk copies arrive late and in any order, over bytes poisoned with NaNs, and warps take turns in an
// order drawn from a seed, so that a missing wait shows. Blocks run one after another.
//
// A wrong address, an odd lane or a deadlock ends the run with a message.
#pragma once

#include <algorithm>
#include <cmath>
#include <csetjmp>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <random>
#include <string>
#include <sys/mman.h>
#include <ucontext.h>
#include <vector>

#define FN static inline
#define __device__
#define __forceinline__ inline
#define __restrict__ __restrict

namespace emulated {

constexpr size_t STACK = 256 << 10;
constexpr u32 SHARED_BASE = 1024;  // an address of 0 is a mistake

struct Barrier { u32 arrivals = 0, phase = 0; long bytes = 0; };
struct Copy { u32 to; const char* from; u32 bytes; u32 barrier; };
struct Rendezvous {  // of a warp's lanes
    u32 arrived = 0, generation = 0;
    const char* what = nullptr;
    u32 in[32][8];
    u32 out[32][4];
};
struct Meeting { u32 arrived = 0, generation = 0; };

struct Fiber {
    u32 index;
    bool done = false, begun = false;
    ucontext_t context;
    jmp_buf place;
    char* stack;
    std::vector<std::vector<Copy>> groups = std::vector<std::vector<Copy>>(1);  // of its own copies: the last is open
};

struct Block {
    u32 index, index_y, grid, threads;
    std::vector<char> shared;
    std::vector<Fiber> fibers;
    std::vector<Rendezvous> warps;
    std::map<u32, Meeting> meetings;
    std::map<u32, Barrier> barriers;
    std::vector<Copy> copies;
    Fiber* self = nullptr;
    bool progress = false;
    jmp_buf home;
    std::mt19937 random;
    std::string error;
    void (*body)(const void*);
    const void* arguments;
};

static thread_local Block* block;

[[noreturn]] static inline void fail(const std::string& message) {
    char where[96];
    snprintf(where, sizeof where, "block %u, thread %u: ", block->index, block->self ? block->self->index : 0);
    block->error = where + message;
    _longjmp(block->home, 2);
}
static inline void yield() {
    if (_setjmp(block->self->place) == 0) _longjmp(block->home, 1);
}
static inline char* at(u32 address, u32 bytes) {
    if (address < SHARED_BASE || address - SHARED_BASE + bytes > block->shared.size())
        fail("shared memory at " + std::to_string((long)address - SHARED_BASE) + ", " + std::to_string(bytes) + " bytes, of " +
             std::to_string(block->shared.size()));
    if (address % bytes) fail("shared memory: " + std::to_string(address) + " is no multiple of " + std::to_string(bytes));
    return block->shared.data() + (address - SHARED_BASE);
}
template <class T>
static inline T load(u32 address) {
    T v;
    memcpy(&v, at(address, sizeof v), sizeof v);
    return v;
}
template <class T>
static inline void store(u32 address, T v) {
    memcpy(at(address, sizeof v), &v, sizeof v);
}
template <class T>
static inline const T* aligned(const void* p) {
    if ((uintptr_t)p % sizeof(T)) fail("global memory: an address is no multiple of " + std::to_string(sizeof(T)));
    return (const T*)p;
}
template <class F>
static inline void collective(const char* what, const void* in, u32 words, u32* out, F compute) {
    Rendezvous& w = block->warps[block->self->index / 32];
    u32 lane = block->self->index % 32, generation = w.generation;
    if (w.arrived && strcmp(w.what, what)) fail(std::string("a lane calls ") + what + " while others call " + w.what);
    w.what = what;
    memcpy(w.in[lane], in, 4 * words);
    block->progress = true;
    if (++w.arrived == 32) {
        compute(w);
        w.arrived = 0;
        w.generation++;
    } else
        while (w.generation == generation) yield();
    if (out) memcpy(out, w.out[lane], 16);
}
static inline void meet(u32 name, u32 threads) {
    Meeting& m = block->meetings[name];
    u32 generation = m.generation;
    block->progress = true;
    if (++m.arrived == threads) {
        m.arrived = 0;
        m.generation++;
    } else
        while (m.generation == generation) yield();
}
static inline void complete(Barrier& b) {
    if (b.arrivals >= 1 && b.bytes == 0) {
        b.arrivals = 0;
        b.phase++;
    }
}
static inline void arrive(size_t index) {
    Copy c = block->copies[index];
    block->copies[index] = block->copies.back();
    block->copies.pop_back();
    memcpy(block->shared.data() + (c.to - SHARED_BASE), c.from, c.bytes);
    Barrier& b = block->barriers.at(c.barrier);
    b.bytes -= c.bytes;
    complete(b);
    block->progress = true;
}
static void enter() {
    block->body(block->arguments);
    block->self->done = true;
    block->progress = true;
    _longjmp(block->home, 1);
}
static void resume(Fiber& fiber) {
    block->self = &fiber;
    if (_setjmp(block->home) == 0) {
        if (fiber.begun) _longjmp(fiber.place, 1);
        fiber.begun = true;
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = fiber.stack;
        fiber.context.uc_stack.ss_size = STACK;
        fiber.context.uc_link = nullptr;
        makecontext(&fiber.context, enter, 0);
        setcontext(&fiber.context);
    }
}
// Runs a whole grid. Empty, or what went wrong.
static std::string run(void (*body)(const void*), const void* arguments, u32 grid, u32 grid_y, u32 threads, u32 shared, u32 seed) {
    static char* stacks = (char*)mmap(nullptr, 1024 * STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    std::mt19937 random(seed);
    for (u32 n = 0; n < grid * grid_y; n++) {
        Block b;
        block = &b;
        b.index = n % grid, b.index_y = n / grid, b.grid = grid, b.threads = threads;
        b.shared.assign(shared, (char)0xff);
        b.random.seed(random());
        b.body = body, b.arguments = arguments;
        b.warps.resize(threads / 32);
        b.fibers.resize(threads);
        for (u32 i = 0; i < threads; i++) b.fibers[i].index = i, b.fibers[i].stack = stacks + i * STACK;
        std::vector<u32> order(threads / 32);
        for (u32 i = 0; i < order.size(); i++) order[i] = i;
        for (u32 left = threads; left;) {
            b.progress = false;
            std::shuffle(order.begin(), order.end(), b.random);
            for (u32 warp : order)
                for (u32 i = 32 * warp; i < 32 * warp + 32; i++) {
                    if (b.fibers[i].done) continue;
                    resume(b.fibers[i]);
                    if (!b.error.empty()) return b.error;
                    left -= b.fibers[i].done;
                }
            if (!b.copies.empty() && (!b.progress || b.random() % 4 == 0)) arrive(b.random() % b.copies.size());
            if (!b.progress) {
                b.self = nullptr;
                for (auto& fiber : b.fibers)
                    if (!fiber.done && !b.self) b.self = &fiber;
                u32 waiting = b.self ? b.self->index : 0;
                return "block " + std::to_string(n) + ": deadlock; the first thread that waits is " + std::to_string(waiting);
            }
        }
        if (!b.copies.empty()) return "block " + std::to_string(n) + " ended with copies in flight";
    }
    return "";
}

static inline float f16_to_f32(u16 h) { _Float16 f; memcpy(&f, &h, 2); return (float)f; }
static inline u16 f32_to_f16(float v) { _Float16 f = (_Float16)v; u16 h; memcpy(&h, &f, 2); return h; }
static inline float bf16_to_f32_(u16 h) { u32 w = (u32)h << 16; float f; memcpy(&f, &w, 4); return f; }
static inline u16 f32_to_bf16_(float v) {
    u32 w; memcpy(&w, &v, 4);
    if ((w & 0x7fffffff) > 0x7f800000) return 0x7fff;
    return (u16)((w + 0x7fff + (w >> 16 & 1)) >> 16);
}
static inline float e4m3(u8 v) {
    u32 e = v >> 3 & 15, m = v & 7;
    float f = e == 15 && m == 7 ? NAN : e ? ldexpf(1.f + m / 8.f, (int)e - 7) : ldexpf(m / 8.f, -6);
    return v & 128 ? -f : f;
}
static inline u8 to_e4m3(float v) {
    if (v != v) return 0x7f;
    float a = fminf(fabsf(v), 448.f);
    u8 best = 0;
    float distance = INFINITY;
    for (u32 c = 0; c < 0x7f; c++) {
        float d = fabsf(e4m3((u8)c) - a);
        if (d < distance || (d == distance && !(c & 1))) distance = d, best = (u8)c;
    }
    return best | (std::signbit(v) ? 128 : 0);
}
template <float (*TO)(u16)>
static inline void mma(const char* what, float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    u32 in[6] = {a0, a1, a2, a3, b0, b1}, out[4];
    collective(what, in, 6, out, [](Rendezvous& w) {
        float A[16][16], B[16][8];
        for (u32 l = 0; l < 32; l++) {
            u32 g = l >> 2, t = l & 3;
            for (u32 r = 0; r < 4; r++)
                for (u32 e = 0; e < 2; e++) A[g + 8 * (r & 1)][2 * t + 8 * (r >> 1) + e] = TO((u16)(w.in[l][r] >> 16 * e));
            for (u32 r = 0; r < 2; r++)
                for (u32 e = 0; e < 2; e++) B[2 * t + 8 * r + e][g] = TO((u16)(w.in[l][4 + r] >> 16 * e));
        }
        float C[16][8];
        for (u32 i = 0; i < 16; i++)
            for (u32 j = 0; j < 8; j++) {
                float s = 0;
                for (u32 k = 0; k < 16; k++) s += A[i][k] * B[k][j];
                C[i][j] = s;
            }
        for (u32 l = 0; l < 32; l++) {
            u32 g = l >> 2, t = l & 3;
            float o[4] = {C[g][2 * t], C[g][2 * t + 1], C[g + 8][2 * t], C[g + 8][2 * t + 1]};
            memcpy(w.out[l], o, 16);
        }
    });
    for (u32 i = 0; i < 4; i++) {
        float f;
        memcpy(&f, &out[i], 4);
        c[i] += f;
    }
}

}  // namespace emulated


// Makes `name` callable from Python: run_<name>(arguments, grid, grid_y, threads, shared, seed, message, room).
#define KERNEL(name, Arguments)                                                                                              \
    static void name##_body(const Arguments& a);                                                                             \
    extern "C" int run_##name(const void* arguments, u32 grid, u32 grid_y, u32 threads, u32 shared, u32 seed, char* message, u32 room) { \
        auto body = [](const void* p) { name##_body(*(const Arguments*)p); };                                                \
        std::string error = emulated::run(body, arguments, grid, grid_y, threads, shared, seed);                              \
        snprintf(message, room, "%s", error.c_str());                                                                        \
        return !error.empty();                                                                                               \
    }                                                                                                                        \
    static void name##_body(const Arguments& a)

FN u32 thread_index() { return emulated::block->self->index; }
FN u32 block_index() { return emulated::block->index; }
FN u32 block_index_y() { return emulated::block->index_y; }
FN u32 grid_size() { return emulated::block->grid; }

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
FN void store_global_4(void* p, u32x4 v) { *(u32x4*)emulated::aligned<u32x4>(p) = v; }
FN void store_global_2(void* p, u32x2 v) { *(u32x2*)emulated::aligned<u32x2>(p) = v; }
FN void store_global(void* p, u32 v) { *(u32*)emulated::aligned<u32>(p) = v; }
FN void store_global_u16(void* p, u16 v) { *(u16*)emulated::aligned<u16>(p) = v; }
FN void store_global_u8(void* p, u8 v) { *(u8*)p = v; }
FN void store_global_f32(void* p, float v) { *(float*)emulated::aligned<float>(p) = v; }
FN u32 add_global(void* p, u32 v) {
    u32* word = (u32*)emulated::aligned<u32>(p);
    u32 old = *word;
    *word += v;
    return old;
}

FN void barrier_init(u32 barrier) { emulated::at(barrier, 8), emulated::block->barriers[barrier] = {}; }
FN void barrier_init_done() {}
FN void barrier_expect(u32 barrier, u32 bytes) {
    if (!emulated::block->barriers.count(barrier)) emulated::fail("a barrier that nobody made");
    auto& b = emulated::block->barriers[barrier];
    if (b.arrivals) emulated::fail("a barrier expects twice in one phase");
    b.arrivals++, b.bytes += bytes;
    emulated::complete(b);
}
FN void barrier_wait(u32 barrier, u32 parity) {
    if (!emulated::block->barriers.count(barrier)) emulated::fail("waits for a barrier that nobody made");
    while ((emulated::block->barriers[barrier].phase & 1) == (parity & 1)) emulated::yield();
}
FN void copy_bulk(u32 to, const void* from, u32 bytes, u32 barrier) {
    if (to % 16 || bytes % 16 || (uintptr_t)from % 16 || !bytes) emulated::fail("a bulk copy is not of 16-byte pieces");
    emulated::at(to / 16 * 16, 16), emulated::at((to + bytes - 16) / 16 * 16, 16);
    memset(emulated::block->shared.data() + (to - emulated::SHARED_BASE), 0xff, bytes);
    emulated::block->copies.push_back({to, (const char*)from, bytes, barrier});
    emulated::block->barriers.at(barrier);
}
FN u64 read_once() { return 0; }
FN void copy_bulk(u32 to, const void* from, u32 bytes, u32 barrier, u64) { copy_bulk(to, from, bytes, barrier); }

FN void copy_async(u32 to, const void* from, bool real) {
    memset(emulated::at(to, 16), 0xff, 16);
    if ((uintptr_t)from % 16) emulated::fail("a copy is not of 16-byte pieces");
    emulated::block->self->groups.back().push_back({to, real ? (const char*)from : nullptr, 16, 0});
}
FN void copies_commit() { emulated::block->self->groups.emplace_back(); }
template <u32 LEFT>
FN void copies_wait() {  // they arrive as late as they may
    auto& groups = emulated::block->self->groups;
    while (groups.size() > LEFT + 1) {
        for (auto& c : groups.front()) {
            char* to = emulated::at(c.to, 16);
            c.from ? (void)memcpy(to, c.from, 16) : (void)memset(to, 0, 16);
        }
        groups.erase(groups.begin());
    }
}

FN void show_all() {}
FN void let_next_grid_start() {}
FN void wait_for_previous_grid() {}

FN void sync_block() { emulated::meet(0, emulated::block->threads); }
FN void sync_threads(u32 name, u32 threads) { emulated::meet(name, threads); }
FN void sync_warp() { u32 none = 0; emulated::collective("sync_warp", &none, 1, nullptr, [](emulated::Rendezvous&) {}); }
FN u32 shuffle_xor(u32 v, u32 mask) {
    u32 in[2] = {v, mask}, out[4];
    emulated::collective("shuffle_xor", in, 2, out, [](emulated::Rendezvous& w) { for (u32 l = 0; l < 32; l++) w.out[l][0] = w.in[(l ^ w.in[l][1]) & 31][0]; });
    return out[0];
}
FN u32 shuffle(u32 v, u32 lane) {
    u32 in[2] = {v, lane}, out[4];
    emulated::collective("shuffle", in, 2, out, [](emulated::Rendezvous& w) { for (u32 l = 0; l < 32; l++) w.out[l][0] = w.in[w.in[l][1] & 31][0]; });
    return out[0];
}
FN u32 warp_ballot(bool v) {
    u32 in = v, out[4];
    emulated::collective("ballot", &in, 1, out, [](emulated::Rendezvous& w) {
        u32 bits = 0;
        for (u32 l = 0; l < 32; l++) bits |= w.in[l][0] << l;
        for (u32 l = 0; l < 32; l++) w.out[l][0] = bits;
    });
    return out[0];
}
FN u32 warp_max(u32 v) {
    u32 out[4];
    emulated::collective("warp_max", &v, 1, out, [](emulated::Rendezvous& w) {
        u32 most = 0;
        for (u32 l = 0; l < 32; l++) most = std::max(most, w.in[l][0]);
        for (u32 l = 0; l < 32; l++) w.out[l][0] = most;
    });
    return out[0];
}
FN u32 count_bits(u32 v) { return __builtin_popcount(v); }

FN void mma_bf16(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) { emulated::mma<emulated::bf16_to_f32_>("mma_bf16", c, a0, a1, a2, a3, b0, b1); }
FN void mma_f16(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) { emulated::mma<emulated::f16_to_f32>("mma_f16", c, a0, a1, a2, a3, b0, b1); }
namespace emulated {
template <bool TRANSPOSED>
static inline u32x4 tiles(const char* what, u32 row) {
    u32 out[4];
    at(row, 16);
    collective(what, &row, 1, out, [](Rendezvous& w) {
        for (u32 l = 0; l < 32; l++)
            for (u32 i = 0; i < 4; i++) {
                u32 g = l >> 2, t = l & 3, word = 0;
                for (u32 e = 0; e < 2; e++) {
                    u32 r = TRANSPOSED ? 2 * t + e : g, c = TRANSPOSED ? g : 2 * t + e;
                    u16 v;
                    memcpy(&v, block->shared.data() + (w.in[8 * i + r][0] - SHARED_BASE) + 2 * c, 2);
                    word |= (u32)v << 16 * e;
                }
                w.out[l][i] = word;
            }
    });
    return {out[0], out[1], out[2], out[3]};
}
}  // namespace emulated
FN u32x4 load_tiles(u32 row) { return emulated::tiles<false>("load_tiles", row); }
FN u32x4 load_tiles_transposed(u32 row) { return emulated::tiles<true>("load_tiles_transposed", row); }

FN float as_float(u32 v) { float f; memcpy(&f, &v, 4); return f; }
FN u32 as_u32(float v) { u32 w; memcpy(&w, &v, 4); return w; }
FN float shuffle_xor(float v, u32 mask) { return as_float(shuffle_xor(as_u32(v), mask)); }
FN u32 pack_bf16(float lo, float hi) { return emulated::f32_to_bf16_(lo) | (u32)emulated::f32_to_bf16_(hi) << 16; }
FN u32 pack_f16(float lo, float hi) { return emulated::f32_to_f16(lo) | (u32)emulated::f32_to_f16(hi) << 16; }
FN f32x2 unpack_f16(u32 v) { return {emulated::f16_to_f32((u16)v), emulated::f16_to_f32((u16)(v >> 16))}; }
FN u32 multiply_f16(u32 a, u32 b) { f32x2 x = unpack_f16(a), y = unpack_f16(b); return pack_f16(x.x * y.x, x.y * y.y); }
FN u32 multiply_bf16(u32 a, u32 b) { return pack_bf16(as_float(a << 16) * as_float(b << 16), as_float(a & 0xffff0000u) * as_float(b & 0xffff0000u)); }
FN u32 widen_e4m3(u16 v) { return pack_f16(emulated::e4m3((u8)v), emulated::e4m3((u8)(v >> 8))); }
FN u16 pack_e4m3(float lo, float hi) { return emulated::to_e4m3(lo) | (u16)emulated::to_e4m3(hi) << 8; }
template <u32 MASK, u32 MAGIC>
FN u32 and_or(u32 w) { return (w & MASK) | MAGIC; }
FN float exp2_fast(float x) { return exp2f(x); }
FN float log2_fast(float x) { return log2f(x); }
FN float reciprocal_fast(float x) { return 1.f / x; }
FN float reciprocal_root(float x) { return 1.f / sqrtf(x); }
FN float exp_exact(float x) { return expf(x); }
FN float cos_exact(float x) { return cosf(x); }
FN float sin_exact(float x) { return sinf(x); }
FN float larger(float a, float b) { return fmaxf(a, b); }
