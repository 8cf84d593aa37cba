// Samples tokens from rows of logits by inverse CDF, in one pass over the vocabulary after its maximum.
#pragma once

#include <vector>

#include "rows.h"

namespace megarl {

constexpr int64_t CDF_BLOCK = 256;  // tokens of a block of the two-level search

// The first token whose cumulative share of the weights exceeds `number`; the last one with weight if rounding leaves
// none.
inline int64_t inverse_cdf(const float* weights, int64_t n, double number) {
    int64_t blocks = (n + CDF_BLOCK - 1) / CDF_BLOCK;
    double total = 0.0;
    static thread_local std::vector<double> masses;
    masses.resize(blocks);
    for (int64_t b = 0; b < blocks; ++b) {
        RowSum sums;
        int64_t start = b * CDF_BLOCK, width = std::min(CDF_BLOCK, n - start);
        for_vectors(width, [&](int64_t i, int w) { sums(i, load_some(weights + start + i, w)); });
        total += masses[b] = sums.total();
    }
    double target = number * total, before = 0.0;
    int64_t block = 0, last_block = 0;
    for (int64_t b = 0; b < blocks; ++b)
        if (masses[b] > 0.0) last_block = b;
    for (; block < last_block && before + masses[block] <= target; ++block) before += masses[block];
    int64_t start = block * CDF_BLOCK, end = std::min(start + CDF_BLOCK, n), last = start;
    for (int64_t i = start; i < end; ++i) {
        if (weights[i] <= 0.0f) continue;
        before += weights[i];
        if (before > target) return i;
        last = i;
    }
    return last;
}

inline int64_t argmax(const float* x, int64_t n) {
    float top = largest_of(x, n);
    for (int64_t i = 0; i < n; ++i)
        if (x[i] == top) return i;
    return 0;  // NaN: as torch would return some index
}

}  // namespace megarl
