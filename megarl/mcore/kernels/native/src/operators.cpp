// PyTorch operators `megarl::…` over the kernels of this folder; all tensors are float32 or int64, on the CPU.
// Shapes: T tokens or rows, H query heads in G groups of R, D channels per head.
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include "attention.h"
#include "chosen_keys.h"
#include "decode.h"
#include "delta_rule.h"
#include "gemm.h"
#include "parallel.h"
#include "rotation.h"
#include "rows.h"
#include "sampling.h"
#include "state_space.h"
#include "tensors.h"

namespace megarl {

int thread_count() { return omp_in_parallel() ? 1 : omp_get_max_threads(); }

constexpr int64_t PARALLEL_WORK = 1 << 20;  // multiply-adds from which a kernel uses all threads

int64_t threads_for(int64_t work) { return work < PARALLEL_WORK ? 1 : thread_count(); }

namespace {

// weight [N, K] of any strides -> [panels, K, PANEL].
Tensor pack_weight(const Tensor& weight) {
    Matrix from = matrix(weight);
    Tensor packed = at::empty({panels_of(weight.size(0)), weight.size(1), PANEL}, weight.options().memory_format(std::nullopt));
    pack(from, weight.size(0), weight.size(1), packed.mutable_data_ptr<float>());
    return packed;
}

// Memory […, width] of the shape of x but for its last dimension.
Tensor empty_rows(const Tensor& x, int64_t width) {
    auto sizes = x.sizes().vec();
    sizes.back() = width;
    return at::empty(sizes, x.options());
}

// x […, K], contiguous, and weight [N, K] of any strides -> […, N]. `packed`: the weight as of `pack_weight`.
Tensor linear(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& packed,
              const std::optional<Tensor>& bias) {
    int64_t k = weight.size(1), n = weight.size(0), rows = k ? x.numel() / k : 0;
    TORCH_CHECK(x.size(-1) == k && (!packed || (packed->size(0) == panels_of(n) && packed->size(1) == k)),
                "megarl::linear: sizes do not fit");
    Tensor out = empty_rows(x, n);
    Matrix from{floats(x), k, 1};
    float* to = out.mutable_data_ptr<float>();
    const float* added = bias ? floats(*bias) : nullptr;
    if (packed) gemm(from, rows, k, floats(*packed), n, to, n, added);
    else gemm_unpacked(from, rows, k, matrix(weight), n, to, n, added, false);
    return out;
}

// Adds gradᵀ · x of grad [T, N] and x [T, K] to `sum` [N, K].
void add_weight_gradient(const Tensor& sum, const Tensor& grad, const Tensor& x) {
    int64_t n = grad.size(1), k = x.size(1), tokens = grad.size(0);
    TORCH_CHECK(x.size(0) == tokens && sum.numel() == n * k, "megarl::add_weight_gradient: sizes do not fit");
    gemm_unpacked(transposed(grad), n, tokens, transposed(x), k, mutable_floats(sum), k, nullptr, true);
}

// x […, H] and weight [H] -> the same shape, and […, 1] reciprocal root mean squares.
std::tuple<Tensor, Tensor> rms_norm_rows(const Tensor& x, const Tensor& weight, double eps) {
    int64_t width = x.size(-1), rows = x.numel() / std::max<int64_t>(width, 1);
    Tensor out = empty_rows(x, width), scales = empty_rows(x, 1);
    const float *from = floats(x), *gain = floats(weight);
    float *to = mutable_floats(out), *scale = mutable_floats(scales);
    parallel_for(rows, rows * width * ELEMENT_WORK, [&](int64_t i) {
        scale[i] = rms_norm(from + i * width, gain, width, float(eps), to + i * width);
    });
    return {out, scales};
}

// x […, 2F] -> […, F].
Tensor swiglu_rows(const Tensor& x) {
    int64_t width = x.size(-1) / 2, rows = x.numel() / std::max<int64_t>(2 * width, 1);
    Tensor out = empty_rows(x, width);
    const float* from = floats(x);
    float* to = mutable_floats(out);
    parallel_for(rows, rows * width * ELEMENT_WORK, [&](int64_t i) {
        swiglu(from + 2 * i * width, from + (2 * i + 1) * width, width, to + i * width);
    });
    return out;
}

Tensor swiglu_rows_backward(const Tensor& grad, const Tensor& x) {
    int64_t width = x.size(-1) / 2, rows = x.numel() / std::max<int64_t>(2 * width, 1);
    Tensor out = at::empty(x.sizes(), x.options());
    const float *from = floats(x), *slope = floats(grad);
    float* to = mutable_floats(out);
    parallel_for(rows, rows * width * ELEMENT_WORK, [&](int64_t i) {
        const float *gate = from + 2 * i * width, *up = gate + width;
        swiglu_backward(slope + i * width, gate, up, width, to + 2 * i * width, to + (2 * i + 1) * width);
    });
    return out;
}

// ---- attention of a segment batch ----

// Sizes and pointers of a segment batch: n segments, padded to Q queries and K keys, with m real queries.
struct SegmentRows {
    int64_t n, q, k, m;
    const int64_t *queries, *keys, *last_keys, *real;
    std::vector<int64_t> bounds;  // [n + 1] first index of `real` of each segment

