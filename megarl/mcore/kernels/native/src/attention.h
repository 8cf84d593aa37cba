// Softmax attention of query rows over the keys and values of one sequence and one group of heads, fp32.
//
// A score is one chain of fused multiply-adds over the channels, an output one chain over the keys, both in ascending
// order; the softmax sums keys in W chains. Keys after a row's last one have weight 0, which changes no bit. So a
// row's bits depend only on its query and its keys: a decode step and a training forward give the same.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>
#include <vector>

#include "simd.h"

namespace megarl {

constexpr int TILE = W == 16 ? 4 : 6;  // query rows that share loads of keys and values
constexpr int BLOCKS = 2;              // blocks of W keys whose scores of a tile are computed together
constexpr int SPANS = W == 16 ? 4 : 2;  // blocks of W channels whose sums of a tile fill the registers

// Query rows of one group of heads.
struct QueryRow {
    const float* query;
    float* out;
    float* log_sum;  // receives max + log Σ e^(score − max); may be null
    int64_t keys;    // the row sees keys 0 … keys − 1
};

inline int64_t padded_keys(int64_t keys) { return (keys + W - 1) / W * W; }

// Vectors of `channels` floats (a multiple of W), of which W lie next to each other channel by channel.
class Transposed {
  public:
    // vectors[i]: where vector i is. If one tile of rows alone needs them, they must stay until `products`, which
    // transposes them in registers: for so few rows a copy would take longer than the products.
    void load_vectors(const float* const* vectors, int64_t count, int channels, bool is_for_one_tile = false) {
        vectors_ = vectors, count_ = count, channels_ = channels, is_copied_ = !is_for_one_tile;
        if (!is_copied_) return;
        data_.resize(padded_keys(count) * channels);
        for (int64_t at = 0; at < padded_keys(count); at += W)
            for_columns(at, [&](int c, Vec column) { store(data_.data() + at * channels + c * W, column); });
    }

    // Products of N rows with all vectors up to `width` (of `padded_keys`), times `scale` -> out [N, width]; those after
    // the last vector mean nothing.
    template <int N>
    void products(const float* const* rows, int64_t width, float scale, float* out) const {
        is_copied_ ? copied_products<N>(rows, width, scale, out) : direct_products<N>(rows, width, scale, out);
    }

  private:
    // Calls f(c, channel c of W vectors) for all channels; `at`: the first vector. The last one stands for those after it.
    template <typename F>
    void for_columns(int64_t at, const F& f) const {
        const float* block[W];
        for (int64_t i = 0; i < W; ++i) block[i] = vectors_[std::min(at + i, count_ - 1)];
        for (int c = 0; c < channels_; c += W) {
            Vec columns[W];
            transpose(block, c, columns);
            for (int i = 0; i < W; ++i) f(c + i, columns[i]);
        }
    }

    template <int N>
    void direct_products(const float* const* rows, int64_t width, float scale, float* out) const {
        for (int64_t at = 0; at < width; at += W) {
            Vec acc[N];
            for (int r = 0; r < N; ++r) acc[r] = zero();
            for_columns(at, [&](int c, Vec column) {
                for (int r = 0; r < N; ++r) acc[r] = fma(all(rows[r][c]), column, acc[r]);
            });
            for (int r = 0; r < N; ++r) store(out + r * width + at, mul(acc[r], all(scale)));
        }
    }

    template <int N>
    void copied_products(const float* const* rows, int64_t width, float scale, float* out) const {
        int64_t at = 0;
        for (; at + BLOCKS * W <= width; at += BLOCKS * W) products_at<N, BLOCKS>(at, rows, width, scale, out);
        for (; at < width; at += W) products_at<N, 1>(at, rows, width, scale, out);
    }

    // Those of B blocks of W vectors, the first of which is vector `at`.
    template <int N, int B>
    void products_at(int64_t at, const float* const* rows, int64_t width, float scale, float* out) const {
        Vec acc[N][B];
        for (int r = 0; r < N; ++r)
            for (int b = 0; b < B; ++b) acc[r][b] = zero();
        const float* vectors = data_.data() + at * channels_;
        for (int c = 0; c < channels_; ++c) {
            Vec vector[B];
            for (int b = 0; b < B; ++b) vector[b] = load(vectors + (b * channels_ + c) * W);
            for (int r = 0; r < N; ++r) {
                Vec factor = all(rows[r][c]);
                for (int b = 0; b < B; ++b) acc[r][b] = fma(factor, vector[b], acc[r][b]);
            }
        }
        for (int r = 0; r < N; ++r)
            for (int b = 0; b < B; ++b) store(out + r * width + at + b * W, mul(acc[r][b], all(scale)));
    }

