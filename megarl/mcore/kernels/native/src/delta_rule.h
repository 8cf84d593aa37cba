// The gated delta rule (2412.06464 eq. 10) token by token, over the runs of a pass. Each head has one decay (D = 1), or
// each channel of its key one of its own (D = K, Kimi delta attention, 2510.26692).
// Shapes: T rows, G groups with a key head of K channels each, H value heads of V channels, C = 2·G·K + H·V.
#pragma once

#include "runs.h"

namespace megarl {

constexpr float NORM_EPSILON = 1e-6f;

// ln(1 + e^x) = max(x, 0) + 2 · artanh(e^−|x| / (2 + e^−|x|)), within 3 units in the last place: the series of artanh
// converges at once, since its argument is at most 1/3.
inline Vec softplus(Vec x) {
    Vec e = exp(min(x, sub(zero(), x))), z = div(e, add(all(2.0f), e)), square = mul(z, z), sum = all(1.0f / 17);
    for (float term = 15; term > 0; term -= 2) sum = fma(sum, square, all(1.0f / term));
    return fma(mul(all(2.0f), z), sum, max(x, zero()));
}

// The decays of a head's key channels: e^(-rate · softplus(x + bias)), or e^(bound · σ(rate · (x + bias))).
inline void channel_decays(const float* x, const float* bias, float rate, const std::optional<double>& bound, int64_t n,
                           float* out) {
    for_vectors(n, [&](int64_t i, int width) {
        Vec v = add(load_some(x + i, width), load_some(bias + i, width));
        Vec log = bound ? mul(sigmoid(mul(all(rate), v)), all(float(*bound))) : mul(softplus(v), all(-rate));
        store_some(out + i, exp(log), width);
    });
}

// a [T, H·D], b [T, H], their rows apart by any stride, decay_logs [H] and biases [H·D] -> decays [T, H·D], of single
// ones e^(-e^decay_log · softplus(a + bias)), and betas σ(b) [T, H]. `bound`: of those of channels.
inline std::tuple<Tensor, Tensor> delta_rule_gates(const Tensor& a, const Tensor& b, const Tensor& decay_logs,
                                                   const Tensor& biases, const std::optional<double>& bound) {
    int64_t rows = a.size(0), heads = b.size(1), width = a.size(1) / heads;
    auto options = decay_logs.options().memory_format(std::nullopt);
    Tensor decays = at::empty({rows, heads * width}, options), betas = at::empty({rows, heads}, options);
    TORCH_CHECK(a.scalar_type() == at::kFloat && b.scalar_type() == at::kFloat && a.stride(1) == 1 && b.stride(1) == 1,
                "megarl::delta_rule_gates: float32 rows");
    const float *of_decay = a.const_data_ptr<float>(), *of_beta = b.const_data_ptr<float>();
    const float *logs = floats(decay_logs), *bias = floats(biases);
    float *decay = mutable_floats(decays), *beta = mutable_floats(betas);
    for (int64_t t = 0; t < rows; ++t)
        for (int64_t h = 0; h < heads; ++h) {
            const float* x = of_decay + t * a.stride(0) + h * width;
            float *out = decay + (t * heads + h) * width, rate = std::exp(logs[h]);
            if (width > 1) channel_decays(x, bias + h * width, rate, bound, width, out);
            else *out = std::exp(-rate * softplus(*x + bias[h]));
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
// `decays`: one, or BY_CHANNEL [K].
template <bool BY_CHANNEL>
inline void delta_step(float* state, const float* query, const float* key, const float* value, const float* decays,
                       float beta, int64_t keys, int64_t values, float* out) {
    float decay = *decays;
    for (int64_t j = 0; j < values; j += COLUMNS * W) {
        int parts = int(std::min<int64_t>(COLUMNS, (values - j) / W));
        Vec known[COLUMNS], read[COLUMNS], change[COLUMNS];
        for (int p = 0; p < parts; ++p) known[p] = read[p] = zero();
        for (int64_t i = 0; i < keys; ++i)
            for (int p = 0; p < parts; ++p) {
                float* at = state + i * values + j + p * W;
                Vec decayed = mul(load(at), all(BY_CHANNEL ? decays[i] : decay));
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

// Decays of each head in a tensor [T, H·D]: D.
inline int64_t decays_of_head(const RuleSizes& s, const Tensor& decays) {
    int64_t width = decays.numel() / std::max<int64_t>(1, s.rows * s.heads);
    TORCH_CHECK(width == 1 || width == s.keys || !s.rows, "megarl::delta_rule: decays of heads, or of channels of keys");
    return width;
}

inline void scale_vector(const float* x, float factor, int64_t n, float* out) {
    for (int64_t i = 0; i < n; ++i) out[i] = x[i] * factor;
}

// x [T, C]: queries and keys of the groups, values of the heads; decays [T, H·D], betas [T, H] -> [T, H, V].
// Queries and keys are divided by their lengths, queries also by √K; states [slots, H, K, V].
inline Tensor delta_rule(const Tensor& x, const Tensor& decays, const Tensor& betas, int64_t groups, int64_t keys,
                         const Tensor& runs, const Tensor& states) {
    RuleSizes s(x, betas, groups, keys);
    int64_t width = decays_of_head(s, decays);
    auto step = width > 1 ? delta_step<true> : delta_step<false>;
    const float *from = floats(x), *decay = floats(decays), *beta = floats(betas);
    float scale = 1.0f / std::sqrt(float(keys));
    return rule_forward(s, x, runs, states, 4, [&](int64_t t, int64_t h, float* state, float* scratch, float* out) {
        const float *q = from + s.at_group(t, h), *k = q + groups * keys;
        const float* v = from + t * s.channels + 2 * groups * keys + h * s.values;
        scale_vector(q, inverse_length(q, keys) * scale, keys, scratch);
        scale_vector(k, inverse_length(k, keys), keys, scratch + keys);
        int64_t at = s.at_head(t, h);
        step(state, scratch, scratch + keys, v, decay + at * width, beta[at], keys, s.values, out);
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
template <bool BY_CHANNEL>
inline void delta_step_backward(const RuleGradients& g, int64_t t, int64_t h, const float* before, const float* query,
                                const float* key, float* state_grad, float* sums) {
    constexpr int WIDE = 8;  // vectors of a state's row that are kept in registers
    int64_t keys = g.s.keys, values = g.s.values, at_value = t * g.s.channels + 2 * g.s.groups * keys + h * values;
    const float *value = g.x + at_value, *grad = g.grad + g.s.at_head(t, h) * values;
    float* value_grad = g.x_grad + at_value;
    int64_t at_decay = g.s.at_head(t, h) * (BY_CHANNEL ? keys : 1);
    Vec single = all(g.first[at_decay]), beta = all(g.second[g.s.at_head(t, h)]);
    auto decay_of = [&](int64_t i) { return BY_CHANNEL ? all(g.first[at_decay + i]) : single; };
    float* decay_grad = g.first_grad + at_decay;
    if (BY_CHANNEL) std::fill_n(decay_grad, keys, 0.0f);
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
        for (int64_t i = 0; i < keys; ++i) {
            Vec decay = decay_of(i);
            for (int p = 0; p < parts; ++p)
                known[p] = fma(mul(load(before + i * values + j + p * W), decay), all(key[i]), known[p]);
        }
        for (int p = 0; p < parts; ++p) {
            known[p] = sub(load(value + j + p * W), known[p]);  // what the value differs by from the known one
            change[p] = mul(known[p], beta);
        }
        for (int64_t i = 0; i < keys; ++i) {
            Vec query_sum = zero(), key_sum = zero(), q = all(query[i]), k = all(key[i]), decay = decay_of(i);
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
            Vec key_sum = zero(), k = all(key[i]), decay = decay_of(i);
            if (BY_CHANNEL) decay_sum = zero();
            for (int p = 0; p < parts; ++p) {
                float* at = state_grad + i * values + j + p * W;
                Vec old = load(before + i * values + j + p * W), decayed_grad = fma(k, change_grad[p], load(at));
                key_sum = fma(mul(old, decay), change_grad[p], key_sum);
                decay_sum = fma(old, decayed_grad, decay_sum);
                store(at, mul(decayed_grad, decay));
            }
            key_grad[i] += sum(key_sum);
            if (BY_CHANNEL) decay_grad[i] += sum(decay_sum);
        }
    }
    if (!BY_CHANNEL) *decay_grad = sum(decay_sum);
    g.second_grad[g.s.at_head(t, h)] = sum(beta_sum);
    int64_t at_group = g.s.at_group(t, h), at_key = at_group + g.s.groups * keys;
    length_gradient(g.x + at_group, query_grad, keys, 1.0f / std::sqrt(float(keys)), g.x_grad + at_group);
    length_gradient(g.x + at_key, key_grad, keys, 1.0f, g.x_grad + at_key);
}

// A run of one head backwards; `state` is the one that it begins with.
template <bool BY_CHANNEL>
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
        delta_step<BY_CHANNEL>(at, query, key, value, g.first + g.s.at_head(t, h) * (BY_CHANNEL ? keys : 1),
                               g.second[g.s.at_head(t, h)], keys, g.s.values, ignored);
    };
    run_backward(run, g.s.size, state, scratch, forward, [&](int64_t t, const float* before) {
        normed(t);
        delta_step_backward<BY_CHANNEL>(g, t, h, before, query, key, state_grad, sums);
    });
}

// Gradients of `delta_rule`: grad [T, H, V] -> those of x [T, C], decays [T, H·D] and betas [T, H].
inline std::tuple<Tensor, Tensor, Tensor> delta_rule_backward(const Tensor& grad, const Tensor& x, const Tensor& decays,
                                                              const Tensor& betas, int64_t groups, int64_t keys,
                                                              const Tensor& runs, const Tensor& states) {
    bool by_channel = decays_of_head(RuleSizes(x, betas, groups, keys), decays) > 1;
    auto one = by_channel ? delta_run_backward<true> : delta_run_backward<false>;
    return rule_backward(grad, x, decays, betas, groups, keys, runs, states, 16, one);
}

}  // namespace megarl
