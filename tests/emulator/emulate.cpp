// The part of the emulator (emulate.h) that all kernels share: fibers and their scheduling, warps, barriers, copies.
#include "core.cuh"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <csetjmp>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <cstdlib>
#include <fcntl.h>
#include <map>
#include <random>
#include <string>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>
#include <vector>

namespace emulated {

State state;

namespace {

constexpr size_t STACK = 256 << 10;

struct Barrier { u32 arrivals = 0, phase = 0; long bytes = 0; };
struct Copy { u32 to; const char* from; u32 bytes; u32 barrier; };
struct Rendezvous {  // of a warp's lanes, for warp-wide operations
    u32 arrived = 0, generation = 0;
    const char* what = nullptr;
    u32 in[32][8];
    u32 out[32][4];
};
struct Meeting { u32 arrived = 0, generation = 0; };

struct Fiber {
    bool begun = false, done = false;
    const u32* counter = nullptr;  // the fiber is blocked while the counter has the value `was`
    u32 was = 0;
    ucontext_t context;
    jmp_buf place;
    std::vector<std::vector<Copy>> groups;  // of the thread's own copies; the last group is open
};

struct Block {
    std::vector<char> shared;
    std::vector<Fiber> fibers;
    std::vector<Rendezvous> warps;
    std::map<u32, Meeting> meetings;
    std::map<u32, Barrier> barriers;
    std::vector<Copy> copies;
    std::mt19937 random;
    void (*body)(const void*);
    const void* arguments;
} block;
Fiber* self;  // null while no thread runs
jmp_buf home;
char error[300];

void enter() {  // a fiber runs the same thread index of one thread block after another
    for (;;) {
        block.body(block.arguments);
        self->done = state.progress = true;
        yield();
    }
}

void resume(u32 thread, char* stack) {
    self = &block.fibers[thread];
    state.thread = thread;
    if (_setjmp(home) == 0) {
        if (self->begun) _longjmp(self->place, 1);
        self->begun = true;
        getcontext(&self->context);
        self->context.uc_stack.ss_sp = stack;
        self->context.uc_stack.ss_size = STACK;
        self->context.uc_link = nullptr;
        makecontext(&self->context, enter, 0);
        setcontext(&self->context);
    }
}

Barrier& barrier_at(u32 barrier, const char* what) {
    auto found = block.barriers.find(barrier);
    if (found == block.barriers.end()) fail("%s a barrier that nobody made", what);
    return found->second;
}

void complete(Barrier& b) {
    if (b.arrivals >= 1 && b.bytes == 0) {
        b.arrivals = 0;
        b.phase++;
    }
}

void arrive(size_t index) {
    Copy c = block.copies[index];
    block.copies[index] = block.copies.back();
    block.copies.pop_back();
    memcpy(state.shared + (c.to - SHARED_BASE), c.from, c.bytes);
    Barrier& b = block.barriers.at(c.barrier);
    b.bytes -= c.bytes;
    complete(b);
    state.progress = true;
}

void begin_block(u32 threads, u32 shared) {
    block.shared.assign(shared, (char)0xff);
    block.warps.assign(threads / 32, {});
    block.meetings.clear(), block.barriers.clear(), block.copies.clear();
    for (Fiber& fiber : block.fibers) fiber.done = false, fiber.counter = nullptr, fiber.groups.assign(1, {});
    state.shared = block.shared.data(), state.shared_bytes = shared;
}

void run_block(u32 threads, u32 shared, char* stacks) {
    begin_block(threads, shared);
    std::vector<u32> order(threads / 32);
    for (u32 i = 0; i < order.size(); i++) order[i] = i;
    for (u32 left = threads; left;) {
        state.progress = false;
        std::shuffle(order.begin(), order.end(), block.random);
        for (u32 warp : order)
            for (u32 i = 32 * warp; i < 32 * warp + 32; i++) {
                const Fiber& fiber = block.fibers[i];
                if (fiber.done || (fiber.counter && *fiber.counter == fiber.was)) continue;
                resume(i, stacks + i * STACK);
                if (*error) return;
                left -= fiber.done;
            }
        self = nullptr;
        if (!block.copies.empty() && (!state.progress || draw() % 4 == 0)) arrive(draw() % block.copies.size());
        if (!state.progress) {
            u32 first = 0;
            while (block.fibers[first].done) first++;
            snprintf(error, sizeof error, "block %u: deadlock; the first thread that waits is %u", state.block + state.block_y * state.grid, first);
            return;
        }
    }
    if (!block.copies.empty()) snprintf(error, sizeof error, "block %u ended with copies in flight", state.block + state.block_y * state.grid);
}

// All lanes of a warp call this with their words; the last one computes the results of all.
template <class F>
u32x4 collective(const char* what, std::initializer_list<u32> words, F compute) {
    Rendezvous& w = block.warps[state.thread / 32];
    u32 lane = state.thread % 32;
    if (w.arrived && strcmp(w.what, what)) fail("a lane calls %s while others call %s", what, w.what);
    w.what = what;
    std::copy(words.begin(), words.end(), w.in[lane]);
    state.progress = true;
    if (++w.arrived == 32) {
        compute(w);
        w.arrived = 0;
        w.generation++;
    } else
        wait(w.generation);
    u32x4 out;
    memcpy(&out, w.out[lane], sizeof out);
    return out;
}

template <float (*TO)(u16)>
void mma(const char* what, float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    u32x4 out = collective(what, {a0, a1, a2, a3, b0, b1}, [](Rendezvous& w) {
        float A[16][16], B[16][8], C[16][8] = {};
        for (u32 l = 0; l < 32; l++) {
            u32 g = l >> 2, t = l & 3;
            for (u32 r = 0; r < 4; r++)
                for (u32 e = 0; e < 2; e++) A[g + 8 * (r & 1)][2 * t + 8 * (r >> 1) + e] = TO((u16)(w.in[l][r] >> 16 * e));
            for (u32 r = 0; r < 2; r++)
                for (u32 e = 0; e < 2; e++) B[2 * t + 8 * r + e][g] = TO((u16)(w.in[l][4 + r] >> 16 * e));
        }
        for (u32 i = 0; i < 16; i++)
            for (u32 k = 0; k < 16; k++)
                for (u32 j = 0; j < 8; j++) C[i][j] += A[i][k] * B[k][j];
        for (u32 l = 0; l < 32; l++) {
            u32 g = l >> 2, t = l & 3;
            float o[4] = {C[g][2 * t], C[g][2 * t + 1], C[g + 8][2 * t], C[g + 8][2 * t + 1]};
            memcpy(w.out[l], o, 16);
        }
    });
    c[0] += as_float(out.x), c[1] += as_float(out.y), c[2] += as_float(out.z), c[3] += as_float(out.w);
}

template <bool TRANSPOSED>
u32x4 tiles(const char* what, u32 row) {
    at(row, 16);
    return collective(what, {row}, [](Rendezvous& w) {
        for (u32 l = 0; l < 32; l++)
            for (u32 i = 0; i < 4; i++) {
                u32 g = l >> 2, t = l & 3, word = 0;
                for (u32 e = 0; e < 2; e++) {
                    u32 r = TRANSPOSED ? 2 * t + e : g, c = TRANSPOSED ? g : 2 * t + e;
                    word |= (u32)load<u16>(w.in[8 * i + r][0] + 2 * c) << 16 * e;
                }
                w.out[l][i] = word;
            }
    });
}

struct E4m3 {
    float values[256];
    E4m3() {
        for (u32 v = 0; v < 256; v++) {
            u32 e = v >> 3 & 15, m = v & 7;
            float f = e == 15 && m == 7 ? NAN : e ? ldexpf(1.f + m / 8.f, (int)e - 7) : ldexpf(m / 8.f, -6);
            values[v] = v & 128 ? -f : f;
        }
    }
} e4m3_of;

}  // namespace

void fail(const char* format, ...) {
    int where = snprintf(error, sizeof error, "block %u, thread %u: ", state.block, self ? state.thread : 0);
    va_list values;
    va_start(values, format);
    vsnprintf(error + where, sizeof error - where, format, values);
    va_end(values);
    _longjmp(home, 2);
}
void wrong_address(u32 address, u32 bytes) {
    if (address < SHARED_BASE || address - SHARED_BASE + bytes > state.shared_bytes)
        fail("shared memory at %ld, %u bytes, of %u", (long)address - SHARED_BASE, bytes, state.shared_bytes);
    fail("shared memory: %u is no multiple of %u", address, bytes);
}
void yield() {
    if (_setjmp(self->place) == 0) _longjmp(home, 1);
}
void wait(const u32& counter) {
    self->counter = &counter, self->was = counter;
    yield();
    self->counter = nullptr;
}
u32 draw() { return block.random(); }

const char* run(void (*body)(const void*), const void* arguments, u32 grid, u32 grid_y, u32 threads, u32 shared, u32 seed) {
    static char* stacks = (char*)mmap(nullptr, 1024 * STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    std::mt19937 random(seed);
    *error = 0;
    block.body = body, block.arguments = arguments;
    block.fibers.clear();
    block.fibers.resize(threads);
    state.grid = grid, state.threads = threads;
    forget_products();
    for (u32 n = 0; n < grid * grid_y && !*error; n++) {
        state.block = n % grid, state.block_y = n / grid;
        block.random.seed(random());
        run_block(threads, shared, stacks);
    }
    return *error ? error : nullptr;
}

float e4m3(u8 v) { return e4m3_of.values[v]; }
u8 to_e4m3(float v) {
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

void copies_wait(u32 left) {  // copies complete only here, which is as late as possible
    auto& groups = self->groups;
    while (groups.size() > left + 1) {
        for (auto& c : groups.front()) {
            char* to = at(c.to, 16);
            c.from ? (void)memcpy(to, c.from, 16) : (void)memset(to, 0, 16);
        }
        groups.erase(groups.begin());
    }
}

}  // namespace emulated

using namespace emulated;

// The emulated clock counts its calls, a millisecond each, so that a process which gets no CPU time does not time out.
// Ranks that are processes share a file with one count per rank, given by REDLINE_EMULATED_LOOKS as FILE:RANK:RANKS.
// The time is the smallest count, and no count exceeds it by more than one, so time passes only while every rank reads
// the clock. A rank that has ended sets its count to 2^62.
u64 nanoseconds() {
    static u32 rank = 0, ranks = 1;
    static std::atomic<u64> alone{0}, *looks = [] {
        const char* told = getenv("REDLINE_EMULATED_LOOKS");
        if (!told) return &alone;
        std::string file = told;
        auto last = file.rfind(':'), first = file.rfind(':', last - 1);
        ranks = atoi(file.c_str() + last + 1), rank = atoi(file.c_str() + first + 1);
        int opened = open(file.substr(0, first).c_str(), O_RDWR);
        void* counts = mmap(nullptr, 8 * ranks, PROT_READ | PROT_WRITE, MAP_SHARED, opened, 0);
        if (counts == MAP_FAILED) perror(told), abort();
        close(opened);
        return (std::atomic<u64>*)counts;
    }();
    auto least = [&] {
        u64 count = ~0ull;
        for (u32 i = 0; i < ranks; i++) count = std::min<u64>(count, looks[i]);
        return count;
    };
    if (looks[rank] == least()) looks[rank]++;
    return least() * 1000000;
}
void wait_a_little() {
    state.progress = true;  // the word will arrive, or the wait will time out
    if (draw() % 256 == 0) usleep(draw() % 200);
    yield();
}

void barrier_init(u32 barrier) { at(barrier, 8), block.barriers[barrier] = {}; }
void barrier_expect(u32 barrier, u32 bytes) {
    Barrier& b = barrier_at(barrier, "expects bytes at");
    if (b.arrivals) fail("a barrier expects twice in one phase");
    b.arrivals++, b.bytes += bytes;
    complete(b);
}
void barrier_wait(u32 barrier, u32 parity) {
    const Barrier& b = barrier_at(barrier, "waits for");
    while ((b.phase & 1) == (parity & 1)) wait(b.phase);
}
void copy_bulk(u32 to, const void* from, u32 bytes, u32 barrier) {
    if (to % 16 || bytes % 16 || (u64)from % 16 || !bytes) fail("a bulk copy is not of 16-byte pieces");
    at(to / 16 * 16, 16), at((to + bytes - 16) / 16 * 16, 16);
    memset(state.shared + (to - SHARED_BASE), 0xff, bytes);
    barrier_at(barrier, "copies to");
    block.copies.push_back({to, (const char*)from, bytes, barrier});
}
void copy_async(u32 to, const void* from, bool real) {
    memset(at(to, 16), 0xff, 16);
    if ((u64)from % 16) fail("a copy is not of 16-byte pieces");
    self->groups.back().push_back({to, real ? (const char*)from : nullptr, 16, 0});
}
void copies_commit() { self->groups.emplace_back(); }

void sync_threads(u32 name, u32 threads) {
    Meeting& m = block.meetings[name];
    state.progress = true;
    if (++m.arrived == threads) {
        m.arrived = 0;
        m.generation++;
    } else
        wait(m.generation);
}
void sync_warp() { collective("sync_warp", {}, [](Rendezvous&) {}); }
u32 shuffle_xor(u32 v, u32 mask) {
    return collective("shuffle_xor", {v, mask}, [](Rendezvous& w) { for (u32 l = 0; l < 32; l++) w.out[l][0] = w.in[(l ^ w.in[l][1]) & 31][0]; }).x;
}
u32 shuffle(u32 v, u32 lane) {
    return collective("shuffle", {v, lane}, [](Rendezvous& w) { for (u32 l = 0; l < 32; l++) w.out[l][0] = w.in[w.in[l][1] & 31][0]; }).x;
}
u32 warp_ballot(bool v) {
    return collective("ballot", {v}, [](Rendezvous& w) {
        u32 bits = 0;
        for (u32 l = 0; l < 32; l++) bits |= w.in[l][0] << l;
        for (u32 l = 0; l < 32; l++) w.out[l][0] = bits;
    }).x;
}
u32 warp_max(u32 v) {
    return collective("warp_max", {v}, [](Rendezvous& w) {
        u32 most = 0;
        for (u32 l = 0; l < 32; l++) most = std::max(most, w.in[l][0]);
        for (u32 l = 0; l < 32; l++) w.out[l][0] = most;
    }).x;
}

void mma_bf16(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) { mma<bf16_to_f32_>("mma_bf16", c, a0, a1, a2, a3, b0, b1); }
void mma_f16(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) { mma<f16_to_f32>("mma_f16", c, a0, a1, a2, a3, b0, b1); }
u32x4 load_tiles(u32 row) { return tiles<false>("load_tiles", row); }
u32x4 load_tiles_transposed(u32 row) { return tiles<true>("load_tiles_transposed", row); }
void store_tiles_transposed(u32 row, u32x4 v) {
    at(row, 16);
    collective("store_tiles_transposed", {row, v.x, v.y, v.z, v.w}, [](Rendezvous& w) {
        for (u32 l = 0; l < 32; l++)
            for (u32 i = 0; i < 4; i++)
                for (u32 e = 0; e < 2; e++)
                    store<u16>(w.in[8 * i + 2 * (l % 4) + e][0] + 2 * (l / 4), (u16)(w.in[l][1 + i] >> 16 * e));
    });
}
