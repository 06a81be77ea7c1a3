// The checksum of bytes that redline/ops/checksum.py defines. It runs on the calling thread, which may be any thread.
#include "core/kernels.h"
#include "core/vec.h"

namespace {
typedef uint64_t u64x8 __attribute__((vector_size(64)));
constexpr uint64_t GAMMA = 0x9E3779B97F4A7C15, FIRST = 0xBF58476D1CE4E5B9, SECOND = 0x94D049BB133111EB;
constexpr int ROWS = 4;  // independent vectors: they hide the latency of multiplications

template <class W> inline W mix(W w) {
    w = (w ^ w >> 30) * FIRST;
    w = (w ^ w >> 27) * SECOND;
    return w ^ w >> 31;
}
}  // namespace

extern "C" void redline_checksum(const ChecksumCall& call) {
    const uint8_t* data = call.data;
    const int64_t count = call.count, words = count / 8;
    uint64_t key = mix(call.seed), sum = mix((uint64_t)count ^ key);
    u64x8 sums[ROWS] = {}, keys[ROWS];
    for (int r = 0; r < ROWS; r++)
        for (int l = 0; l < 8; l++) keys[r][l] = key + (uint64_t)(1 + 8 * r + l) * GAMMA;
    int64_t i = 0;
    for (; i + 8 * ROWS <= words; i += 8 * ROWS) {
        for (int r = 0; r < ROWS; r++) {
            sums[r] += mix(load<u64x8>(data + 8 * (i + 8 * r)) ^ keys[r]);
            keys[r] += 8 * ROWS * GAMMA;
        }
    }
    for (int r = 0; r < ROWS; r++)
        for (int l = 0; l < 8; l++) sum += sums[r][l];
    for (; i < words; i++) sum += mix(load<uint64_t>(data + 8 * i) ^ (key + (uint64_t)(1 + i) * GAMMA));
    if (count % 8) {
        uint64_t rest = 0;
        memcpy(&rest, data + 8 * words, count % 8);
        sum += mix(rest ^ (key + (uint64_t)(1 + words) * GAMMA));
    }
    *call.sum = sum;
}
