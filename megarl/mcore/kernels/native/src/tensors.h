// Memory of PyTorch's tensors, after a check of type and strides.
#pragma once

#include <ATen/core/Tensor.h>

#include "gemm.h"

namespace megarl {

using at::Tensor;

inline const float* floats(const Tensor& x) {
    TORCH_CHECK(x.scalar_type() == at::kFloat && x.is_contiguous(), "megarl kernels: a float32, contiguous tensor");
    return x.const_data_ptr<float>();
}
inline float* mutable_floats(const Tensor& x) {
    floats(x);
    return x.mutable_data_ptr<float>();
}
inline const int64_t* integers(const Tensor& x) {
    TORCH_CHECK(x.scalar_type() == at::kLong && x.is_contiguous(), "megarl kernels: an int64, contiguous tensor");
    return x.const_data_ptr<int64_t>();
}
inline Matrix matrix(const Tensor& x) {
    TORCH_CHECK(x.scalar_type() == at::kFloat && x.dim() == 2, "megarl kernels: a float32 matrix");
    return {x.const_data_ptr<float>(), x.stride(0), x.stride(1)};
}
inline Matrix transposed(const Tensor& x) {
    Matrix m = matrix(x);
    return {m.data, m.column_stride, m.row_stride};
}

}  // namespace megarl
