// Products with weights: out [M, N] = x [M, K] · weightᵀ + bias, fp32.
//
// The weight is packed into panels of PANEL columns: panel p is [K][PANEL], padded with zeros. Each element of the
// result is one chain of fused multiply-adds over k in ascending order, starting at 0. So a row's bits depend neither
// on the other rows nor on their number, the number of threads, or the block sizes below.
#pragma once

#include <algorithm>
#include <vector>

#include "parallel.h"
#include "simd.h"

namespace megarl {

constexpr int PANEL = 2 * W;
constexpr int ROWS = W == 16 ? 12 : 6;  // of a tile; its 2 · ROWS accumulators fill the registers
constexpr int64_t K_BLOCK = 256;        // a panel's rows that stay in the first-level cache
constexpr int64_t M_BLOCK = 16 * ROWS;  // rows of x that stay in the second-level cache
constexpr int64_t PACKED_K = 4 * K_BLOCK;  // a panel's rows that are packed, and multiplied by all rows, at a time
constexpr int64_t PACKED = 1 << 18;  // floats of the panels that are packed at a time
constexpr int LINE = 16;             // floats of a cache line
constexpr int64_t AHEAD = 16;        // columns of a weight, far from each other, that are read ahead

inline int64_t panels_of(int64_t n) { return (n + PANEL - 1) / PANEL; }

// Elements [n, k] of a matrix with any strides -> packed [panels · K · PANEL].
struct Matrix {
    const float* data;
    int64_t row_stride, column_stride;
};

inline void pack_panel(Matrix from, int64_t columns, int64_t k, float* panel) {
    if (from.row_stride == 1 && columns == PANEL) {
        for (int64_t i = 0; i < k; ++i) {
            for (int j = 0; j < PANEL; j += LINE) __builtin_prefetch(from.data + (i + AHEAD) * from.column_stride + j);
            for (int j = 0; j < 2; ++j)
                store(panel + i * PANEL + j * W, load(from.data + i * from.column_stride + j * W));
        }
        return;
    }
    int64_t whole = from.column_stride == 1 && columns == PANEL ? k / W * W : 0;
    const float* rows[PANEL];
    for (int64_t j = 0; j < columns; ++j) rows[j] = from.data + j * from.row_stride;
    for (int64_t i = 0; i < whole; i += W)
        for (int j = 0; j < PANEL; j += W) {
            Vec vectors[W];
            transpose(rows + j, i, vectors);
            for (int l = 0; l < W; ++l) store(panel + (i + l) * PANEL + j, vectors[l]);
        }
    for (int64_t i = whole; i < k; ++i)
        for (int64_t j = 0; j < PANEL; ++j)
            panel[i * PANEL + j] = j < columns ? from.data[j * from.row_stride + i * from.column_stride] : 0.0f;
}

inline void pack(Matrix weight, int64_t n, int64_t k, float* packed) {
    parallel_for(panels_of(n), n * k * ELEMENT_WORK, [&](int64_t p) {
        Matrix from{weight.data + p * PANEL * weight.row_stride, weight.row_stride, weight.column_stride};
        pack_panel(from, std::min<int64_t>(PANEL, n - p * PANEL), k, packed + p * k * PANEL);
    });
}

// `next`: k rows of a panel that are read ahead; `panel` itself for none.
template <int M>
void tile(Matrix x, const float* panel, const float* next, int64_t k, float* out, int64_t out_stride, int columns,
          bool is_first) {
    Vec acc[M][2];
    bool is_whole = columns == PANEL;
    float rest[PANEL];
    // The rows of a wide result are far apart, so that no processor reads them ahead; they are written after the loop.
    for (int i = 0; i < M; ++i)
        for (int j = 0; j < columns; j += LINE) __builtin_prefetch(out + i * out_stride + j, 1);
    for (int i = 0; i < M; ++i)
        for (int j = 0; j < 2; ++j) {
            if (is_first) {
                acc[i][j] = zero();
            } else if (is_whole) {
                acc[i][j] = load(out + i * out_stride + j * W);
            } else {
                for (int c = 0; c < W; ++c) rest[c] = j * W + c < columns ? out[i * out_stride + j * W + c] : 0.0f;
                acc[i][j] = load(rest);
            }
        }
    for (int64_t l = 0; l < k; ++l) {
        Vec left = load(panel + l * PANEL), right = load(panel + l * PANEL + W);
        for (int j = 0; j < PANEL; j += LINE) __builtin_prefetch(next + l * PANEL + j);
        for (int i = 0; i < M; ++i) {
            Vec factor = all(x.data[i * x.row_stride + l * x.column_stride]);
            acc[i][0] = fma(factor, left, acc[i][0]);
            acc[i][1] = fma(factor, right, acc[i][1]);
        }
    }
    for (int i = 0; i < M; ++i) {
        if (is_whole) {
            store(out + i * out_stride, acc[i][0]);
            store(out + i * out_stride + W, acc[i][1]);
        } else {
            store(rest, acc[i][0]);
            store(rest + W, acc[i][1]);
            std::copy(rest, rest + columns, out + i * out_stride);
        }
    }
}

template <int M>
void tile_of(int rows, Matrix x, const float* panel, const float* next, int64_t k, float* out, int64_t out_stride,
             int columns, bool is_first) {
    if constexpr (M == 1) {
        tile<1>(x, panel, next, k, out, out_stride, columns, is_first);
    } else if (rows == M) {
        tile<M>(x, panel, next, k, out, out_stride, columns, is_first);
    } else {
        tile_of<M - 1>(rows, x, panel, next, k, out, out_stride, columns, is_first);
    }
}

// `count` ≤ ROWS neighbouring rows of x whose elements of one column lie next to each other -> [K][count], which a tile
// reads in order. Writes up to W floats more.
inline void pack_rows(const float* x, int64_t column_stride, int64_t count, int64_t k, float* packed) {
    static_assert(ROWS < W);
    for (int64_t l = 0; l < k; ++l) store(packed + l * count, load(x + l * column_stride, int(count)));
}

// Packed panels of a weight, of which a product may use some rows alone.
struct Panels {
    const float* data;
    int64_t k;  // rows of a panel
    const float* at(int64_t panel, int64_t row) const { return data + (panel * k + row) * PANEL; }
};

inline Matrix rows_from(Matrix x, int64_t row) { return {x.data + row * x.row_stride, x.row_stride, x.column_stride}; }
inline Matrix columns_from(Matrix x, int64_t column) {
    return {x.data + column * x.column_stride, x.row_stride, x.column_stride};
}

// Rows [0, m) of some panels of out; `adds`: to what out holds.
inline void gemm_panels(Matrix x, int64_t m, int64_t k, Panels packed, int64_t n, int64_t first_panel,
                        int64_t last_panel, float* out, int64_t out_stride, const float* bias, bool adds) {
    static thread_local std::vector<float> packed_rows;
    // Far columns of x push each other out of the first-level cache. An AMD EPYC with AVX-512 is faster without the copy,
    // an Intel Xeon 1.4 to 1.9 times as fast with it (tools/bench/products.py, weight gradients).
#if defined(__x86_64__)
    static const bool is_worth_a_copy = W == 8 || __builtin_cpu_is("intel");
#else
    static const bool is_worth_a_copy = true;
#endif
    bool is_copied = is_worth_a_copy && x.row_stride == 1 && x.column_stride > 1;
    for (int64_t m0 = 0; m0 < m; m0 += M_BLOCK) {
        int64_t rows = std::min(M_BLOCK, m - m0), tiles = (rows + ROWS - 1) / ROWS;
        auto start_of = [&](int64_t t) { return rows * t / tiles; };  // of even sizes
        if (is_copied) {
            packed_rows.resize(M_BLOCK * k + W);
            for (int64_t t = 0; t < tiles; ++t)
                pack_rows(x.data + m0 + start_of(t), x.column_stride, start_of(t + 1) - start_of(t), k,
                          packed_rows.data() + start_of(t) * k);
        }
        for (int64_t p = first_panel; p < last_panel; ++p) {
            int columns = int(std::min<int64_t>(PANEL, n - p * PANEL));
            float* block = out + m0 * out_stride + p * PANEL;
            for (int64_t k0 = 0; k0 < k; k0 += K_BLOCK) {
                const float *panel = packed.at(p, k0), *next = panel;
                if (k0 + K_BLOCK < k) next = packed.at(p, k0 + K_BLOCK);
                else if (p + 1 < last_panel) next = packed.at(p + 1, 0);
                for (int64_t t = 0; t < tiles; ++t) {
                    int64_t start = start_of(t), count = start_of(t + 1) - start;
                    Matrix left = columns_from(rows_from(x, m0 + start), k0);
                    if (is_copied) left = {packed_rows.data() + start * k + k0 * count, 1, count};
                    tile_of<ROWS>(int(count), left, panel, t + 1 < tiles ? panel : next, std::min(K_BLOCK, k - k0),
                                  block + start * out_stride, out_stride, columns, k0 == 0 && !adds);
                }
            }
            if (bias)
                for (int64_t i = 0; i < rows; ++i)
                    for (int j = 0; j < columns; ++j) block[i * out_stride + j] += bias[p * PANEL + j];
        }
    }
}

// Calls f(first row, last row, first panel, last panel) on each thread's share of a product.
template <typename F>
void gemm_shares(int64_t m, int64_t k, int64_t n, const F& f) {
    int64_t panels = panels_of(n), threads = threads_for(m * n * k);
    if (panels >= 4 * threads || m < threads * ROWS) {
        parallel_parts(panels, threads, [&](int64_t first, int64_t last) { f(int64_t(0), m, first, last); });
    } else {
        parallel_parts(m, threads, [&](int64_t first, int64_t last) { f(first, last, int64_t(0), panels); });
    }
}

inline void gemm(Matrix x, int64_t m, int64_t k, const float* packed, int64_t n, float* out, int64_t out_stride,
                 const float* bias = nullptr) {
    gemm_shares(m, k, n, [&](int64_t first, int64_t last, int64_t first_panel, int64_t last_panel) {
        for (int64_t k0 = 0; k0 < std::max<int64_t>(k, 1); k0 += PACKED_K) {
            int64_t depth = std::min(PACKED_K, k - k0);
            gemm_panels(columns_from(rows_from(x, first), k0), last - first, depth, {packed + k0 * PANEL, k}, n,
                        first_panel, last_panel, out + first * out_stride, out_stride, k0 + depth == k ? bias : nullptr,
                        k0 > 0);
        }
    });
}

// The same with a weight [N, K] that is not packed; packs a part at a time. `adds`: to what out holds.
inline void gemm_unpacked(Matrix x, int64_t m, int64_t k, Matrix weight, int64_t n, float* out, int64_t out_stride,
                          const float* bias, bool adds) {
    gemm_shares(m, k, n, [&](int64_t first, int64_t last, int64_t first_panel, int64_t last_panel) {
        static thread_local std::vector<float> packed;
        int64_t deepest = std::clamp<int64_t>(k, 1, PACKED_K), most = std::max<int64_t>(1, PACKED / (deepest * PANEL));
        packed.resize(std::min(most, last_panel - first_panel) * deepest * PANEL);
        for (int64_t k0 = 0; k0 < k; k0 += PACKED_K) {
            int64_t depth = std::min(PACKED_K, k - k0);
            for (int64_t p0 = first_panel; p0 < last_panel; p0 += most) {
                int64_t panels = std::min(most, last_panel - p0), columns = std::min(n - p0 * PANEL, panels * PANEL);
                Matrix part = columns_from(rows_from(weight, p0 * PANEL), k0);
                for (int64_t p = 0; p < panels; ++p)
                    pack_panel(rows_from(part, p * PANEL), std::min<int64_t>(PANEL, columns - p * PANEL), depth,
                               packed.data() + p * depth * PANEL);
                gemm_panels(columns_from(rows_from(x, first), k0), last - first, depth, {packed.data(), depth},
                            columns, 0, panels, out + first * out_stride + p0 * PANEL, out_stride,
                            bias && k0 + depth == k ? bias + p0 * PANEL : nullptr, adds || k0 > 0);
            }
        }
    });
}

}  // namespace megarl
