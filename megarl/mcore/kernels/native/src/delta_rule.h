// The gated delta rule (2412.06464 eq. 10) token by token, over the runs of a pass.
// Shapes: T rows, G groups with a key head of K channels each, H value heads of V channels, C = 2·G·K + H·V.
#pragma once

#include "runs.h"

namespace megarl {

constexpr float NORM_EPSILON = 1e-6f;

// a, b [T, H], their rows apart by any stride, decay_logs and biases [H] -> decays e^(-e^decay_log · softplus(a + bias))
// and betas σ(b), both [T, H].
inline std::tuple<Tensor, Tensor> delta_rule_gates(const Tensor& a, const Tensor& b, const Tensor& decay_logs,
                                                   const Tensor& biases) {
    int64_t rows = a.size(0), heads = a.size(1);
    auto options = decay_logs.options().memory_format(std::nullopt);
    Tensor decays = at::empty({rows, heads}, options), betas = at::empty({rows, heads}, options);
    TORCH_CHECK(a.scalar_type() == at::kFloat && b.scalar_type() == at::kFloat && a.stride(1) == 1 && b.stride(1) == 1,
                "megarl::delta_rule_gates: float32 rows");
    const float *of_decay = a.const_data_ptr<float>(), *of_beta = b.const_data_ptr<float>();
    const float *logs = floats(decay_logs), *bias = floats(biases);
    float *decay = mutable_floats(decays), *beta = mutable_floats(betas);
    for (int64_t t = 0; t < rows; ++t)
        for (int64_t h = 0; h < heads; ++h) {
            decay[t * heads + h] = std::exp(-std::exp(logs[h]) * softplus(of_decay[t * a.stride(0) + h] + bias[h]));
            beta[t * heads + h] = 1.0f / (1.0f + std::exp(-of_beta[t * b.stride(0) + h]));
        }
    return {decays, betas};
}

inline float inverse_length(const float* x, int64_t n) {
    RowSum squares;
    for_vectors(n, [&](int64_t i, int width) {
        Vec v = load_some(x + i, width);
        squares.fma_into(i, v, v);
    });
    return 1.0f / std::sqrt(squares.total() + NORM_EPSILON);
}

// One token of one head: state [K, V] -> decay · state + key ⊗ beta · (value − key · decay · state); writes query · state.
inline void delta_step(float* state, const float* query, const float* key, const float* value, float decay, float beta,
                       int64_t keys, int64_t values, float* out) {
    for (int64_t j = 0; j < values; j += COLUMNS * W) {
        int parts = int(std::min<int64_t>(COLUMNS, (values - j) / W));
        Vec known[COLUMNS], read[COLUMNS], change[COLUMNS];
        for (int p = 0; p < parts; ++p) known[p] = read[p] = zero();
        for (int64_t i = 0; i < keys; ++i)
            for (int p = 0; p < parts; ++p) {
                float* at = state + i * values + j + p * W;
                Vec decayed = mul(load(at), all(decay));
                store(at, decayed);
                known[p] = fma(decayed, all(key[i]), known[p]);
            }
        for (int p = 0; p < parts; ++p) change[p] = mul(sub(load(value + j + p * W), known[p]), all(beta));
        for (int64_t i = 0; i < keys; ++i)
            for (int p = 0; p < parts; ++p) {
                float* at = state + i * values + j + p * W;
                Vec next = fma(all(key[i]), change[p], load(at));
                store(at, next);
                read[p] = fma(next, all(query[i]), read[p]);
            }
        for (int p = 0; p < parts; ++p) store(out + j + p * W, read[p]);
    }
}

inline void scale_vector(const float* x, float factor, int64_t n, float* out) {
    for (int64_t i = 0; i < n; ++i) out[i] = x[i] * factor;
}

// x [T, C]: queries and keys of the groups, values of the heads; decays and betas [T, H] -> [T, H, V].
// Queries and keys are divided by their lengths, queries also by √K; states [slots, H, K, V].
inline Tensor delta_rule(const Tensor& x, const Tensor& decays, const Tensor& betas, int64_t groups, int64_t keys,
                         const Tensor& runs, const Tensor& states) {
    RuleSizes s(x, decays, groups, keys);
    const float *from = floats(x), *decay = floats(decays), *beta = floats(betas);
    float scale = 1.0f / std::sqrt(float(keys));
    return rule_forward(s, x, runs, states, 4, [&](int64_t t, int64_t h, float* state, float* scratch, float* out) {
        const float *q = from + s.at_group(t, h), *k = q + groups * keys;
        const float* v = from + t * s.channels + 2 * groups * keys + h * s.values;
        scale_vector(q, inverse_length(q, keys) * scale, keys, scratch);
        scale_vector(k, inverse_length(k, keys), keys, scratch + keys);
        delta_step(state, scratch, scratch + keys, v, decay[s.at_head(t, h)], beta[s.at_head(t, h)], keys, s.values, out);
    });
}

// Gradients of x · r · scale with r = (Σ x² + ε)^−½ -> of x, added to `out`.
inline void length_gradient(const float* x, const float* grad, int64_t n, float scale, float* out) {
    RowSum products;
    float r = inverse_length(x, n);
    for_vectors(n, [&](int64_t i, int width) { products.fma_into(i, load_some(x + i, width), load_some(grad + i, width)); });
    float shared = products.total() * r * r;
    for (int64_t i = 0; i < n; ++i) out[i] += scale * r * (grad[i] - x[i] * shared);
}

// One token backwards: `before` [K, V] is the state before it, `state_grad` the gradient of the one after it, then of
// that before it. `sums` [2, K]: scratch memory.
inline void delta_step_backward(const RuleGradients& g, int64_t t, int64_t h, const float* before, const float* query,
                                const float* key, float* state_grad, float* sums) {
    constexpr int WIDE = 8;  // vectors of a state's row that are kept in registers
    int64_t keys = g.s.keys, values = g.s.values, at_value = t * g.s.channels + 2 * g.s.groups * keys + h * values;
    const float *value = g.x + at_value, *grad = g.grad + g.s.at_head(t, h) * values;
    float* value_grad = g.x_grad + at_value;
    Vec decay = all(g.first[g.s.at_head(t, h)]), beta = all(g.second[g.s.at_head(t, h)]);
    float *query_grad = sums, *key_grad = sums + keys;
    std::fill(sums, sums + 2 * keys, 0.0f);
    Vec decay_sum = zero(), beta_sum = zero();
    for (int64_t j = 0; j < values; j += WIDE * W) {
        int parts = int(std::min<int64_t>(WIDE, (values - j) / W));
        Vec known[WIDE], change[WIDE], change_grad[WIDE], out_grad[WIDE];
        for (int p = 0; p < parts; ++p) {
            known[p] = change_grad[p] = zero();
            out_grad[p] = load(grad + j + p * W);
        }
        for (int64_t i = 0; i < keys; ++i)
            for (int p = 0; p < parts; ++p)
                known[p] = fma(mul(load(before + i * values + j + p * W), decay), all(key[i]), known[p]);
        for (int p = 0; p < parts; ++p) {
            known[p] = sub(load(value + j + p * W), known[p]);  // what the value differs by from the known one
            change[p] = mul(known[p], beta);
        }
        for (int64_t i = 0; i < keys; ++i) {
            Vec query_sum = zero(), key_sum = zero(), q = all(query[i]), k = all(key[i]);
            for (int p = 0; p < parts; ++p) {
                float* at = state_grad + i * values + j + p * W;
                Vec grown = fma(q, out_grad[p], load(at));
                store(at, grown);
                change_grad[p] = fma(k, grown, change_grad[p]);
                Vec after = fma(k, change[p], mul(load(before + i * values + j + p * W), decay));
                query_sum = fma(after, out_grad[p], query_sum);
                key_sum = fma(grown, change[p], key_sum);
            }
            query_grad[i] += sum(query_sum);
            key_grad[i] += sum(key_sum);
        }
        for (int p = 0; p < parts; ++p) {
            store(value_grad + j + p * W, mul(change_grad[p], beta));
            beta_sum = fma(change_grad[p], known[p], beta_sum);
            change_grad[p] = sub(zero(), mul(change_grad[p], beta));  // of what is known
        }
        for (int64_t i = 0; i < keys; ++i) {
            Vec key_sum = zero(), k = all(key[i]);
            for (int p = 0; p < parts; ++p) {
                float* at = state_grad + i * values + j + p * W;
                Vec old = load(before + i * values + j + p * W), decayed_grad = fma(k, change_grad[p], load(at));
                key_sum = fma(mul(old, decay), change_grad[p], key_sum);
                decay_sum = fma(old, decayed_grad, decay_sum);
                store(at, mul(decayed_grad, decay));
            }
            key_grad[i] += sum(key_sum);
        }
    }
    g.first_grad[g.s.at_head(t, h)] = sum(decay_sum);
    g.second_grad[g.s.at_head(t, h)] = sum(beta_sum);
    int64_t at_group = g.s.at_group(t, h), at_key = at_group + g.s.groups * keys;
    length_gradient(g.x + at_group, query_grad, keys, 1.0f / std::sqrt(float(keys)), g.x_grad + at_group);
    length_gradient(g.x + at_key, key_grad, keys, 1.0f, g.x_grad + at_key);
}

// A run of one head backwards; `state` is the one that it begins with.
inline void delta_run_backward(const RuleGradients& g, const Run& run, int64_t h, const float* state, float* state_grad,
                               std::vector<float>& scratch) {
    int64_t keys = g.s.keys;
    std::vector<float> own(4 * keys + g.s.values);
    float *sums = own.data(), *query = sums + 2 * keys, *key = query + keys, *ignored = key + keys;
    auto normed = [&](int64_t t) {
        const float *q = g.x + g.s.at_group(t, h), *k = q + g.s.groups * keys;
        scale_vector(q, inverse_length(q, keys) / std::sqrt(float(keys)), keys, query);
        scale_vector(k, inverse_length(k, keys), keys, key);
    };
    auto forward = [&](int64_t t, float* at) {
        const float* value = g.x + t * g.s.channels + 2 * g.s.groups * keys + h * g.s.values;
        normed(t);
        delta_step(at, query, key, value, g.first[g.s.at_head(t, h)], g.second[g.s.at_head(t, h)], keys, g.s.values,
                   ignored);
    };
    run_backward(run, g.s.size, state, scratch, forward, [&](int64_t t, const float* before) {
        normed(t);
        delta_step_backward(g, t, h, before, query, key, state_grad, sums);
    });
}

// Gradients of `delta_rule`: grad [T, H, V] -> those of x [T, C], decays and betas [T, H].
inline std::tuple<Tensor, Tensor, Tensor> delta_rule_backward(const Tensor& grad, const Tensor& x, const Tensor& decays,
                                                              const Tensor& betas, int64_t groups, int64_t keys,
                                                              const Tensor& runs, const Tensor& states) {
    return rule_backward(grad, x, decays, betas, groups, keys, runs, states, 16, delta_run_backward);
}

}  // namespace megarl
