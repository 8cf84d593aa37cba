// One decode step of a plain dense model: RMSNorm, grouped-query attention over the paged cache, SwiGLU. It calls the
// functions that training calls, so the bits are the same.
#pragma once

#include <vector>

#include "attention.h"
#include "gemm.h"
#include "rotation.h"
#include "rows.h"

namespace megarl {

// The paged cache [blocks, block, G, 2, D] of one layer and what the rows of a step read of it.
struct PagedReads {
    const float* cache;
    int64_t block_tokens, groups, channels;
    const int64_t* pages;  // [rows, pages_per_row]
    int64_t pages_per_row;
    const int64_t* keys;  // [rows] keys of a row's sequence up to the row
    int64_t window;       // how many of them a row sees, the last ones; 0: all

    int64_t token_stride() const { return groups * 2 * channels; }
    // Keys `start` … `end` − 1 of a row's sequence in a group, and their values. They are far from each other, so the
    // processor does not foresee them: without the prefetch a step with 80 keys a row takes a fifth longer.
    void find(int64_t row, int64_t group, int64_t start, int64_t end, const float** keys_at,
              const float** values_at) const {
        const int64_t* page = pages + row * pages_per_row + start / block_tokens;
        for (int64_t i = start; i < end; ++page) {
            int64_t place = i % block_tokens, stop = std::min(i - place + block_tokens, end);
            const float* key = cache + (*page * block_tokens + place) * token_stride() + group * 2 * channels;
            for (; i < stop; ++i, key += token_stride()) {
                *keys_at++ = key, *values_at++ = key + channels;
                for (int64_t c = 0; c < 2 * channels; c += 16) __builtin_prefetch(key + c);
            }
        }
    }
};

// query [rows] with `row_stride`, group g's R heads at g · group_stride -> out [rows, G, R, D]. `starts` [n + 1]: rows
// starts[i] … starts[i + 1] − 1 have the same pages, and share their reads. `sinks` [G · R] of the heads; null: none.
inline void paged_attention(const float* query, int64_t row_stride, int64_t group_stride, const PagedReads& reads,
                            const int64_t* starts, int64_t n, int64_t heads, Scores scores, const float* sinks,
                            float* out) {
    int64_t groups = reads.groups, channels = reads.channels, seen = 0;
    for (int64_t row = 0; row < starts[n]; ++row) seen += reads.keys[row] - first_of(reads.keys[row], reads.window);
    int64_t work = 2 * seen * groups * (heads + 1) * channels;
    parallel_parts(n * groups, threads_for(work), [&](int64_t first, int64_t last) {
        static thread_local GroupAttention attention;
        std::vector<const float*> keys, values;
        std::vector<QueryRow> rows;
        for (int64_t task = first; task < last; ++task) {
            int64_t i = task / groups, g = task % groups, longest = 0, start = reads.keys[starts[i]];
            for (int64_t row = starts[i]; row < starts[i + 1]; ++row) {
                longest = std::max(longest, reads.keys[row]);
                start = std::min(start, first_of(reads.keys[row], reads.window));
            }
            start = start / W * W;
            rows.clear();
            for (int64_t row = starts[i]; row < starts[i + 1]; ++row) {
                int64_t count = reads.keys[row];
                for (int64_t h = 0; h < heads; ++h)
                    rows.push_back({query + row * row_stride + g * group_stride + h * channels,
                                    out + ((row * groups + g) * heads + h) * channels, nullptr,
                                    first_of(count, reads.window) - start, count - start,
                                    sinks ? sinks[g * heads + h] : NO_SINK});
            }
            keys.resize(longest - start), values.resize(longest - start);
            reads.find(starts[i], g, start, longest, keys.data(), values.data());
            attention.attend(keys.data(), values.data(), longest - start, int(channels), int(channels), rows.data(),
                             int64_t(rows.size()), scores);
        }
    });
}

// Weights of one layer; packed ones as by `pack`.
struct Layer {
    const float *attention_norm, *qkv, *qkv_bias, *query_norm, *key_norm, *proj, *mlp_norm, *fc1, *fc2;
    float* cache;
};

struct Step {
    int64_t rows, hidden, groups, heads, channels, ffn;  // heads: query heads of a group
    float eps, scale, multiplier;  // the last: of what attention and MLP add to the hidden states
    const float *cosines, *sines;  // [rows, rotary]
    int64_t rotary;                // rotated channels; 0 without rotary embeddings
    const int64_t* slots;          // [rows] of the flattened cache for the new keys and values
    PagedReads reads;
    const int64_t* starts;
    int64_t requests;
};

class DecodeLayers {
  public:
    explicit DecodeLayers(const Step& step)
        : s_(step), normed_(s_.rows * s_.hidden), qkv_(s_.rows * qkv_width()), attended_(s_.rows * query_width()),
          output_(s_.rows * s_.hidden), wide_(s_.rows * 2 * s_.ffn), activated_(s_.rows * s_.ffn) {}

