// y = x / rms(x) * w over one row, in float32. y may be x.
#pragma once
#include <cmath>

#include "vec.h"

inline void rms_norm_row(const float* x, const float* w, float eps, int n, float* y) {
    f32x16 squares = {};
    int i = 0;
    for (; i + 16 <= n; i += 16) {
        f32x16 v = load<f32x16>(x + i);
        squares += v * v;
    }
    float total = sum(squares);
    for (; i < n; i++) total += x[i] * x[i];
    float r = 1.0f / std::sqrt(total / (float)n + eps);
    for (i = 0; i + 16 <= n; i += 16) store(y + i, load<f32x16>(x + i) * r * load<f32x16>(w + i));
    for (; i < n; i++) y[i] = x[i] * r * w[i];
}
