// Recurrent states over the runs of a pass, token by token, and the convolution before them. Training, prefill and
// decode call the same kernels, so a token's bits depend on the tokens before it alone.
// A run is (first row, rows, from, to): consecutive rows that continue state `from` (-1: zeros) and leave it in `to`
// (-1: nowhere). Runs are done in order, so one that continues another comes after it.
// Shapes: T rows, H heads, C channels.
#pragma once

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "parallel.h"
#include "rows.h"
#include "tensors.h"

namespace megarl {

constexpr int64_t MAX_TAPS = 8;  // of a convolution
constexpr int COLUMNS = 4;       // vectors of a state's row that are kept in registers

struct Run {
    int64_t first, rows, from, to;
};

// The rows of an int64 tensor [N, 4], checked against the number of rows and states.
inline const Run* runs_of(const Tensor& runs, int64_t rows, int64_t states) {
    TORCH_CHECK(runs.dim() == 2 && runs.size(1) == 4, "megarl kernels: runs [N, 4]");
    auto all_runs = reinterpret_cast<const Run*>(integers(runs));
    for (int64_t i = 0; i < runs.size(0); ++i) {
        const Run& run = all_runs[i];
        TORCH_CHECK(run.first >= 0 && run.rows >= 0 && run.first + run.rows <= rows && run.from < states &&
                        run.to < states, "megarl kernels: a run of rows or states that are not there");
    }
    return all_runs;
}

// x [T, C], its rows apart by any stride, weight [taps, C] and perhaps bias [C] -> the causal convolution of each channel
// [T, C], of which the silu if it activates; states [slots, taps - 1, C]: the last inputs.
inline Tensor causal_convolution(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
                                 const Tensor& runs, const Tensor& states, bool activates) {
    int64_t channels = x.size(1), taps = weight.size(0), stride = x.stride(0), count = runs.size(0);
    TORCH_CHECK(x.scalar_type() == at::kFloat && x.stride(1) == 1 && weight.size(1) == channels && taps <= MAX_TAPS &&
                    (!bias || bias->numel() == channels),
                "megarl::causal_convolution: sizes do not fit");
    Tensor out = at::empty({x.size(0), channels}, weight.options().memory_format(std::nullopt));
    const float *from = x.const_data_ptr<float>(), *weights = floats(weight);
    const float* biases = bias ? floats(*bias) : nullptr;
    float *to = mutable_floats(out), *state = mutable_floats(states);
    const Run* all_runs = runs_of(runs, x.size(0), states.size(0));
    parallel_parts((channels + W - 1) / W, threads_for(x.size(0) * channels * ELEMENT_WORK), [&](int64_t begin, int64_t end) {
        for (int64_t block = begin; block < end; ++block) {
            int64_t c = block * W;
            int width = int(std::min<int64_t>(W, channels - c));
            for (int64_t r = 0; r < count; ++r) {
                const Run& run = all_runs[r];
                Vec past[MAX_TAPS];
                for (int64_t k = 0; k + 1 < taps; ++k)
                    past[k] = run.from < 0 ? zero() : load_some(state + (run.from * (taps - 1) + k) * channels + c, width);
                for (int64_t t = run.first; t < run.first + run.rows; ++t) {
                    past[taps - 1] = load_some(from + t * stride + c, width);
                    Vec sum = biases ? load_some(biases + c, width) : zero();
                    for (int64_t k = 0; k < taps; ++k) sum = fma(past[k], load_some(weights + k * channels + c, width), sum);
                    store_some(to + t * channels + c, activates ? silu(sum) : sum, width);
                    for (int64_t k = 0; k + 1 < taps; ++k) past[k] = past[k + 1];
                }
                if (run.to >= 0)
                    for (int64_t k = 0; k + 1 < taps; ++k)
                        store_some(state + (run.to * (taps - 1) + k) * channels + c, past[k], width);
            }
        }
    });
    return out;
}

// The tokens of a run backwards: its states are computed again, in chunks. `state`, of `size` numbers: the one that it
// begins with; forward(t, state) changes a state by a token, backward(t, state) gets the one before it.
template <typename Forward, typename Backward>
inline void run_backward(const Run& run, int64_t size, const float* state, std::vector<float>& scratch,
                         const Forward& forward, const Backward& backward) {
    constexpr int64_t CHUNK = 32;  // tokens whose states are kept at a time
    int64_t chunks = (run.rows + CHUNK - 1) / CHUNK;
    scratch.resize((chunks + CHUNK) * size);
    float *starts = scratch.data(), *states = starts + chunks * size;
    std::copy_n(state, size, states);
    for (int64_t i = 0; i < run.rows; ++i) {
        if (i % CHUNK == 0) std::copy_n(states, size, starts + i / CHUNK * size);
        if (i / CHUNK == chunks - 1) break;  // the last chunk is computed again first
        forward(run.first + i, states);
    }
    for (int64_t c = chunks - 1; c >= 0; --c) {
        int64_t first = run.first + c * CHUNK, rows = std::min(CHUNK, run.first + run.rows - first);
        std::copy_n(starts + c * size, size, states);
        for (int64_t i = 0; i + 1 < rows; ++i) {
            std::copy_n(states + i * size, size, states + (i + 1) * size);
            forward(first + i, states + (i + 1) * size);
        }
        for (int64_t i = rows - 1; i >= 0; --i) backward(first + i, states + i * size);
    }
}

// All runs of one head forwards: step(t, state) is done for each token. `kept`: [slots, H, size] states; `own`: scratch
// memory of `size`.
template <typename Step>
inline void runs_forward(const Run* runs, int64_t count, int64_t h, int64_t heads, int64_t size, float* kept, float* own,
                         const Step& step) {
    for (int64_t r = 0; r < count; ++r) {
        const Run& run = runs[r];
        float* state = run.from >= 0 && run.from == run.to ? kept + (run.from * heads + h) * size : own;
        if (run.from < 0) std::fill_n(own, size, 0.0f);
        else if (run.from != run.to) std::copy_n(kept + (run.from * heads + h) * size, size, state);
        for (int64_t t = run.first; t < run.first + run.rows; ++t) step(t, state);
        if (run.to >= 0 && run.from != run.to) std::copy_n(state, size, kept + (run.to * heads + h) * size);
    }
}

// All runs of one head backwards: one(run, state, state_grad) gets the state that a run begins with and the gradient of
// the one that it leaves, which becomes that of the first. `grads`: [slots, H, size], zeros at first.
template <typename One>
inline void runs_backward(const Run* runs, int64_t count, int64_t h, int64_t heads, int64_t size, const float* kept,
                          float* grads, const One& one) {
    std::vector<float> zeros(size), state_grad(size);
    for (int64_t r = count - 1; r >= 0; --r) {
        const Run& run = runs[r];
        if (run.to >= 0) std::copy_n(grads + (run.to * heads + h) * size, size, state_grad.data());
        else std::fill(state_grad.begin(), state_grad.end(), 0.0f);
        one(run, run.from < 0 ? zeros.data() : kept + (run.from * heads + h) * size, state_grad.data());
        if (run.from < 0) continue;
        float* total = grads + (run.from * heads + h) * size;
        for (int64_t i = 0; i < size; ++i) total[i] += state_grad[i];
    }
}

// Sizes of a rule over rows [T, C]: two vectors of `keys` numbers of each of G groups, `values` numbers of each of H
// heads, whose states have keys · values numbers.
struct RuleSizes {
    int64_t rows, channels, groups, heads, keys, values, size;
    RuleSizes(const Tensor& x, const Tensor& of_heads, int64_t groups, int64_t keys)
        : rows(x.size(0)), channels(x.size(1)), groups(groups), heads(of_heads.size(1)), keys(keys),
          values((channels - 2 * groups * keys) / heads), size(keys * values) {
        TORCH_CHECK(2 * groups * keys + heads * values == channels && values % W == 0 && heads % groups == 0,
                    "megarl kernels: sizes of groups and heads do not fit");
    }
    int64_t at_head(int64_t t, int64_t h) const { return t * heads + h; }
    int64_t at_group(int64_t t, int64_t h) const { return t * channels + h / (heads / groups) * keys; }
};

// What the rows read [T, H, V] from states [slots, H, K, V] by a rule: step(sizes, t, h, state, scratch, out) does one
// token of one head, with `work` multiply-adds for a number of the state, and scratch memory of 2 · keys.
template <typename Step>
inline Tensor rule_forward(const RuleSizes& s, const Tensor& x, const Tensor& runs, const Tensor& states, int64_t work,
                           const Step& step) {
    Tensor out = at::empty({s.rows, s.heads, s.values}, x.options().memory_format(std::nullopt));
    float *to = mutable_floats(out), *kept = mutable_floats(states);
    const Run* all_runs = runs_of(runs, s.rows, states.size(0));
    parallel_parts(s.heads, threads_for(s.rows * s.heads * s.size * work), [&](int64_t begin, int64_t end) {
        std::vector<float> own(s.size), scratch(2 * s.keys);
        for (int64_t h = begin; h < end; ++h)
            runs_forward(all_runs, runs.size(0), h, s.heads, s.size, kept, own.data(), [&](int64_t t, float* state) {
                step(t, h, state, scratch.data(), to + s.at_head(t, h) * s.values);
            });
    });
    return out;
}

// What a head's backward pass needs beside its states: rows [T, C], one or more numbers of each head [T, H·D] and one
// [T, H], the gradient of what was read [T, H, V]; and gradients of the first three.
struct RuleGradients {
    RuleSizes s;
    const float *x, *first, *second, *grad;
    float *x_grad, *first_grad, *second_grad;
};

// Gradients of x and of the numbers of each head; one(gradients, run, h, state, state_grad, scratch) as of
// `runs_backward`. `states`: what the runs left there, of the pass alone.
template <typename One>
inline std::tuple<Tensor, Tensor, Tensor> rule_backward(const Tensor& grad, const Tensor& x, const Tensor& first,
                                                        const Tensor& second, int64_t groups, int64_t keys,
                                                        const Tensor& runs, const Tensor& states, int64_t work,
                                                        const One& one) {
    RuleSizes s(x, second, groups, keys);
    auto options = x.options().memory_format(std::nullopt);
    Tensor x_grad = at::zeros({s.rows, s.channels}, options);
    Tensor first_grad = at::empty(first.sizes(), options), second_grad = at::empty({s.rows, s.heads}, options);
    Tensor state_grads = at::zeros({states.size(0), s.heads, keys, s.values}, options);
    RuleGradients g{s, floats(x), floats(first), floats(second), floats(grad), mutable_floats(x_grad),
                    mutable_floats(first_grad), mutable_floats(second_grad)};
    const float* kept = floats(states);
    float* kept_grads = mutable_floats(state_grads);
    const Run* all_runs = runs_of(runs, s.rows, states.size(0));
    parallel_parts(groups, threads_for(s.rows * s.heads * s.size * work), [&](int64_t begin, int64_t end) {
        std::vector<float> scratch;
        for (int64_t h = begin * (s.heads / groups); h < end * (s.heads / groups); ++h)
            runs_backward(all_runs, runs.size(0), h, s.heads, s.size, kept, kept_grads,
                          [&](const Run& run, const float* state, float* state_grad) {
                              one(g, run, h, state, state_grad, scratch);
                          });
    });
    return {x_grad, first_grad, second_grad};
}

// softplus of a number of a head, as of torch.
inline float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

}  // namespace megarl
