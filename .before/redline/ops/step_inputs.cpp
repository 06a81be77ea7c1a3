// The inputs of a step whose tokens all decode, gathered from the slots.
#include <cstdint>
#include <cstring>

// As step_inputs.py lays them out. tables [slots, table_width]; cos, sin [positions, pairs]; the rest [T] or [T, pairs].
struct StepMemory {
    const int32_t* tables;
    const float *cos, *sin;
    int64_t* ids;
    float *cos_T, *sin_T;
    int64_t* rows;
    int32_t *slots, *lengths;
    int64_t table_width;
    int pairs, page_tokens;
};

// tokens [slots, reach]; spans [S]: positions [start, start + count) of a slot.
extern "C" void redline_step_inputs(const int64_t* tokens, int64_t reach, const StepMemory* memory,
                                    const int32_t (*spans)[3], int S) {
    const StepMemory& m = *memory;
    int64_t t = 0;
    for (int s = 0; s < S; s++) {
        const int64_t slot = spans[s][0], start = spans[s][1], end = start + spans[s][2];
        for (int64_t position = start; position < end; position++, t++) {
            m.ids[t] = tokens[slot * reach + position];
            std::memcpy(m.cos_T + t * m.pairs, m.cos + position * m.pairs, m.pairs * sizeof(float));
            std::memcpy(m.sin_T + t * m.pairs, m.sin + position * m.pairs, m.pairs * sizeof(float));
            const int64_t page = m.tables[slot * m.table_width + position / m.page_tokens];
            m.rows[t] = page * m.page_tokens + position % m.page_tokens;
            m.slots[t] = (int32_t)slot;
            m.lengths[t] = (int32_t)(position + 1);
        }
    }
}
