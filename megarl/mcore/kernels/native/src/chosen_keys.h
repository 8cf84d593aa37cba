// Which keys a query attends to in layers with a lightning indexer (DeepSeek-V3.2, 2512.02556 §2.1), fp32.
//
// A score is Σ_h w_h · max(0, q_h · k · scale): a product is one chain over the channels, the sum one chain over the
// heads, both in ascending order. So a score's bits depend on its query and its key alone. The largest ones are chosen,
// of equal ones the first; NaN is the largest number.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "attention.h"

namespace megarl {

constexpr int64_t KEY_TILE = 256;   // keys that stay in the second-level cache
constexpr int64_t QUERY_TILE = 64;  // queries that share them

struct IndexQuery {
    const float* heads;    // [I, C]
    const float* weights;  // [I]
    int64_t seen;          // it sees the first so many keys
    uint8_t* bits;         // receives a bit for each of these: whether it is chosen, the first one in the lowest bit
};

class KeyChooser {
  public:
    // keys[i]: where key i is. Each query sees more than `count` keys, which it chooses; channels are a multiple of W.
    void run(const float* const* keys, int channels, const IndexQuery* queries, int64_t n, int heads, float scale,
             int64_t count) {
        int64_t longest = 0;
        for (int64_t i = 0; i < n; ++i) longest = std::max(longest, queries[i].seen);
        width_ = padded_keys(longest);
        scores_.resize(n * width_);
        for (int64_t at = 0; at < longest; at += KEY_TILE) {
            int64_t size = std::min(KEY_TILE, longest - at);
            keys_.load_vectors(keys + at, size, channels, n * heads <= TILE);
            for (int64_t i = 0; i < n; ++i)
                if (queries[i].seen > at) score(queries[i], padded_keys(size), heads, channels, scale, row(i) + at);
        }
        for (int64_t i = 0; i < n; ++i) choose(row(i), queries[i].seen, count, queries[i].bits);
    }

  private:
    float* row(int64_t i) { return scores_.data() + i * width_; }

    // Scores of a query and the keys in `keys_`.
    void score(const IndexQuery& query, int64_t width, int heads, int channels, float scale, float* scores) {
        products_.resize(TILE * KEY_TILE);
        for (int64_t j = 0; j < width; j += W) store(scores + j, zero());
        for_tiles(heads, [&](int64_t h, auto n) {
            const float* rows[n.value];
            for (int r = 0; r < n.value; ++r) rows[r] = query.heads + (h + r) * channels;
            keys_.template products<n.value>(rows, 0, width, scale, products_.data());
            for (int64_t j = 0; j < width; j += W) {
                Vec sum = load(scores + j);
                for (int r = 0; r < n.value; ++r)
                    sum = fma(all(query.weights[h + r]), max(load(products_.data() + r * width + j), zero()), sum);
                store(scores + j, sum);
            }
        });
    }

    // Bisects the order of the numbers: the border is the largest one that at least `count` reach.
    void choose(const float* scores, int64_t seen, int64_t count, uint8_t* bits) {
        order_.resize(seen);
        std::memcpy(order_.data(), scores, seen * sizeof(float));
        int32_t *x = order_.data(), low = INT32_MAX, high = INT32_MIN;
        for (int64_t j = 0; j < seen; ++j) {  // as whole numbers, in the order of the floats
            x[j] ^= (x[j] >> 31) & INT32_MAX;
            low = std::min(low, x[j]), high = std::max(high, x[j]);
        }
        while (low < high) {
            int32_t middle = int32_t(low + (int64_t(high) - low + 1) / 2);
            int64_t found = at_least(x, seen, middle);
            if (found >= count) low = middle;
            else high = middle - 1;
            if (found == count) break;
        }
        int64_t room = count - (low == INT32_MAX ? 0 : at_least(x, seen, low + 1));  // for those at the border
        for (int64_t j = 0; j < seen; j += 8) {
            uint8_t byte = 0;
            for (int64_t b = 0; b < std::min<int64_t>(8, seen - j); ++b) {
                bool is_equal = x[j + b] == low && room > 0;
                room -= is_equal;
                byte |= uint8_t(is_equal || x[j + b] > low) << b;
            }
            bits[j / 8] = byte;
        }
    }

    static int64_t at_least(const int32_t* x, int64_t count, int32_t limit) {
        int32_t found = 0;
        for (int64_t j = 0; j < count; ++j) found += x[j] >= limit;
        return found;
    }

    Transposed keys_;
    std::vector<float> scores_, products_;
    std::vector<int32_t> order_;
    int64_t width_ = 0;
};

}  // namespace megarl
