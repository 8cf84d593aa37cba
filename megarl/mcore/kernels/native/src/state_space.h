// Mamba-2's state space (2405.21060 eq. 1 with scalar decays) token by token, over the runs of a pass.
// Shapes: T rows, G groups with an input and an output vector of N numbers (B and C), H heads of P channels,
// C = H·P + 2·G·N: channels of all heads, then the groups' B, then their C.
#pragma once

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
            float step = softplus(from[t * steps.stride(0) + h] + bias[h]);
            size[t * heads + h] = step < float(min_step) ? float(min_step) : step;
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
    RuleSizes s(x, decays, groups, keys);
    const float *from = floats(x), *step = floats(steps), *decay = floats(decays), *skip = floats(skips);
    return rule_forward(s, x, runs, states, 2, [&](int64_t t, int64_t h, float* state, float*, float* out) {
        const float* b = from + s.at_group(t, h) + s.heads * s.values;
        space_step(state, b, b + groups * keys, from + t * s.channels + h * s.values, step[s.at_head(t, h)],
                   decay[s.at_head(t, h)], skip[h], keys, s.values, out);
    });
}

// One token backwards: `before` [N, P] is the state before it, `state_grad` the gradient of the one after it, then of
// that before it.
inline void space_step_backward(const RuleGradients& g, int64_t t, int64_t h, const float* before, float* state_grad) {
    int64_t keys = g.s.keys, values = g.s.values, at_value = t * g.s.channels + h * values;
    int64_t at_group = g.s.at_group(t, h) + g.s.heads * values, at_head = g.s.at_head(t, h);
    const float *x = g.x + at_value, *b = g.x + at_group, *c = b + g.s.groups * keys, *grad = g.grad + at_head * values;
    float *x_grad = g.x_grad + at_value, *b_grad = g.x_grad + at_group, *c_grad = b_grad + g.s.groups * keys;
    Vec step = all(g.first[at_head]), decay = all(g.second[at_head]);
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
    g.first_grad[at_head] = sum(step_sum);
    g.second_grad[at_head] = sum(decay_sum);
}

// A run of one head backwards; `state` is the one that it begins with.
inline void space_run_backward(const RuleGradients& g, const Run& run, int64_t h, const float* state, float* state_grad,
                               std::vector<float>& scratch) {
    std::vector<float> ignored(g.s.values);
    auto forward = [&](int64_t t, float* at) {
        const float* b = g.x + g.s.at_group(t, h) + g.s.heads * g.s.values;
        space_step(at, b, b + g.s.groups * g.s.keys, g.x + t * g.s.channels + h * g.s.values,
                   g.first[g.s.at_head(t, h)], g.second[g.s.at_head(t, h)], 0.0f, g.s.keys, g.s.values, ignored.data());
    };
    run_backward(run, g.s.size, state, scratch, forward,
                 [&](int64_t t, const float* before) { space_step_backward(g, t, h, before, state_grad); });
}

// Gradients of `state_space` without the skips: grad [T, H, P] -> those of x [T, C], steps and decays [T, H].
inline std::tuple<Tensor, Tensor, Tensor> state_space_backward(const Tensor& grad, const Tensor& x, const Tensor& steps,
                                                               const Tensor& decays, int64_t groups, int64_t keys,
                                                               const Tensor& runs, const Tensor& states) {
    return rule_backward(grad, x, steps, decays, groups, keys, runs, states, 8, space_run_backward);
}

}  // namespace megarl
