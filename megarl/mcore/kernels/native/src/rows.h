// Norms, SwiGLU and softmax sums: functions of one row, which depend on nothing else.
#pragma once

#include <cmath>
#include <limits>

#include "simd.h"

namespace megarl {

// Calls f(start, width) for a row's vectors; the last width may be below W.
template <typename F>
inline void for_vectors(int64_t n, const F& f) {
    int64_t i = 0;
    for (; i + W <= n; i += W) f(i, W);
    if (i < n) f(i, int(n - i));
}

inline Vec load_some(const float* p, int width) { return width == W ? load(p) : load(p, width); }
inline void store_some(float* p, Vec x, int width) { width == W ? store(p, x) : store(p, x, width); }

// Sums over a row in 4 · W chains.
struct RowSum {
    Vec parts[4] = {zero(), zero(), zero(), zero()};
    void operator()(int64_t start, Vec x) {
        int i = int(start / W % 4);
        parts[i] = add(parts[i], x);
    }
    void fma_into(int64_t start, Vec a, Vec b) {
        int i = int(start / W % 4);
        parts[i] = fma(a, b, parts[i]);
    }
    float total() const { return sum(add(add(parts[0], parts[1]), add(parts[2], parts[3]))); }
};

// x · r · weight with r = (mean x² + ε)^−½, which is returned (1910.07467 eq. 4).
inline float rms_norm(const float* x, const float* weight, int64_t n, float eps, float* out) {
    RowSum squares;
    for_vectors(n, [&](int64_t i, int width) {
        Vec v = load_some(x + i, width);
        squares.fma_into(i, v, v);
    });
    float scale = 1.0f / std::sqrt(squares.total() / float(n) + eps);
    for_vectors(n, [&](int64_t i, int width) {
        store_some(out + i, mul(mul(load_some(x + i, width), all(scale)), load_some(weight + i, width)), width);
    });
    return scale;
}

constexpr float SILU_ZERO = -88.0f;  // below it silu and its derivative are 0 to within the smallest numbers

inline Vec sigmoid(Vec x) {  // of x ≥ SILU_ZERO, for which the exponential is finite
    return div(all(1.0f), add(all(1.0f), exp(sub(zero(), max(x, all(SILU_ZERO))))));
}

inline Vec silu(Vec x) {
    Vec e = exp(sub(zero(), max(x, all(SILU_ZERO))));
    return zero_below(x, SILU_ZERO, div(x, add(all(1.0f), e)));
}

// silu(gate) · up (2002.05202 eq. 5).
inline void swiglu(const float* gate, const float* up, int64_t n, float* out) {
    for_vectors(n, [&](int64_t i, int width) {
        store_some(out + i, mul(silu(load_some(gate + i, width)), load_some(up + i, width)), width);
    });
}

// Gradients of gate and up from that of silu(gate) · up.
inline void swiglu_backward(const float* grad, const float* gate, const float* up, int64_t n, float* grad_gate,
                            float* grad_up) {
    for_vectors(n, [&](int64_t i, int width) {
        Vec g = load_some(grad + i, width), x = load_some(gate + i, width), u = load_some(up + i, width);
        Vec s = sigmoid(x);
        store_some(grad_up + i, mul(g, silu(x)), width);
        Vec slope = zero_below(x, SILU_ZERO, mul(s, fma(x, sub(all(1.0f), s), all(1.0f))));  // of silu
        store_some(grad_gate + i, mul(mul(g, u), slope), width);
    });
}

inline float largest_of(const float* x, int64_t n) {
    Vec top = all(-std::numeric_limits<float>::infinity());
    int64_t i = 0;
    for (; i + W <= n; i += W) top = max(load(x + i), top);
    float best = largest(top);
    for (; i < n; ++i) best = x[i] > best ? x[i] : best;
    return best;
}

struct SoftmaxSums {
    float weights;  // Σ e^(x − top)
    float shifted;  // Σ (x − top) · e^(x − top)
    float squares;  // Σ e^2(x − top)
};

// Writes e^(x − top) and returns the first SUMS of its sums, the others 0; `out` may be x.
template <int SUMS>
inline SoftmaxSums softmax_sums(const float* x, int64_t n, float top, float* out) {
    RowSum weights, shifted, squares;
    for_vectors(n, [&](int64_t i, int width) {
        Vec s = sub(load_some(x + i, width), all(top)), e = exp(s);
        if (width < W) {
            s = first(width, s, zero());
            e = first(width, e, zero());
        }
        weights(i, e);
        if constexpr (SUMS > 1) shifted.fma_into(i, s, e);
        if constexpr (SUMS > 2) squares.fma_into(i, e, e);
        store_some(out + i, e, width);
    });
    return {weights.total(), SUMS > 1 ? shifted.total() : 0.0f, SUMS > 2 ? squares.total() : 0.0f};
}

}  // namespace megarl
