// Softmax attention of query rows over the keys and values of one sequence and one group of heads, fp32.
//
// A score is one chain of fused multiply-adds over the channels, an output one chain over the keys, both in ascending
// order; the softmax sums keys in W chains. Keys that a row does not see have weight 0, which changes no bit. So a
// row's bits depend only on its query and its keys: a decode step and a training forward give the same. A row sees keys
// up to its last one, with a window the last ones of them. Whoever leaves out keys before a window leaves out a multiple
// of W, so that each key stays in its chain.
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

constexpr float NO_SINK = -std::numeric_limits<float>::infinity();

// What makes scores of products q · k.
struct Scores {
    float scale;
    float softcap;  // c: scores s become c · tanh(s / c) (2408.00118 §2); 0: none
};

// Query rows of one group of heads.
struct QueryRow {
    const float* query;
    float* out;
    float* log_sum;       // receives max + log Σ e^(score − max); may be null
    int64_t first, keys;  // the row sees keys first … keys − 1
    float sink;           // score of one more key, whose value is 0 (2309.17453); NO_SINK: none
};

inline int64_t padded_keys(int64_t keys) { return (keys + W - 1) / W * W; }
inline int64_t first_of(int64_t keys, int64_t window) { return window && keys > window ? keys - window : 0; }
inline int64_t whole(int64_t channels) { return padded_keys(channels); }

// Vectors whose size is no multiple of W, copied with zeros after them, and copied back. Zeros at the end of a chain
// change no bit.
class WholeVectors {
  public:
    WholeVectors(int64_t count, int channels) : channels_(channels), width_(int(whole(channels))) {
        data_.resize(count * width_);
    }
    float* at(int64_t i) { return data_.data() + i * width_; }
    const float* load(int64_t i, const float* from) {
        std::copy_n(from, channels_, at(i));
        return at(i);
    }
    void store(int64_t i, float* to) { std::copy_n(at(i), channels_, to); }

