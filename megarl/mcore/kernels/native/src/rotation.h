// Rotary embeddings of heads (2104.09864 §3.4.2).
#pragma once

#include "parallel.h"
#include "tensors.h"

namespace megarl {

// Rotates the first 2 · `half` channels of a head into `out`, which may be the head: x · cos + swapped · sin, each
// rounded. Sines are those of the first and of the second half; forward, the first are negated.
inline void rotate(const float* head, const float* cosines, const float* first_sines, const float* second_sines,
                   int64_t half, float* out) {
#pragma omp simd
    for (int64_t i = 0; i < half; ++i) {
        float first = head[i], second = head[half + i];
        out[i] = first * cosines[i] + second * first_sines[i];
        out[half + i] = second * cosines[half + i] + first * second_sines[i];
    }
}

// x [T, heads, D] or [T, G, heads, D], whose channels are adjacent, rotated by each token's cosines and sines [T, r] into
// `out` of that shape, which may be x; `is_backward`: turned back, as gradients are.
inline void rotate_heads(const Tensor& x, const Tensor& cosines, const Tensor& sines, bool is_backward,
                         const Tensor& out) {
    bool grouped = x.dim() == 4;
    int64_t tokens = x.size(0), groups = grouped ? x.size(1) : 1, heads = x.size(-2), channels = x.size(-1);
    int64_t width = cosines.size(-1), half = width / 2;
    TORCH_CHECK((grouped || x.dim() == 3) && x.scalar_type() == at::kFloat && out.scalar_type() == at::kFloat &&
                    x.sizes() == out.sizes() && x.stride(-1) == 1 && out.stride(-1) == 1 && width <= channels &&
                    cosines.numel() == tokens * width && sines.numel() == tokens * width,
                "megarl::rotate: heads in float32, cosines and sines of each token");
    const float *from = x.const_data_ptr<float>(), *cosine = floats(cosines), *sine = floats(sines);
    float* to = out.mutable_data_ptr<float>();
    int64_t first = is_backward ? half : 0;
    parallel_for(tokens, tokens * groups * heads * channels * ELEMENT_WORK, [&](int64_t t) {
        const float *c = cosine + t * width, *s = sine + t * width;
        for (int64_t g = 0; g < groups; ++g)
            for (int64_t h = 0; h < heads; ++h) {
                const float* head = from + t * x.stride(0) + (grouped ? g * x.stride(1) : 0) + h * x.stride(-2);
                float* turned = to + t * out.stride(0) + (grouped ? g * out.stride(1) : 0) + h * out.stride(-2);
                rotate(head, c, s + first, s + half - first, half, turned);
                if (turned != head) std::copy(head + width, head + channels, turned + width);
            }
    });
}

}  // namespace megarl