    SegmentRows(const Tensor& queries, const Tensor& keys, const std::optional<Tensor>& last_keys, const Tensor& real)
        : n(queries.size(0)), q(queries.size(1)), k(keys.size(1)), m(real.size(0)), queries(integers(queries)),
          keys(integers(keys)), last_keys(last_keys ? integers(*last_keys) : nullptr), real(integers(real)),
          bounds(n + 1) {
        for (int64_t i = 0; i <= n; ++i) bounds[i] = std::lower_bound(this->real, this->real + m, i * q) - this->real;
    }
    int64_t seen(int64_t i, int64_t j) const { return (last_keys ? last_keys[i * q + j] : j) + 1; }
    // Calls f(query among the rank's tokens, keys up to its last one) for the real queries of segment i.
    template <typename F>
    void for_queries(int64_t i, const F& f) const {
        for (int64_t r = bounds[i]; r < bounds[i + 1]; ++r) f(queries[real[r]], seen(i, real[r] - i * q));
    }
    // Keys that these see.
    int64_t longest(int64_t i) const {
        int64_t found = 0;
        for_queries(i, [&](int64_t, int64_t keys) { found = std::max(found, keys); });
        return found;
    }
};

struct HeadView {  // [T, heads, D] whose last dimension is contiguous
    float* data;
    int64_t token, head;
    explicit HeadView(const Tensor& x)
        : data(const_cast<float*>(x.const_data_ptr<float>())), token(x.stride(0)), head(x.stride(1)) {
        TORCH_CHECK(x.scalar_type() == at::kFloat && x.dim() == 3 && x.stride(2) == 1,
                    "megarl kernels: heads [T, heads, D] in float32");
    }
    float* at(int64_t t, int64_t h) const { return data + t * token + h * head; }
};

Scores scores_of(double scale, std::optional<double> softcap) { return {float(scale), float(softcap.value_or(0.0))}; }

const float* sinks_of(const std::optional<Tensor>& sinks, int64_t heads) {
    TORCH_CHECK(!sinks || sinks->numel() == heads, "megarl kernels: a sink for each head");
    return sinks ? floats(*sinks) : nullptr;
}

// query [T, H, D], key [T', G, D], value [T', G, V]. A query sees the last `window` keys up to its last one. Writes the
// outputs of the real queries to their rows of `out` [T, H, V], and their log-sums to those of `sums` [T, H].
void segment_attention(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& queries,
                       const Tensor& keys, const std::optional<Tensor>& last_keys, const Tensor& real, double scale,
                       std::optional<int64_t> window, std::optional<double> softcap, const std::optional<Tensor>& sinks,
                       const Tensor& out, const std::optional<Tensor>& sums) {
    SegmentRows s(queries, keys, last_keys, real);
    int64_t heads = query.size(1), groups = key.size(1), channels = query.size(2), shared = heads / groups;
    int64_t value_channels = value.size(2), limit = window.value_or(0);
    TORCH_CHECK(key.size(2) == channels && value.size(1) == groups && out.size(2) == value_channels,
                "megarl::segment_attention: sizes do not fit");
    HeadView q(query), k(key), v(value), to(out);
    const float* sink = sinks_of(sinks, heads);
    float* log_sums = sums ? mutable_floats(*sums) : nullptr;
    int64_t work = s.m * s.k * heads * channels;
    parallel_parts(s.n * groups, threads_for(work), [&](int64_t first, int64_t last) {
        static thread_local GroupAttention attention;
        std::vector<const float*> at_key, at_value;
        std::vector<QueryRow> rows;
        for (int64_t task = first; task < last; ++task) {
            int64_t i = task / groups, g = task % groups, longest = s.longest(i);
            at_key.resize(longest), at_value.resize(longest), rows.clear();
            for (int64_t j = 0; j < longest; ++j) {
                at_key[j] = k.at(s.keys[i * s.k + j], g);
                at_value[j] = v.at(s.keys[i * s.k + j], g);
            }
            s.for_queries(i, [&](int64_t at, int64_t seen) {
                for (int64_t h = g * shared; h < (g + 1) * shared; ++h)
                    rows.push_back({q.at(at, h), to.at(at, h), log_sums ? log_sums + at * heads + h : nullptr,
                                    first_of(seen, limit), seen, sink ? sink[h] : NO_SINK});
            });
            attention.attend(at_key.data(), at_value.data(), longest, int(channels), int(value_channels), rows.data(),
                             int64_t(rows.size()), scores_of(scale, softcap));
        }
    });
}

// Gradients of query, key and value; `grad`, `out` and `sums` as in `segment_attention`, whose sinks `sums` have.
// A query may be in one segment only; keys may be in several, whose gradients are added in their order.
void segment_attention_backward(const Tensor& grad, const Tensor& query, const Tensor& key, const Tensor& value,
                                const Tensor& queries, const Tensor& keys, const std::optional<Tensor>& last_keys,
                                const Tensor& real, const Tensor& out, const Tensor& sums, double scale,
                                std::optional<int64_t> window, std::optional<double> softcap,
                                const Tensor& grad_query, const Tensor& grad_key, const Tensor& grad_value) {
    SegmentRows s(queries, keys, last_keys, real);
    int64_t heads = query.size(1), groups = key.size(1), channels = query.size(2), shared = heads / groups;
    int64_t value_channels = value.size(2), limit = window.value_or(0);
    HeadView q(query), k(key), v(value), g_out(grad), o(out), g_query(grad_query), g_key(grad_key), g_value(grad_value);
    const float* log_sums = floats(sums);
    int64_t work = 2 * s.m * s.k * heads * channels;
    parallel_parts(groups, threads_for(work), [&](int64_t first, int64_t last) {
        static thread_local GroupAttentionBackward backward;
        std::vector<const float*> at_key, at_value;
        std::vector<float*> to_key, to_value;
        std::vector<QueryGradient> rows;
        for (int64_t g = first; g < last; ++g)
            for (int64_t i = 0; i < s.n; ++i) {
                int64_t longest = s.longest(i);
                at_key.resize(longest), at_value.resize(longest), to_key.resize(longest), to_value.resize(longest);
                rows.clear();
                for (int64_t j = 0; j < longest; ++j) {
                    int64_t at = s.keys[i * s.k + j];
                    at_key[j] = k.at(at, g), at_value[j] = v.at(at, g);
                    to_key[j] = g_key.at(at, g), to_value[j] = g_value.at(at, g);
                }
                s.for_queries(i, [&](int64_t at, int64_t seen) {
                    for (int64_t h = g * shared; h < (g + 1) * shared; ++h)
                        rows.push_back({q.at(at, h), g_out.at(at, h), o.at(at, h), g_query.at(at, h),
                                        log_sums[at * heads + h], first_of(seen, limit), seen});
                });
                backward.run(at_key.data(), at_value.data(), longest, int(channels), int(value_channels), rows.data(),
                             int64_t(rows.size()), scores_of(scale, softcap), to_key.data(), to_value.data());
            }
    });
}

// heads [q, I, C] and weights [q, I] of queries that see the first `seen` [q] of K keys, which are rows [K] of `keys`
// [T', C], and choose `count` of them -> uint8 [q, ⌈K / 8⌉], a bit for each key.
Tensor choose_keys(const Tensor& heads, const Tensor& weights, const Tensor& keys, const Tensor& rows,
                   const Tensor& seen, int64_t count) {
    int64_t n = heads.size(0), number = heads.size(1), channels = heads.size(2), k = rows.numel();
    TORCH_CHECK(channels % W == 0 && keys.size(1) == channels && keys.stride(1) == 1 && seen.numel() == n &&
                    keys.scalar_type() == at::kFloat && weights.numel() == n * number,
                "megarl::choose_keys: sizes do not fit");
    int64_t width = (k + 7) / 8;
    Tensor bits = at::zeros({n, width}, heads.options().memory_format(std::nullopt).dtype(at::kByte));
    const float *head = floats(heads), *weight = floats(weights), *key = keys.const_data_ptr<float>();
    const int64_t *row = integers(rows), *limit = integers(seen), stride = keys.stride(0);
    uint8_t* out = bits.mutable_data_ptr<uint8_t>();
    std::vector<const float*> at(k);
    for (int64_t j = 0; j < k; ++j) at[j] = key + row[j] * stride;
    float scale = 1.0f / std::sqrt(float(channels));
    parallel_parts(n, threads_for(n * k * number * channels), [&](int64_t first, int64_t last) {
        static thread_local KeyChooser chooser;
        std::vector<IndexQuery> queries;
        for (int64_t start = first; start < last; start += QUERY_TILE) {
            queries.clear();
            for (int64_t i = start; i < std::min(start + QUERY_TILE, last); ++i)
                queries.push_back({head + i * number * channels, weight + i * number, limit[i], out + i * width});
            chooser.run(at.data(), int(channels), queries.data(), int64_t(queries.size()), int(number), scale, count);
        }
    });
    return bits;
}

// The chosen ones of rows [K], in their order, of queries that chose `count` each: bits of `choose_keys` -> [q, count].
Tensor chosen_rows(const Tensor& bits, const Tensor& rows, int64_t count) {
    int64_t n = bits.size(0), width = bits.size(1);
    TORCH_CHECK(bits.scalar_type() == at::kByte && bits.is_contiguous() && width == (rows.numel() + 7) / 8,
                "megarl::chosen_rows: sizes do not fit");
    Tensor found = at::empty({n, count}, rows.options());
    const uint8_t* byte = bits.const_data_ptr<uint8_t>();
    const int64_t* row = integers(rows);
    int64_t* out = found.mutable_data_ptr<int64_t>();
    parallel_for(n, n * width * ELEMENT_WORK, [&](int64_t i) {
        int64_t* to = out + i * count;
        for (int64_t j = 0; j < width; ++j)
            for (unsigned rest = byte[i * width + j]; rest; rest &= rest - 1) *to++ = row[8 * j + __builtin_ctz(rest)];
    });
    return found;
}

// ---- the paged cache and decode steps ----

PagedReads paged_reads(const Tensor& cache, const Tensor& pages, const Tensor& keys, int64_t window = 0) {
    TORCH_CHECK(cache.dim() == 5 && cache.size(3) == 2, "megarl kernels: cache [B, b, G, 2, D]");
    return {floats(cache), cache.size(1), cache.size(2), cache.size(4), integers(pages), pages.size(1), integers(keys),
            window};
}

// query [T, G, R, D] (channels and heads contiguous), a layer's cache, pages [T, P], keys [T] and starts [n + 1] of the
// rows with the same pages -> [T, G · R · D].
Tensor cache_attention(const Tensor& query, const Tensor& cache, const Tensor& pages, const Tensor& keys,
                       const Tensor& starts, double scale, std::optional<int64_t> window, std::optional<double> softcap,
                       const std::optional<Tensor>& sinks) {
    TORCH_CHECK(query.stride(3) == 1 && query.stride(2) == query.size(3), "megarl::cache_attention: heads not adjacent");
    Tensor out = at::empty({query.size(0), query.numel() / query.size(0)}, cache.options().memory_format(std::nullopt));
    paged_attention(query.const_data_ptr<float>(), query.stride(0), query.stride(1),
                    paged_reads(cache, pages, keys, window.value_or(0)), integers(starts), starts.numel() - 1,
                    query.size(2), scores_of(scale, softcap), sinks_of(sinks, query.size(1) * query.size(2)),
                    out.mutable_data_ptr<float>());
    return out;
}

constexpr int64_t LAYER_WEIGHTS = 9;

// hidden [T, H], changed in place by all layers. `weights`: LAYER_WEIGHTS per layer, in the order of `Layer`; those that
// a layer lacks are empty.
void decode_layers(const Tensor& hidden, at::TensorList weights, at::TensorList caches, const Tensor& cosines,
                   const Tensor& sines, const Tensor& slots, const Tensor& pages, const Tensor& keys,
                   const Tensor& starts, int64_t query_heads, int64_t ffn, double eps, double scale,
                   std::optional<int64_t> window, double multiplier) {
    int64_t layers = int64_t(caches.size());
    TORCH_CHECK(int64_t(weights.size()) == layers * LAYER_WEIGHTS, "megarl::decode_layers: weights of some layers miss");
    if (!layers) return;
    PagedReads reads = paged_reads(caches[0], pages, keys, window.value_or(0));
    int64_t rows = hidden.size(0);
    TORCH_CHECK(slots.numel() == rows && keys.numel() == rows && pages.size(0) == rows,
                "megarl::decode_layers: slots, keys or pages of other rows");
    Step step{rows,  hidden.size(1), reads.groups, query_heads / reads.groups, reads.channels, ffn, float(eps),
              float(scale), float(multiplier), cosines.numel() ? floats(cosines) : nullptr, sines.numel() ? floats(sines) : nullptr,
              cosines.numel() / std::max<int64_t>(rows, 1), integers(slots), reads, integers(starts),
              starts.numel() - 1};
    DecodeLayers run(step);
    for (int64_t i = 0; i < layers; ++i) {
        auto at = [&](int64_t j) -> const float* {
            const Tensor& weight = weights[i * LAYER_WEIGHTS + j];
            return weight.numel() ? floats(weight) : nullptr;
        };
        run.run({at(0), at(1), at(2), at(3), at(4), at(5), at(6), at(7), at(8), mutable_floats(caches[i])},
                mutable_floats(hidden));
    }
}

// ---- the head ----

// logits [n, V] and tops [n] -> [count, n], the first of Σ e^(x − top), Σ (x − top) e^(x − top), Σ e^2(x − top); writes
// e^(x − top) to `out` [n, V], which may be the logits.
Tensor softmax_sums_rows(const Tensor& logits, const Tensor& tops, const Tensor& out, int64_t count) {
    int64_t n = logits.size(0), width = logits.size(1);
    auto sums_of = count == 1 ? softmax_sums<1> : count == 2 ? softmax_sums<2> : softmax_sums<3>;
    Tensor sums = at::empty({count, n}, logits.options().memory_format(std::nullopt));
    const float *from = floats(logits), *top = floats(tops);
    float *to = mutable_floats(out), *result = mutable_floats(sums);
    parallel_for(n, n * width * ELEMENT_WORK, [&](int64_t i) {
        SoftmaxSums s = sums_of(from + i * width, width, top[i], to + i * width);
        const float found[] = {s.weights, s.shifted, s.squares};
        for (int64_t j = 0; j < count; ++j) result[j * n + i] = found[j];
    });
    return sums;
}

// logits [n, V'], of which the first `vocab` columns are tokens, in `parts` shares of V' / parts columns, as of
// tensor-parallel ranks; numbers [n] float64 in (0, 1), or empty for the most probable token.
// Returns tokens [n], their scaled logit minus the largest one [n], and the softmax's denominators of the parts [n, parts].
std::tuple<Tensor, Tensor, Tensor> sample_rows(const Tensor& logits, double temperature, int64_t vocab, int64_t parts,
                                               const Tensor& numbers) {
    int64_t n = logits.size(0), width = logits.size(1), share = width / parts;
    Tensor tokens = at::empty({n}, logits.options().memory_format(std::nullopt).dtype(at::kLong));
    Tensor chosen = at::empty({n}, logits.options().memory_format(std::nullopt));
    Tensor totals = at::empty({n, parts}, chosen.options());
    const float* from = floats(logits);
    const double* number = numbers.numel() ? numbers.const_data_ptr<double>() : nullptr;
    int64_t* token = tokens.mutable_data_ptr<int64_t>();
    float *difference = mutable_floats(chosen), *total = mutable_floats(totals), divisor = float(temperature);
    parallel_parts(n, threads_for(n * width * ELEMENT_WORK), [&](int64_t first, int64_t last) {
        std::vector<float> scaled(vocab), weights(vocab);
        for (int64_t i = first; i < last; ++i) {
            const float* row = from + i * width;
            if (divisor != 1.0f) {
                for (int64_t j = 0; j < vocab; ++j) scaled[j] = row[j] / divisor;
                row = scaled.data();
            }
            float top = largest_of(row, vocab);
            for (int64_t p = 0; p < parts; ++p) {
                int64_t start = std::min(p * share, vocab), end = std::min((p + 1) * share, vocab);
                total[i * parts + p] =
                    softmax_sums<1>(row + start, end - start, top, weights.data() + start).weights;
            }
            token[i] = number ? inverse_cdf(weights.data(), vocab, number[i]) : argmax(row, vocab);
            difference[i] = row[token[i]] - top;
        }
    });
    return {tokens, chosen, totals};
}

}  // namespace

TORCH_LIBRARY(megarl, m) {
    m.def("pack_weight(Tensor weight) -> Tensor", &pack_weight);
    m.def("linear(Tensor x, Tensor weight, Tensor? packed, Tensor? bias) -> Tensor", &linear);
    m.def("add_weight_gradient(Tensor(a!) sum, Tensor grad, Tensor x) -> ()", &add_weight_gradient);
    m.def("rms_norm(Tensor x, Tensor weight, float eps) -> (Tensor, Tensor)", &rms_norm_rows);
    m.def("rotate(Tensor x, Tensor cosines, Tensor sines, bool is_backward, Tensor(a!) out) -> ()", &rotate_heads);
    m.def("swiglu(Tensor x) -> Tensor", &swiglu_rows);
    m.def("swiglu_backward(Tensor grad, Tensor x) -> Tensor", &swiglu_rows_backward);
    m.def(
        "segment_attention(Tensor query, Tensor key, Tensor value, Tensor queries, Tensor keys, Tensor? last_keys, "
        "Tensor real, float scale, int? window, float? softcap, Tensor? sinks, Tensor(a!) out, Tensor(b!)? sums) -> ()",
        &segment_attention);
    m.def(
        "segment_attention_backward(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor queries, Tensor keys, "
        "Tensor? last_keys, Tensor real, Tensor out, Tensor sums, float scale, int? window, float? softcap, "
        "Tensor(a!) grad_query, Tensor(b!) grad_key, Tensor(c!) grad_value) -> ()",
        &segment_attention_backward);
    m.def(
        "choose_keys(Tensor heads, Tensor weights, Tensor keys, Tensor rows, Tensor seen, int count) -> Tensor",
        &choose_keys);
    m.def("chosen_rows(Tensor bits, Tensor rows, int count) -> Tensor", &chosen_rows);
    m.def(
        "cache_attention(Tensor query, Tensor cache, Tensor pages, Tensor keys, Tensor starts, float scale, int? window, "
        "float? softcap, Tensor? sinks) -> Tensor",
        &cache_attention);
    m.def(
        "decode_layers(Tensor(a!) hidden, Tensor[] weights, Tensor(b!)[] caches, Tensor cosines, Tensor sines, "
        "Tensor slots, Tensor pages, Tensor keys, Tensor starts, int query_heads, int ffn, float eps, float scale, "
        "int? window=None, float multiplier=1.0) -> ()",
        &decode_layers);
    m.def("softmax_sums(Tensor logits, Tensor tops, Tensor(a!) out, int count) -> Tensor", &softmax_sums_rows);
    m.def(
        "sample(Tensor logits, float temperature, int vocab, int parts, Tensor numbers) -> (Tensor, Tensor, Tensor)",
        &sample_rows);
    m.def(
        "causal_convolution(Tensor x, Tensor weight, Tensor? bias, Tensor runs, Tensor(a!) states, bool activates=True) "
        "-> Tensor",
        &causal_convolution);
    m.def("delta_rule_gates(Tensor a, Tensor b, Tensor decay_logs, Tensor biases, float? bound) -> (Tensor, Tensor)",
          &delta_rule_gates);
    m.def(
        "delta_rule(Tensor x, Tensor decays, Tensor betas, int groups, int keys, Tensor runs, Tensor(a!) states) "
        "-> Tensor",
        &delta_rule);
    m.def(
        "delta_rule_backward(Tensor grad, Tensor x, Tensor decays, Tensor betas, int groups, int keys, Tensor runs, "
        "Tensor states) -> (Tensor, Tensor, Tensor)",
        &delta_rule_backward);
    m.def(
        "state_space_gates(Tensor steps, Tensor decay_logs, Tensor biases, float min_step) -> (Tensor, Tensor)",
        &state_space_gates);
    m.def(
        "state_space(Tensor x, Tensor steps, Tensor decays, Tensor skips, int groups, int keys, Tensor runs, "
        "Tensor(a!) states) -> Tensor",
        &state_space);
    m.def(
        "state_space_backward(Tensor grad, Tensor x, Tensor steps, Tensor decays, int groups, int keys, Tensor runs, "
        "Tensor states) -> (Tensor, Tensor, Tensor)",
        &state_space_backward);
}

}  // namespace megarl