  private:
    int channels_, width_;
    std::vector<float> data_;
};

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

    // Products of N rows with vectors `start` (a multiple of W) to `width` (of `padded_keys`), times `scale` -> those
    // columns of out [N, width]; those after the last vector mean nothing.
    template <int N>
    void products(const float* const* rows, int64_t start, int64_t width, float scale, float* out) const {
        is_copied_ ? copied_products<N>(rows, start, width, scale, out)
                   : direct_products<N>(rows, start, width, scale, out);
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
    void direct_products(const float* const* rows, int64_t start, int64_t width, float scale, float* out) const {
        for (int64_t at = start; at < width; at += W) {
            Vec acc[N];
            for (int r = 0; r < N; ++r) acc[r] = zero();
            for_columns(at, [&](int c, Vec column) {
                for (int r = 0; r < N; ++r) acc[r] = fma(all(rows[r][c]), column, acc[r]);
            });
            for (int r = 0; r < N; ++r) store(out + r * width + at, mul(acc[r], all(scale)));
        }
    }

    template <int N>
    void copied_products(const float* const* rows, int64_t start, int64_t width, float scale, float* out) const {
        int64_t at = start;
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

// c · tanh(x / c) of a vector of scores.
inline Vec capped(Vec x, Vec softcap) { return mul(softcap, tanh(div(x, softcap))); }

// Keys of a tile of rows: from the first one that any of them sees, rounded down to whole vectors, to the last one.
struct TileKeys {
    int64_t start, width, longest;  // width: `longest` rounded up
    template <typename Row>
    TileKeys(const Row* rows, int n) : start(rows[0].first), longest(0) {
        for (int r = 0; r < n; ++r) start = std::min(start, rows[r].first), longest = std::max(longest, rows[r].keys);
        start = start / W * W, width = padded_keys(longest);
    }
};

class GroupAttention {
  public:
    // keys[i] and values[i]: where key and value i of `key_count` are, of `channels` and `value_channels` floats.
    void attend(const float* const* keys, const float* const* values, int64_t key_count, int channels,
                int value_channels, const QueryRow* rows, int64_t row_count, Scores scores) {
        if (channels % W || value_channels % W)
            return attend_whole(keys, values, key_count, channels, value_channels, rows, row_count, scores);
        values_ = values, channels_ = value_channels;
        keys_.load_vectors(keys, key_count, channels, row_count <= TILE);
        for_tiles(row_count, [&](int64_t i, auto n) { attend_tile<n.value>(rows + i, scores); });
    }

  private:
    // The same with sizes that are no multiple of W.
    void attend_whole(const float* const* keys, const float* const* values, int64_t key_count, int channels,
                      int value_channels, const QueryRow* rows, int64_t row_count, Scores scores) {
        WholeVectors key_copies(key_count, channels), value_copies(key_count, value_channels);
        WholeVectors queries(row_count, channels), outs(row_count, value_channels);
        std::vector<const float*> at_key(key_count), at_value(key_count);
        std::vector<QueryRow> copies(rows, rows + row_count);
        for (int64_t i = 0; i < key_count; ++i)
            at_key[i] = key_copies.load(i, keys[i]), at_value[i] = value_copies.load(i, values[i]);
        for (int64_t i = 0; i < row_count; ++i)
            copies[i].query = queries.load(i, rows[i].query), copies[i].out = outs.at(i);
        attend(at_key.data(), at_value.data(), key_count, int(whole(channels)), int(whole(value_channels)),
               copies.data(), row_count, scores);
        for (int64_t i = 0; i < row_count; ++i) outs.store(i, rows[i].out);
    }

    template <int N>
    void attend_tile(const QueryRow* rows, Scores scores) {
        TileKeys seen(rows, N);
        const float* queries[N];
        float* out[N];
        for (int r = 0; r < N; ++r) queries[r] = rows[r].query, out[r] = rows[r].out;
        weights_.resize(TILE * seen.width);
        keys_.products<N>(queries, seen.start, seen.width, scores.scale, weights_.data());
        float inverse[N];
        for (int r = 0; r < N; ++r) inverse[r] = softmax(rows[r], weights_.data() + r * seen.width, seen, scores.softcap);
        weighted_sums<N>(channels_, weights_.data() + seen.start, seen.width, values_ + seen.start,
                         seen.longest - seen.start, inverse, out);
    }

    // Replaces a row's scores by e^(score − max); returns 1 / their sum, in which the sink's is one more.
    static float softmax(const QueryRow& row, float* scores, const TileKeys& seen, float softcap) {
        const float none = -std::numeric_limits<float>::infinity();
        if (softcap != 0.0f)
            for (int64_t i = seen.start; i < seen.width; i += W) store(scores + i, capped(load(scores + i), all(softcap)));
        std::fill(scores + seen.start, scores + row.first, none);
        std::fill(scores + row.keys, scores + seen.width, none);
        Vec top = all(none), total = zero();
        for (int64_t i = seen.start; i < seen.width; i += W) top = max(load(scores + i), top);
        float best = largest(top);
        if (row.sink > best) best = row.sink;
        for (int64_t i = seen.start; i < seen.width; i += W) {
            Vec e = exp(sub(load(scores + i), all(best)));
            total = add(total, e);
            store(scores + i, e);
        }
        float whole = sum(total);
        if (row.sink != NO_SINK) whole += largest(exp(all(row.sink - best)));
        if (row.log_sum) *row.log_sum = best + std::log(whole);
        return 1.0f / whole;
    }

    const float* const* values_ = nullptr;
    int channels_ = 0;  // of values
    Transposed keys_;
    std::vector<float> weights_;
};

// A query row in backward.
struct QueryGradient {
    const float* query;
    const float* grad;  // of the row's output
    const float* out;
    float* grad_query;  // is written
    float log_sum;
    int64_t first, keys;
};

class GroupAttentionBackward {
  public:
    // Adds to grad_keys[i] and grad_values[i]; channels are multiples of W.
    void run(const float* const* keys, const float* const* values, int64_t count, int channels, int value_channels,
             const QueryGradient* rows, int64_t row_count, Scores scores, float* const* grad_keys,
             float* const* grad_values) {
        channels_ = channels, value_channels_ = value_channels;
        keys_.load_vectors(keys, count, channels);
        values_.load_vectors(values, count, value_channels);
        for_tiles(row_count,
                  [&](int64_t i, auto n) { tile<n.value>(keys, rows + i, scores, grad_keys, grad_values); });
    }

  private:
    template <int N>
    void tile(const float* const* keys, const QueryGradient* rows, Scores scores, float* const* grad_keys,
              float* const* grad_values) {
        TileKeys seen(rows, N);
        const float *queries[N], *grads[N];
        float *grad_queries[N], factors[N];
        for (int r = 0; r < N; ++r) {
            queries[r] = rows[r].query, grads[r] = rows[r].grad, grad_queries[r] = rows[r].grad_query;
            factors[r] = scores.scale;
        }
        weights_.resize(TILE * seen.width), slopes_.resize(TILE * seen.width);
        keys_.products<N>(queries, seen.start, seen.width, scores.scale, weights_.data());
        values_.products<N>(grads, seen.start, seen.width, 1.0f, slopes_.data());
        for (int r = 0; r < N; ++r)
            score_slopes(rows[r], seen, scores.softcap, weights_.data() + r * seen.width, slopes_.data() + r * seen.width);
        weighted_sums<N>(channels_, slopes_.data() + seen.start, seen.width, keys + seen.start,
                         seen.longest - seen.start, factors, grad_queries);
        for (int c = 0; c < std::max(channels_, value_channels_); c += W) {
            if (c < channels_ && c < value_channels_)
                add_gradients<N, true, true>(c, queries, grads, seen, scores.scale, grad_keys, grad_values);
            else if (c < channels_)
                add_gradients<N, true, false>(c, queries, grads, seen, scores.scale, grad_keys, grad_values);
            else
                add_gradients<N, false, true>(c, queries, grads, seen, scores.scale, grad_keys, grad_values);
        }
    }

    // Of a row: scores p before the softcap become weights, the gradients d of weights those of scores.
    void score_slopes(const QueryGradient& row, const TileKeys& seen, float softcap, float* p, float* d) const {
        Vec parts = zero();
        for (int c = 0; c < value_channels_; c += W) parts = fma(load(row.grad + c), load(row.out + c), parts);
        Vec mean = all(sum(parts)), top = all(row.log_sum), one = all(1.0f);
        for (int64_t i = seen.start; i < seen.width; i += W) {
            Vec score = load(p + i), slope = one;
            if (softcap != 0.0f) {
                Vec bent = tanh(div(score, all(softcap)));
                score = mul(all(softcap), bent), slope = sub(one, mul(bent, bent));
            }
            Vec weight = exp(sub(score, top));
            store(p + i, weight);
            Vec of_score = mul(weight, sub(load(d + i), mean));
            store(d + i, softcap != 0.0f ? mul(of_score, slope) : of_score);
        }
        for (float* each : {p, d}) {
            std::fill(each + seen.start, each + row.first, 0.0f);
            std::fill(each + row.keys, each + seen.width, 0.0f);
        }
    }

    // W channels from `channel` on of the gradients of keys and values, whose loop leaves the rows in registers.
    template <int N, bool HAS_KEY, bool HAS_VALUE>
    void add_gradients(int channel, const float* const* queries, const float* const* grads, const TileKeys& seen,
                       float scale, float* const* grad_keys, float* const* grad_values) const {
        Vec query[N], grad[N];
        for (int r = 0; r < N; ++r) {
            if constexpr (HAS_KEY) query[r] = load(queries[r] + channel);
            if constexpr (HAS_VALUE) grad[r] = load(grads[r] + channel);
        }
        for (int64_t i = seen.start; i < seen.longest; ++i) {
            if constexpr (HAS_KEY) {
                float* to_key = grad_keys[i] + channel;
                Vec key = zero();
                for (int r = 0; r < N; ++r) key = fma(all(slopes_[r * seen.width + i]), query[r], key);
                store(to_key, fma(key, all(scale), load(to_key)));
            }
            if constexpr (HAS_VALUE) {
                float* to_value = grad_values[i] + channel;
                Vec value = load(to_value);
                for (int r = 0; r < N; ++r) value = fma(all(weights_[r * seen.width + i]), grad[r], value);
                store(to_value, value);
            }
        }
    }

    int channels_ = 0, value_channels_ = 0;
    Transposed keys_, values_;
    std::vector<float> weights_, slopes_;
};

}  // namespace megarl
