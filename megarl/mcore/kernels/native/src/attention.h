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

constexpr int TILE = 4;    // query rows that share loads of keys and values
constexpr int BLOCKS = 2;  // blocks of W keys whose scores of a tile are computed together

// Query rows of one group of heads.
struct QueryRow {
    const float* query;
    float* out;
    float* log_sum;  // receives max + log Σ e^(score − max); may be null
    int64_t keys;    // the row sees keys 0 … keys − 1
};

inline int64_t padded_keys(int64_t keys) { return (keys + W * BLOCKS - 1) / (W * BLOCKS) * W * BLOCKS; }

// Vectors of `channels` floats (a multiple of W), of which W lie next to each other channel by channel.
class Transposed {
  public:
    void load_vectors(const float* const* vectors, int64_t count, int channels) {
        channels_ = channels;
        data_.resize(padded_keys(count) * channels);
        float rows[W * W];
        for (int64_t b = 0; b < padded_keys(count) / W; ++b)
            for (int c = 0; c < channels; c += W) {
                for (int i = 0; i < W; ++i) {
                    int64_t at = b * W + i;
                    store(rows + i * W, at < count ? load(vectors[at] + c) : zero());
                }
                transpose(rows, W, data_.data() + (b * channels + c) * W, W);
            }
    }

    // Products of N rows with all vectors up to `width` (of `padded_keys`), times `scale` -> out [N, width].
    template <int N>
    void products(const float* const* rows, int64_t width, float scale, float* out) const {
        for (int64_t block = 0; block < width / W; block += BLOCKS) {
            Vec acc[N][BLOCKS];
            for (int r = 0; r < N; ++r)
                for (int b = 0; b < BLOCKS; ++b) acc[r][b] = zero();
            const float* vectors = data_.data() + block * channels_ * W;
            for (int c = 0; c < channels_; ++c) {
                Vec vector[BLOCKS];
                for (int b = 0; b < BLOCKS; ++b) vector[b] = load(vectors + (b * channels_ + c) * W);
                for (int r = 0; r < N; ++r) {
                    Vec factor = all(rows[r][c]);
                    for (int b = 0; b < BLOCKS; ++b) acc[r][b] = fma(factor, vector[b], acc[r][b]);
                }
            }
            for (int r = 0; r < N; ++r)
                for (int b = 0; b < BLOCKS; ++b)
                    store(out + r * width + (block + b) * W, mul(acc[r][b], all(scale)));
        }
    }

  private:
    int channels_ = 0;
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

template <int N>
void weighted_sums(int channels, const float* weights, int64_t width, const float* const* vectors, int64_t count,
                   const float* factors, float* const* out, bool adds = false) {
    int c = 0;
    for (; c + 4 * W <= channels; c += 4 * W)
        weighted_sums_at<N, 4>(c, weights, width, vectors, count, factors, out, adds);
    for (; c + 2 * W <= channels; c += 2 * W)
        weighted_sums_at<N, 2>(c, weights, width, vectors, count, factors, out, adds);
    for (; c < channels; c += W)
        weighted_sums_at<N, 1>(c, weights, width, vectors, count, factors, out, adds);
}

// Calls f with the number of rows as a compile-time constant, for tiles of at most TILE rows.
template <typename F>
void for_tiles(int64_t count, const F& f) {
    for (int64_t i = 0; i < count; i += TILE) switch (std::min<int64_t>(TILE, count - i)) {
            case 1: f(i, std::integral_constant<int, 1>()); break;
            case 2: f(i, std::integral_constant<int, 2>()); break;
            case 3: f(i, std::integral_constant<int, 3>()); break;
            default: f(i, std::integral_constant<int, TILE>());
        }
}

class GroupAttention {
  public:
    // keys[i] and values[i]: where key and value i are; both stay in use until the next call.
    void load_keys(const float* const* keys, const float* const* values, int64_t count, int channels) {
        values_ = values, channels_ = channels;
        keys_.load_vectors(keys, count, channels);
    }

    void attend(const QueryRow* rows, int64_t count, float scale) {
        for_tiles(count, [&](int64_t i, auto n) { attend_tile<n.value>(rows + i, scale); });
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
        for (int64_t i = 0; i < longest; ++i)
            for (int c = 0; c < channels; c += W) {
                Vec key = zero(), value = load(grad_values[i] + c);
                for (int r = 0; r < N; ++r) {
                    key = fma(all(slopes_[r * width + i]), load(queries[r] + c), key);
                    value = fma(all(weights_[r * width + i]), load(grads[r] + c), value);
                }
                store(grad_keys[i] + c, fma(key, all(scale), load(grad_keys[i] + c)));
                store(grad_values[i] + c, value);
            }
    }

    Transposed keys_, values_;
    std::vector<float> weights_, slopes_;
};

}  // namespace megarl