    // hidden [rows, H], in place.
    void run(const Layer& layer, float* hidden) {
        norm(hidden, layer.attention_norm);
        product(normed_, s_.hidden, layer.qkv, qkv_width(), qkv_, layer.qkv_bias);
        write_cache(layer);
        PagedReads reads = s_.reads;
        reads.cache = layer.cache;
        paged_attention(qkv_.data(), qkv_width(), (s_.heads + 2) * s_.channels, reads, s_.starts, s_.requests, s_.heads,
                        {s_.scale, 0.0f}, nullptr, attended_.data());
        product(attended_, query_width(), layer.proj, s_.hidden, output_, nullptr);
        add_output(hidden);
        norm(hidden, layer.mlp_norm);
        product(normed_, s_.hidden, layer.fc1, 2 * s_.ffn, wide_, nullptr);
        for_rows(s_.ffn, [&](int64_t i) {
            const float* gate = wide_.data() + i * 2 * s_.ffn;
            swiglu(gate, gate + s_.ffn, s_.ffn, activated_.data() + i * s_.ffn);
        });
        product(activated_, s_.ffn, layer.fc2, s_.hidden, output_, nullptr);
        add_output(hidden);
    }

  private:
    int64_t qkv_width() const { return s_.groups * (s_.heads + 2) * s_.channels; }
    int64_t query_width() const { return s_.groups * s_.heads * s_.channels; }

    template <typename F>
    void for_rows(int64_t width, const F& f) {
        parallel_for(s_.rows, s_.rows * width * ELEMENT_WORK, f);
    }

    void norm(const float* hidden, const float* weight) {
        for_rows(s_.hidden, [&](int64_t i) {
            rms_norm(hidden + i * s_.hidden, weight, s_.hidden, s_.eps, normed_.data() + i * s_.hidden);
        });
    }

    void product(const std::vector<float>& x, int64_t k, const float* weight, int64_t n, std::vector<float>& out,
                 const float* bias) {
        gemm({x.data(), k, 1}, s_.rows, k, weight, n, out.data(), n, bias);
    }

    // Norms and rotates queries and keys; writes keys and values.
    void write_cache(const Layer& layer) {
        for_rows(qkv_width(), [&](int64_t i) {
            int64_t half = s_.rotary / 2;
            const float *cosines = s_.cosines + i * s_.rotary, *sines = s_.sines + i * s_.rotary;
            for (int64_t g = 0; g < s_.groups; ++g) {
                float* group = qkv_.data() + i * qkv_width() + g * (s_.heads + 2) * s_.channels;
                for (int64_t h = 0; h <= s_.heads; ++h) {
                    float* head = group + h * s_.channels;
                    const float* weight = h < s_.heads ? layer.query_norm : layer.key_norm;
                    if (weight) rms_norm(head, weight, s_.channels, s_.eps, head);
                    rotate(head, cosines, sines, sines + half, half, head);
                }
                float* to = layer.cache + s_.slots[i] * s_.reads.token_stride() + g * 2 * s_.channels;
                std::copy_n(group + s_.heads * s_.channels, 2 * s_.channels, to);
            }
        });
    }

    void add_output(float* hidden) {
        for_rows(s_.hidden, [&](int64_t i) {
            float *to = hidden + i * s_.hidden, *from = output_.data() + i * s_.hidden;
            for (int64_t j = 0; j < s_.hidden; ++j) to[j] += s_.multiplier * from[j];
        });
    }

    const Step& s_;
    std::vector<float> normed_, qkv_, attended_, output_, wide_, activated_;
};

}  // namespace megarl