    const float* const* vectors_ = nullptr;
    int64_t count_ = 0;
    int channels_ = 0;
    bool is_copied_ = false;
    std::vector<float> data_;
};

// out[r] (+)= factor[r] · Σ weights [N, width] · vectors, over vectors 0 … count − 1.
template <int N, int C>
void weighted_sums_at(int channel, const float* weights, int64_t width, const float* const* vectors, int64_t count,
                      const float* factors, float* const* out, bool adds) {
    Vec acc[N][C];
    for (int r = 0; r < N; ++r)
        for (int c = 0; c < C; ++c) acc[r][c] = zero();
    for (int64_t i = 0; i < count; ++i) {
        Vec vector[C];
        for (int c = 0; c < C; ++c) vector[c] = load(vectors[i] + channel + c * W);
        for (int r = 0; r < N; ++r) {
            Vec weight = all(weights[r * width + i]);
            for (int c = 0; c < C; ++c) acc[r][c] = fma(weight, vector[c], acc[r][c]);
        }
    }
    for (int r = 0; r < N; ++r)
        for (int c = 0; c < C; ++c) {
            float* to = out[r] + channel + c * W;
            Vec result = mul(acc[r][c], all(factors[r]));
            store(to, adds ? add(load(to), result) : result);
        }
}

template <int N, int C = SPANS>
void weighted_sums(int channels, const float* weights, int64_t width, const float* const* vectors, int64_t count,
                   const float* factors, float* const* out, bool adds = false, int channel = 0) {
    for (; channel + C * W <= channels; channel += C * W)
        weighted_sums_at<N, C>(channel, weights, width, vectors, count, factors, out, adds);
    if constexpr (C > 1) weighted_sums<N, C / 2>(channels, weights, width, vectors, count, factors, out, adds, channel);
}

// Calls f(i, number of rows as a compile-time constant) for the rows from i on, at most N.
template <int N = TILE, typename F>
void for_tile(int64_t i, int64_t rows, const F& f) {
    if constexpr (N > 1)
        if (rows < N) return for_tile<N - 1>(i, rows, f);
    f(i, std::integral_constant<int, N>());
}

template <typename F>
void for_tiles(int64_t count, const F& f) {
    for (int64_t i = 0; i < count; i += TILE) for_tile(i, count - i, f);
}

class GroupAttention {
  public:
    // keys[i] and values[i]: where key and value i of `key_count` are.
    void attend(const float* const* keys, const float* const* values, int64_t key_count, int channels,
                const QueryRow* rows, int64_t row_count, float scale) {
        values_ = values, channels_ = channels;
        keys_.load_vectors(keys, key_count, channels, row_count <= TILE);
        for_tiles(row_count, [&](int64_t i, auto n) { attend_tile<n.value>(rows + i, scale); });
    }

  private:
    template <int N>
    void attend_tile(const QueryRow* rows, float scale) {
        int64_t longest = 0;
        const float* queries[N];
        float* out[N];
        for (int r = 0; r < N; ++r) {
            longest = std::max(longest, rows[r].keys);
            queries[r] = rows[r].query, out[r] = rows[r].out;
        }
        int64_t width = padded_keys(longest);
        scores_.resize(TILE * width);
        keys_.products<N>(queries, width, scale, scores_.data());
        float inverse[N];
        for (int r = 0; r < N; ++r) inverse[r] = softmax(rows[r], scores_.data() + r * width, width);
        weighted_sums<N>(channels_, scores_.data(), width, values_, longest, inverse, out);
    }

