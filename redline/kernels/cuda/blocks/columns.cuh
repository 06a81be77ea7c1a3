// Shared by the formats that multiply one token after another: sums over the lanes that have the same row.
#pragma once
#include "core.cuh"

// The sum over lanes 4g to 4g + 3: of `even` in the lanes with even t, of `odd` in the other lanes.
FN float fold(float even, float odd) {
    bool second = forget(lane_index()) & 1;
    float mine = second ? odd : even;
    mine += shuffle_xor(second ? even : odd, 1);
    return mine + shuffle_xor(mine, 2);
}
