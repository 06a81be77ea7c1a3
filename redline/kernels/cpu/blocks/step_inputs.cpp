// Gathers the inputs of a step of decode tokens from the slots.
#include <cstring>

#include "blocks/blocks.h"
#include "core/watch.h"

extern "C" void redline_step_inputs(const StepInputsCall& call) {
    OpSpan span("step_inputs");
    const StepMemory& m = *call.memory;
    int64_t t = 0;
    for (int s = 0; s < call.S; s++) {
        const int32_t* span = call.spans + 3 * s;
        const int64_t slot = span[0], start = span[1], end = start + span[2];
        for (int64_t position = start; position < end; position++, t++) {
            m.ids[t] = call.tokens[slot * call.reach + position];
            std::memcpy(m.cos_T + t * m.pairs, m.cos + position * m.pairs, m.pairs * sizeof(float));
            std::memcpy(m.sin_T + t * m.pairs, m.sin + position * m.pairs, m.pairs * sizeof(float));
            const int64_t page = m.tables[slot * m.table_width + position / m.page_tokens];
            m.rows[t] = page * m.page_tokens + position % m.page_tokens;
            m.slots[t] = (int32_t)slot;
            m.lengths[t] = (int32_t)(position + 1);
        }
    }
}
