// The part of the emulator (emulate.h) for warpgroup MMAs: first wgmma.cuh, then wgmma_attention.cuh.
#include "core.cuh"

#include <map>
#include <stddef.h>
#include <vector>

namespace emulated {
namespace {

struct Product { float* sums; const u32* a; u32 b; u32 n; float (*to)(u16); };
struct Warpgroup {
    u32 arrived = 0, generation = 0;
    std::vector<std::vector<Product>> groups[128];  // of each thread, in order; the last group is open
};
struct Arrivals { u32 needed, arrived; };
std::map<u32, Warpgroup> warpgroups;
std::map<u32, Arrivals> arrivals;

std::vector<std::vector<Product>>& products() {
    auto& groups = warpgroups[state.thread / 128].groups[state.thread % 128];
    if (groups.empty()) groups.emplace_back();
    return groups;
}
u16 swizzled(u32 address) { return load<u16>(address ^ (address >> 7 & 7) << 4); }
// sums += a[64 x 16] b[N x 16], for the elements that the thread holds.
void add_product(float* sums, u32 thread, const float* a, const float* b, u32 n) {
    u32 row = thread / 32 * 16 + thread % 32 / 4, t = thread % 4;
    for (u32 j = 0; j < n / 8; j++)
        for (u32 e = 0; e < 4; e++) {
            const float *x = &a[16 * (row + e / 2 * 8)], *y = &b[16 * (8 * j + 2 * t + e % 2)];
            float sum = 0;
            for (u32 k = 0; k < 16; k++) sum += x[k] * y[k];
            sums[4 * j + e] += sum;
        }
}
void multiply(const Product* const (&p)[128]) {
    float a[64 * 16];
    std::vector<float> b(16 * p[0]->n);
    for (u32 i = 0; i < 128; i++) {
        u32 w = i / 32, g = i % 32 / 4, t = i % 4;
        if (p[i]->b != p[0]->b || p[i]->n != p[0]->n) fail("a warpgroup's threads multiply different things");
        for (u32 r = 0; r < 4; r++)
            for (u32 e = 0; e < 2; e++) {
                u16 v = (u16)(p[i]->a[r] >> 16 * e);
                a[16 * (16 * w + g + 8 * (r & 1)) + 2 * t + 8 * (r >> 1) + e] = p[0]->to(v);
            }
    }
    for (u32 n = 0; n < p[0]->n; n++)
        for (u32 k = 0; k < 16; k++) b[16 * n + k] = p[0]->to(swizzled(p[0]->b + n * 128 + 2 * k));
    for (u32 i = 0; i < 128; i++) add_product(p[i]->sums, i, a, b.data(), p[0]->n);
}
void finish_group(Warpgroup& w) {
    size_t count = w.groups[0].front().size();
    for (size_t n = 0; n < count; n++) {
        const Product* products[128];
        for (u32 i = 0; i < 128; i++) {
            if (w.groups[i].empty() || w.groups[i].front().size() != count) fail("a warpgroup's threads disagree on a group");
            products[i] = &w.groups[i].front()[n];
        }
        multiply(products);
    }
    for (auto& groups : w.groups) groups.erase(groups.begin());
}

struct SharedProduct {
    float* sums;
    u32 a, b, n;
    bool transposed;
    std::vector<u16> operands;  // values at the start of the MMA, kept for the warpgroup's first thread
};
struct SharedProducts {
    u32 arrived = 0, generation = 0;
    std::vector<SharedProduct> pending[128];  // of each thread, in order
    u32 committed[128] = {};
};
std::map<u32, SharedProducts> shared_products;

SharedProducts& own_products() { return shared_products[state.thread / 128]; }
// a [64 x 16], then b [N x 16]
std::vector<u16> operands_of(const SharedProduct& p) {
    std::vector<u16> values;
    for (u32 m = 0; m < 64; m++)
        for (u32 k = 0; k < 16; k++) values.push_back(swizzled(p.transposed ? p.a + 128 * k + 2 * m : p.a + 128 * m + 2 * k));
    for (u32 n = 0; n < p.n; n++)
        for (u32 k = 0; k < 16; k++) values.push_back(swizzled(p.b + 128 * n + 2 * k));
    return values;
}
void finish_product(SharedProducts& w, size_t number) {
    const SharedProduct& first = w.pending[0][number];
    std::vector<u16> now = operands_of(first);
    if (now != first.operands) fail("an operand was written while a product read it");
    std::vector<float> v;
    for (u16 x : now) v.push_back(bf16_to_f32_(x));
    for (u32 i = 0; i < 128; i++) {
        const SharedProduct& p = w.pending[i][number];
        if (p.a != first.a || p.b != first.b || p.n != first.n || p.transposed != first.transposed)
            fail("a warpgroup's threads multiply different things");
        add_product(p.sums, i, v.data(), v.data() + 16 * 64, p.n);
    }
}

}  // namespace

void forget_products() { warpgroups.clear(), arrivals.clear(), shared_products.clear(); }

void begin_product(float* sums, const u32* a, u32 b, u32 n, float (*to)(u16)) {
    products().back().push_back({sums, a, b, n, to});
}
void end_group() { products().emplace_back(); }
void finish_groups() {
    auto& mine = products();
    auto& w = warpgroups[state.thread / 128];
    state.progress = true;
    if (!mine.back().empty()) fail("waits for products that are not committed");
    if (++w.arrived == 128) {
        for (u32 turns = draw() % 8; turns; turns--) {  // other threads run for a while
            state.progress = true;
            yield();
        }
        while (w.groups[0].size() > 1) finish_group(w);
        w.arrived = 0, w.generation++;
    } else
        wait(w.generation);
}
void expect_arrivals(u32 barrier, u32 count) { arrivals[barrier] = {count, 0}; }
bool last_arrival(u32 barrier) {
    auto found = arrivals.find(barrier);
    if (found == arrivals.end()) fail("arrives at a barrier that nobody made");
    Arrivals& a = found->second;
    if (++a.arrived < a.needed) return false;
    a.arrived = 0;
    return true;
}

void begin_shared_product(float* sums, u32 a, u32 b, u32 n, bool transposed) {
    u32 thread = state.thread % 128;
    SharedProduct p{sums, a, b, n, transposed, {}};
    if (thread == 0) p.operands = operands_of(p);
    own_products().pending[thread].push_back(p);
}
void end_shared_group() { own_products().committed[state.thread % 128] = 1; }
void finish_shared_group() {
    auto& w = own_products();
    u32 thread = state.thread % 128;
    if (!w.committed[thread]) fail("waits for products that are not committed");
    w.committed[thread] = 0;
    state.progress = true;
    if (++w.arrived == 128) {
        for (auto& pending : w.pending)
            if (pending.size() != w.pending[0].size()) fail("a warpgroup's threads disagree on a group");
        for (size_t i = 0; i < w.pending[0].size(); i++) finish_product(w, i);
        for (auto& pending : w.pending) pending.clear();
        w.arrived = 0, w.generation++;
    } else
        wait(w.generation);
}

}  // namespace emulated
