// What CUDA refuses, with the words of torch where torch refuses it.
#pragma once
#include <ATen/Context.h>

#include <set>

#include "memory.h"

namespace {

const std::set<std::string> READ_BY_HOST = {  // their results' shapes depend on values
    "aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive",
    "aten::equal", "aten::bincount", "aten::isin"};

// Under `torch.use_deterministic_algorithms`, by its documentation (2.14); `is_not_deterministic` has the others.
const std::set<std::string> NOT_DETERMINISTIC = {
    "aten::avg_pool3d_backward", "aten::_adaptive_avg_pool2d_backward", "aten::_adaptive_avg_pool3d_backward",
    "aten::adaptive_max_pool2d_backward", "aten::fractional_max_pool2d_backward",
    "aten::fractional_max_pool3d_backward", "aten::max_unpool2d", "aten::max_unpool3d",
    "aten::upsample_linear1d_backward", "aten::upsample_bilinear2d_backward", "aten::upsample_bicubic2d_backward",
    "aten::upsample_trilinear3d_backward", "aten::reflection_pad1d_backward", "aten::reflection_pad2d_backward",
    "aten::reflection_pad3d_backward", "aten::nll_loss2d_forward", "aten::nll_loss2d_backward",
    "aten::_ctc_loss_backward", "aten::put_", "aten::histc", "aten::grid_sampler_2d_backward",
    "aten::grid_sampler_3d_backward"};

const std::set<std::string> INDEXED_BY_HOST = {  // which move indices of the host to the device
    "aten::index", "aten::_unsafe_index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_",
    "aten::_unsafe_index_put"};

// Arguments of an operator on the host, and how many tensors of each device there were.
struct Arguments {
  std::vector<IValue> values;
  int cuda = 0, host = 0;

  Tensor one(const Tensor& tensor) {
    if (tensor.defined() && tensor.is_cuda()) cuda++;
    if (tensor.defined() && !tensor.is_cuda() && tensor.dim()) host++;  // a number of the host may go along
    return on_host(tensor);
  }

  IValue mapped(const IValue& value) {
    if (value.isTensor()) return one(value.toTensor());
    if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& tensor : value.toTensorVector()) list.push_back(one(tensor));
      return list;
    }
    if (value.isList() && value.toList().elementType()->kind() == c10::TypeKind::OptionalType) {
      c10::List<std::optional<Tensor>> list;
      for (const IValue& each : value.toListRef())
        list.push_back(each.isNone() ? std::optional<Tensor>() : one(each.toTensor()));
      return list;
    }
    if (value.isDevice() && value.toDevice().is_cuda()) return c10::Device(c10::kCPU);
    if (value.isGenerator()) return IValue();
    return value;
  }

  explicit Arguments(const std::vector<IValue>& given) {
    for (const auto& value : given) values.push_back(mapped(value));
  }
};

bool is_not_deterministic(const std::string& name, const std::vector<IValue>& given) {
  if (name == "aten::bincount") return given[1].isTensor() && given[1].toTensor().defined();
  if (name == "aten::scatter_reduce" || name == "aten::scatter_reduce_") return given[4].toStringRef() == "prod";
  if (name == "aten::median" || name == "aten::nanmedian") return given.size() > 1;  // with indices
  if (name == "aten::_embedding_bag_dense_backward") return given[7].toInt() == 2;  // the maximum
  return NOT_DETERMINISTIC.count(name);
}

// What CUDA refuses.
void check(const std::string& name, const std::vector<IValue>& given, const Arguments& arguments) {
  const bool copies = name == "aten::copy_" || name == "aten::copy" || name == "aten::_copy_from";
  const bool indexes = INDEXED_BY_HOST.count(name);
  const bool may_mix = copies || (indexes && given[0].isTensor() && given[0].toTensor().is_cuda());
  TORCH_CHECK(may_mix || !arguments.cuda || !arguments.host,
              "Expected all tensors to be on the same device, but found cuda:0 and cpu, in ", name);
  if (is_not_deterministic(name, given)) at::Context::alertNotDeterministic(name + " on CUDA");
  if (!in_capture()) return;
  TORCH_CHECK(!READ_BY_HOST.count(name), "emulator: the host reads the result of ", name, " while a graph is captured");
  TORCH_CHECK(!arguments.host || !arguments.cuda,
              "emulator: ", name, " moves data between host and device while a graph is captured");
}

}  // namespace
