// Repacks weights into panels of 32 outputs, as core/gemm.h reads them: once, at load, on all threads.
//
// A block of inputs is read from all rows of a panel before the next block, so that consecutive writes are to nearby
// addresses.
#include "core/kernels.h"
#include "core/pool.h"
#include "core/vec.h"

namespace {
constexpr int PANEL = 32, BLOCK = 32;  // rows of a panel; units that are read from a row before the next row

constexpr int MOST = 4096;  // tasks of a region, which has 16 bits for their number

template <class F> void each_panel(int panels, F&& f) {
    const int tasks = panels < MOST ? panels : MOST;
    parallel(tasks, [&](int i) {
        Range mine = share(panels, tasks, i);
        for (int panel = mine.begin; panel < mine.end; panel++) f(panel);
    });
}

template <class U> void side_by_side(const SideBySideCall& call) {
    const int panels = (call.N + PANEL - 1) / PANEL, units = call.units;
    each_panel(panels, [&](int panel) {
        U* out = (U*)call.panels + (int64_t)panel * units * PANEL;
        for (int first = 0; first < units; first += BLOCK) {
            const int last = first + BLOCK < units ? first + BLOCK : units;
            for (int o = 0; o < PANEL; o++) {
                const int row = panel * PANEL + o;
                const uint8_t* from = (const uint8_t*)call.rows + row * call.ld;
                for (int u = first; u < last; u++) out[u * PANEL + o] = row < call.N ? load<U>(from + u * sizeof(U)) : U(0);
            }
        }
    });
}
}  // namespace

extern "C" void redline_side_by_side(const SideBySideCall& call) {
    if (call.unit == 1) side_by_side<uint8_t>(call);
    else if (call.unit == 2) side_by_side<uint16_t>(call);
    else side_by_side<uint32_t>(call);
}

extern "C" void redline_pack_codes(const PackCodesCall& call) {
    constexpr uint16_t LOW = 0x0f0f, HIGH = 0xf0f0;  // the codes of two even inputs, and of the odd inputs above them
    const int quads = call.K / 4, half = PANEL / 2;
    each_panel(call.N / PANEL, [&](int panel) {
        uint8_t* out = call.codes + (int64_t)panel * quads * half * 4;
        for (int first = 0; first < quads; first += BLOCK) {
            const int last = first + BLOCK < quads ? first + BLOCK : quads;
            for (int o = 0; o < half; o++) {
                const uint8_t* upper = call.rows + (int64_t)(panel * PANEL + o) * call.ld;
                const uint8_t* lower = upper + half * call.ld;
                for (int c = first; c < last; c++) {
                    const uint16_t x = load<uint16_t>(upper + 2 * c), y = load<uint16_t>(lower + 2 * c);
                    const uint32_t even = (x & LOW) | (y & LOW) << 4, odd = (x >> 4 & LOW) | (y & HIGH);
                    store(out + 4 * (c * half + o), even | odd << 16);
                }
            }
        }
    });
}