    // Replaces a row's scores by e^(score − max); returns 1 / their sum.
    static float softmax(const QueryRow& row, float* scores, int64_t width) {
        const float none = -std::numeric_limits<float>::infinity();
        std::fill(scores + row.keys, scores + width, none);
        Vec top = all(none), total = zero();
        for (int64_t i = 0; i < width; i += W) top = max(load(scores + i), top);
        float best = largest(top);
        for (int64_t i = 0; i < width; i += W) {
            Vec e = exp(sub(load(scores + i), all(best)));
            total = add(total, e);
            store(scores + i, e);
        }
        float whole = sum(total);
        if (row.log_sum) *row.log_sum = best + std::log(whole);
        return 1.0f / whole;
    }

    const float* const* values_ = nullptr;
    int channels_ = 0;
    Transposed keys_;
    std::vector<float> scores_;
};

// A query row in backward.
struct QueryGradient {
    const float* query;
    const float* grad;  // of the row's output
    const float* out;
    float* grad_query;  // is written
    float log_sum;
    int64_t keys;
};

class GroupAttentionBackward {
  public:
    // Adds to grad_keys[i] and grad_values[i].
    void run(const float* const* keys, const float* const* values, int64_t count, int channels,
             const QueryGradient* rows, int64_t row_count, float scale, float* const* grad_keys,
             float* const* grad_values) {
        keys_.load_vectors(keys, count, channels);
        values_.load_vectors(values, count, channels);
        for_tiles(row_count, [&](int64_t i, auto n) {
            tile<n.value>(keys, channels, rows + i, scale, grad_keys, grad_values);
        });
    }

  private:
    template <int N>
    void tile(const float* const* keys, int channels, const QueryGradient* rows, float scale, float* const* grad_keys,
              float* const* grad_values) {
        int64_t longest = 0;
        const float *queries[N], *grads[N];
        float *grad_queries[N], factors[N];
        for (int r = 0; r < N; ++r) {
            longest = std::max(longest, rows[r].keys);
            queries[r] = rows[r].query, grads[r] = rows[r].grad, grad_queries[r] = rows[r].grad_query;
            factors[r] = scale;
        }
        int64_t width = padded_keys(longest);
        weights_.resize(TILE * width), slopes_.resize(TILE * width);
        keys_.products<N>(queries, width, scale, weights_.data());
        values_.products<N>(grads, width, 1.0f, slopes_.data());
        for (int r = 0; r < N; ++r) {
            float *p = weights_.data() + r * width, *d = slopes_.data() + r * width;
            Vec parts = zero();
            for (int c = 0; c < channels; c += W) parts = fma(load(rows[r].grad + c), load(rows[r].out + c), parts);
            Vec mean = all(sum(parts)), top = all(rows[r].log_sum);
            for (int64_t i = 0; i < width; i += W) {
                Vec weight = exp(sub(load(p + i), top));
                store(p + i, weight);
                store(d + i, mul(weight, sub(load(d + i), mean)));
            }
            std::fill(p + rows[r].keys, p + width, 0.0f);
            std::fill(d + rows[r].keys, d + width, 0.0f);
        }
        weighted_sums<N>(channels, slopes_.data(), width, keys, longest, factors, grad_queries);
        for (int c = 0; c < channels; c += W)
            add_gradients<N>(c, queries, grads, width, longest, scale, grad_keys, grad_values);
    }

    // W channels from `channel` on of the gradients of keys and values, whose loop leaves the rows in registers.
    template <int N>
    void add_gradients(int channel, const float* const* queries, const float* const* grads, int64_t width,
                       int64_t count, float scale, float* const* grad_keys, float* const* grad_values) const {
        Vec query[N], grad[N];
        for (int r = 0; r < N; ++r) query[r] = load(queries[r] + channel), grad[r] = load(grads[r] + channel);
        for (int64_t i = 0; i < count; ++i) {
            float *to_key = grad_keys[i] + channel, *to_value = grad_values[i] + channel;
            Vec key = zero(), value = load(to_value);
            for (int r = 0; r < N; ++r) {
                key = fma(all(slopes_[r * width + i]), query[r], key);
                value = fma(all(weights_[r * width + i]), grad[r], value);
            }
            store(to_key, fma(key, all(scale), load(to_key)));
            store(to_value, value);
        }
    }

    Transposed keys_, values_;
    std::vector<float> weights_, slopes_;
};

}  // namespace megarl
