// Mamba-2's state space (2405.21060 eq. 1 with scalar decays) token by token, over the runs of a pass.
// Shapes: T rows, G groups with an input and an output vector of N numbers (B and C), H heads of P channels,
// C = H·P + 2·G·N: channels of all heads, then the groups' B, then their C.
#pragma once

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include "runs.h"

namespace megarl {

// steps [T, H], their rows apart by any stride, decay_logs and biases [H] -> Δ = softplus(step + bias), at least
// min_step, and decays e^(-e^decay_log · Δ), both [T, H].
inline std::tuple<Tensor, Tensor> state_space_gates(const Tensor& steps, const Tensor& decay_logs, const Tensor& biases,
                                                    double min_step) {
    int64_t rows = steps.size(0), heads = steps.size(1);
    auto options = decay_logs.options().memory_format(std::nullopt);
    Tensor sizes = at::empty({rows, heads}, options), decays = at::empty({rows, heads}, options);
    TORCH_CHECK(steps.scalar_type() == at::kFloat && steps.stride(1) == 1, "megarl::state_space_gates: float32 rows");
    const float *from = steps.const_data_ptr<float>(), *logs = floats(decay_logs), *bias = floats(biases);
    float *size = mutable_floats(sizes), *decay = mutable_floats(decays);
    for (int64_t t = 0; t < rows; ++t)
        for (int64_t h = 0; h < heads; ++h) {
            float x = from[t * steps.stride(0) + h] + bias[h], softplus = x > 20.0f ? x : std::log1p(std::exp(x));
            size[t * heads + h] = softplus < float(min_step) ? float(min_step) : softplus;
            decay[t * heads + h] = std::exp(-std::exp(logs[h]) * size[t * heads + h]);
        }
    return {sizes, decays};
}

// One token of one head: state [N, P] -> decay · state + b ⊗ step · x; writes c · state + skip · x.
inline void space_step(float* state, const float* b, const float* c, const float* x, float step, float decay, float skip,
                       int64_t keys, int64_t values, float* out) {
    for (int64_t j = 0; j < values; j += COLUMNS * W) {
        int parts = int(std::min<int64_t>(COLUMNS, (values - j) / W));
        Vec change[COLUMNS], read[COLUMNS];
        for (int p = 0; p < parts; ++p) {
            change[p] = mul(load(x + j + p * W), all(step));
            read[p] = mul(load(x + j + p * W), all(skip));
        }
        for (int64_t i = 0; i < keys; ++i)
            for (int p = 0; p < parts; ++p) {
                float* at = state + i * values + j + p * W;
                Vec next = fma(all(b[i]), change[p], mul(load(at), all(decay)));
                store(at, next);
                read[p] = fma(next, all(c[i]), read[p]);
            }
        for (int p = 0; p < parts; ++p) store(out + j + p * W, read[p]);
    }
}

// x [T, C] after the convolution; steps and decays [T, H], skips [H] -> [T, H, P]; states [slots, H, N, P].
inline Tensor state_space(const Tensor& x, const Tensor& steps, const Tensor& decays, const Tensor& skips, int64_t groups,
                          int64_t keys, const Tensor& runs, const Tensor& states) {
    int64_t rows = x.size(0), channels = x.size(1), heads = decays.size(1), count = runs.size(0);
    int64_t values = (channels - 2 * groups * keys) / heads, size = keys * values;
    TORCH_CHECK(2 * groups * keys + heads * values == channels && values % W == 0 && heads % groups == 0,
                "megarl::state_space: sizes do not fit");
    Tensor out = at::empty({rows, heads, values}, x.options().memory_format(std::nullopt));
    const float *from = floats(x), *step = floats(steps), *decay = floats(decays), *skip = floats(skips);
    float *to = mutable_floats(out), *kept = mutable_floats(states);
    const Run* all_runs = runs_of(runs, rows, states.size(0));
    parallel_parts(heads, threads_for(rows * heads * size * 2), [&](int64_t begin, int64_t end) {
        std::vector<float> own(size);
        for (int64_t h = begin; h < end; ++h)
            runs_forward(all_runs, count, h, heads, size, kept, own.data(), [&](int64_t t, float* state) {
                const float *of_heads = from + t * channels, *b = of_heads + heads * values + h / (heads / groups) * keys;
                space_step(state, b, b + groups * keys, of_heads + h * values, step[t * heads + h], decay[t * heads + h],
                           skip[h], keys, values, to + (t * heads + h) * values);
            });
    });
    return out;
}

// What a head's backward pass needs beside its states: the tensors of `state_space`, and gradients.
struct SpaceGradients {
    const float *x, *steps, *decays, *grad;
    float *x_grad, *step_grad, *decay_grad;
    int64_t channels, groups, heads, keys, values;
};

// One token backwards: `before` [N, P] is the state before it, `state_grad` the gradient of the one after it, then of
// that before it.
inline void space_step_backward(const SpaceGradients& g, int64_t t, int64_t h, const float* before, float* state_grad) {
    int64_t keys = g.keys, values = g.values, at_group = g.heads * values + h / (g.heads / g.groups) * keys;
    const float *x = g.x + t * g.channels + h * values, *b = g.x + t * g.channels + at_group, *c = b + g.groups * keys;
    const float* grad = g.grad + (t * g.heads + h) * values;
    float *x_grad = g.x_grad + t * g.channels + h * values, *b_grad = g.x_grad + t * g.channels + at_group;
    float* c_grad = b_grad + g.groups * keys;
    Vec decay = all(g.decays[t * g.heads + h]), step = all(g.steps[t * g.heads + h]);
    Vec decay_sum = zero(), step_sum = zero();
    for (int64_t j = 0; j < values; j += COLUMNS * W) {
        int parts = int(std::min<int64_t>(COLUMNS, (values - j) / W));
        Vec change[COLUMNS], change_grad[COLUMNS], out_grad[COLUMNS];
        for (int p = 0; p < parts; ++p) {
            change[p] = mul(load(x + j + p * W), step);
            out_grad[p] = load(grad + j + p * W);
            change_grad[p] = zero();
        }
        for (int64_t i = 0; i < keys; ++i) {
            Vec b_sum = zero(), c_sum = zero();
            for (int p = 0; p < parts; ++p) {
                float* at = state_grad + i * values + j + p * W;
                Vec old = load(before + i * values + j + p * W), grown = fma(all(c[i]), out_grad[p], load(at));
                c_sum = fma(fma(all(b[i]), change[p], mul(old, decay)), out_grad[p], c_sum);
                b_sum = fma(grown, change[p], b_sum);
                change_grad[p] = fma(grown, all(b[i]), change_grad[p]);
                decay_sum = fma(old, grown, decay_sum);
                store(at, mul(grown, decay));
            }
            b_grad[i] += sum(b_sum);
            c_grad[i] += sum(c_sum);
        }
        for (int p = 0; p < parts; ++p) {
            store(x_grad + j + p * W, mul(change_grad[p], step));
            step_sum = fma(change_grad[p], load(x + j + p * W), step_sum);
        }
    }
    g.decay_grad[t * g.heads + h] = sum(decay_sum);
    g.step_grad[t * g.heads + h] = sum(step_sum);
}

// Gradients of `state_space` without the skips: grad [T, H, P] -> those of x [T, C], steps and decays [T, H]. `states`:
// what the runs left there, of the pass alone.
inline std::tuple<Tensor, Tensor, Tensor> state_space_backward(const Tensor& grad, const Tensor& x, const Tensor& steps,
                                                               const Tensor& decays, int64_t groups, int64_t keys,
                                                               const Tensor& runs, const Tensor& states) {
    int64_t rows = x.size(0), channels = x.size(1), heads = decays.size(1), values = grad.size(2), size = keys * values;
    TORCH_CHECK(2 * groups * keys + heads * values == channels && values % W == 0 && heads % groups == 0,
                "megarl::state_space_backward: sizes do not fit");
    Tensor x_grad = at::zeros({rows, channels}, x.options().memory_format(std::nullopt));
    Tensor step_grad = at::empty({rows, heads}, x_grad.options()), decay_grad = at::empty({rows, heads}, x_grad.options());
    Tensor state_grads = at::zeros({states.size(0), heads, keys, values}, x_grad.options());
    SpaceGradients g{floats(x), floats(steps), floats(decays), floats(grad), mutable_floats(x_grad),
                     mutable_floats(step_grad), mutable_floats(decay_grad), channels, groups, heads, keys, values};
    const float* kept = floats(states);
    float* kept_grads = mutable_floats(state_grads);
    const Run* all_runs = runs_of(runs, rows, states.size(0));
    parallel_parts(groups, threads_for(rows * heads * size * 8), [&](int64_t begin, int64_t end) {
        std::vector<float> scratch, ignored(values);
        for (int64_t h = begin * (heads / groups); h < end * (heads / groups); ++h) {
            auto forward = [&](int64_t t, float* at) {
                const float *of_heads = g.x + t * channels, *b = of_heads + heads * values + h / (heads / groups) * keys;
                space_step(at, b, b + groups * keys, of_heads + h * values, g.steps[t * heads + h],
                           g.decays[t * heads + h], 0.0f, keys, values, ignored.data());
            };
            runs_backward(all_runs, runs.size(0), h, heads, size, kept, kept_grads,
                          [&](const Run& run, const float* state, float* state_grad) {
                              run_backward(run, size, state, scratch, forward, [&](int64_t t, const float* before) {
                                  space_step_backward(g, t, h, before, state_grad);
                              });
                          });
        }
    });
    return {x_grad, step_grad, decay_grad};
}

}  // namespace megarl
