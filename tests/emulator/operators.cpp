// Operators of a CUDA device whose memory is the host's: each runs its CPU kernel on the same memory.
//
// The tensors are torch's real CUDA tensors, with its caching allocator, streams, autograd threads and graphs. `install`
// registers one function for all operators of dispatch key CUDA. It makes CPU tensors of the same memory, calls the CPU
// kernel, and copies what that allocates into memory of the device. Within a capture it also records the operator with
// the addresses that it used; launching the graph runs the records again, on these addresses, whatever is there by then.
// Memory that goes back to the allocator is filled with NaN, so that a use of it afterwards shows in the numbers.
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <dlfcn.h>
#include <torch/extension.h>

#include <map>
#include <mutex>
#include <set>

using at::Tensor;
using c10::IValue;
using torch::jit::Stack;
namespace allocator = c10::cuda::CUDACachingAllocator;

namespace {

const std::set<std::string> READ_BY_HOST = {  // their results' shapes depend on values
    "aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive",
    "aten::equal", "aten::bincount", "aten::isin"};

struct Record {  // one step of a graph: an operator, or a call of Python
  c10::OperatorHandle op;
  std::vector<IValue> args;
  std::vector<Tensor> outs;
  py::object call;
};
using Graph = std::vector<Record>;

// They hold Python objects and are never destroyed: the interpreter ends before.
Graph& recording = *new Graph;
std::map<uint64_t, std::shared_ptr<Graph>>& graphs = *new std::map<uint64_t, std::shared_ptr<Graph>>;
std::map<std::string, long> counts;
std::mutex counting;  // autograd has threads of its own
int (*is_capturing)() = nullptr;

void count(const std::string& name) {
  std::lock_guard<std::mutex> guard(counting);
  counts[name]++;
}

bool in_capture() { return is_capturing && is_capturing(); }

// A CPU tensor of a CUDA tensor's memory, which it does not own.
Tensor on_host(const Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_cuda()) return tensor;
  const auto bytes = tensor.storage().nbytes();
  void* data = bytes ? tensor.storage().mutable_data() : nullptr;
  c10::Storage storage(
      c10::Storage::use_byte_size_t(), bytes, c10::DataPtr(data, c10::kCPU), c10::GetAllocator(c10::kCPU), true);
  auto host = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  host.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  host._set_conj(tensor.is_conj());
  host._set_neg(tensor.is_neg());
  return host;
}

Tensor packed(const Tensor& tensor) {
  return tensor.is_non_overlapping_and_dense() ? tensor : tensor.contiguous();
}

void copy_bytes(const Tensor& from, void* to) {
  if (from.numel()) std::memcpy(to, from.const_data_ptr(), from.numel() * from.itemsize());
}

// A copy of a CPU tensor in memory of the device.
Tensor on_device(const Tensor& host) {
  if (!host.defined()) return host;
  c10::impl::ExcludeDispatchKeyGuard none(c10::DispatchKeySet{});
  const auto source = packed(host);
  auto made = at::empty_strided(source.sizes(), source.strides(), source.options().device(c10::Device(c10::kCUDA, 0)));
  copy_bytes(source, made.mutable_data_ptr());
  return made;
}

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

bool starts_with(const std::string& text, const char* prefix) { return text.rfind(prefix, 0) == 0; }

// What CUDA refuses.
void check(const std::string& name, const std::vector<IValue>& given, const Arguments& arguments) {
  const bool copies = name == "aten::copy_" || name == "aten::copy" || name == "aten::_copy_from";
  const bool indexes = starts_with(name, "aten::index") || starts_with(name, "aten::_index_put") ||
                       name == "aten::_unsafe_index";
  const bool may_mix = copies || (indexes && given[0].isTensor() && given[0].toTensor().is_cuda());
  TORCH_CHECK(may_mix || !arguments.cuda || !arguments.host,
              "Expected all tensors to be on the same device, but found cuda:0 and cpu, in ", name);
  if (!in_capture()) return;
  TORCH_CHECK(!READ_BY_HOST.count(name), "emulator: the host reads the result of ", name, " while a graph is captured");
  TORCH_CHECK(!arguments.host || !arguments.cuda,
              "emulator: ", name, " moves data between host and device while a graph is captured");
}

// The index of the argument that a result is, by the schema's aliases; -1 for a new tensor.
int argument_of(const c10::FunctionSchema& schema, size_t result) {
  const auto* alias = result < schema.returns().size() ? schema.returns()[result].alias_info() : nullptr;
  if (!alias || !alias->isWrite()) return -1;
  for (size_t i = 0; i < schema.arguments().size(); i++) {
    const auto* other = schema.arguments()[i].alias_info();
    if (other && other->isWrite() && other->beforeSets() == alias->beforeSets()) return int(i);
  }
  return -1;
}

// Gives a CUDA argument that its CPU kernel has resized the result's size and values; whether it had to.
bool follow(const Tensor& argument, const Tensor& result) {
  if (!argument.is_cuda()) return false;
  const bool same = argument.sizes() == result.sizes() &&
                    (!result.numel() || argument.storage().data() == result.storage().data());
  if (!same) {
    argument.resize_(result.sizes());
    on_host(argument).copy_(result);
  }
  return !same;
}

IValue on_device(const IValue& value, std::vector<Tensor>& outs) {
  const auto one = [&](const Tensor& tensor) {
    auto made = on_device(tensor);
    outs.push_back(on_host(made));
    return made;
  };
  if (value.isTensor()) return one(value.toTensor());
  if (!value.isTensorList()) return value;
  c10::List<Tensor> list;
  for (const Tensor& tensor : value.toTensorVector()) list.push_back(one(tensor));
  return list;
}

void run(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  const auto& schema = op.schema();
  const size_t given_count = schema.arguments().size();
  const std::vector<IValue> given(stack->end() - given_count, stack->end());
  stack->erase(stack->end() - given_count, stack->end());
  count(schema.overload_name().empty() ? schema.name() : schema.name() + "." + schema.overload_name());
  Arguments arguments(given);
  check(schema.name(), given, arguments);
  Stack results(arguments.values);
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &results);
  std::vector<Tensor> outs;
  bool has_moved = false;
  for (size_t i = 0; i < results.size(); i++) {
    const int index = argument_of(schema, i);
    if (index < 0) {
      stack->push_back(on_device(results[i], outs));
      continue;
    }
    if (given[index].isTensor() && results[i].isTensor())
      has_moved |= follow(given[index].toTensor(), results[i].toTensor());
    stack->push_back(given[index]);
  }
  if (!in_capture()) return;
  if (has_moved) arguments = Arguments(given);
  recording.push_back({op, arguments.values, outs, py::object()});
}

void replay(const Graph& graph) {
  c10::InferenceMode guard(true);
  for (const auto& record : graph) {
    if (record.call) {
      py::gil_scoped_acquire gil;
      record.call();
      continue;
    }
    Stack stack(record.args);
    record.op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
    size_t next = 0;
    const auto put = [&](const Tensor& tensor) {
      copy_bytes(packed(tensor), record.outs[next++].mutable_data_ptr());
    };
    for (size_t i = 0; i < stack.size() && next < record.outs.size(); i++) {
      if (argument_of(record.op.schema(), i) >= 0) continue;
      if (stack[i].isTensor()) put(stack[i].toTensor());
      else if (stack[i].isTensorList()) for (const Tensor& each : stack[i].toTensorVector()) put(each);
    }
  }
}

void end_capture(uint64_t graph) {
  graphs[graph] = std::make_shared<Graph>(std::move(recording));
  recording.clear();
}

void launch(uint64_t graph) {
  count("graph launch");
  if (graphs.count(graph)) replay(*graphs[graph]);
}

// Memory of graphs is left as it is: their launches write it again.
void fill_freed(const allocator::TraceEntry& entry) {
  const bool is_of_a_graph = entry.mempool_.first || entry.mempool_.second;
  if (entry.action_ == allocator::TraceEntry::FREE_COMPLETED && !is_of_a_graph)
    std::memset(reinterpret_cast<void*>(entry.addr_), 0xff, entry.size_);
}

void install(const std::vector<std::string>& names) {
  is_capturing = reinterpret_cast<int (*)()>(dlsym(RTLD_DEFAULT, "emulator_is_capturing"));
  const auto hooks = reinterpret_cast<void (*)(void (*)(uint64_t), void (*)(uint64_t))>(
      dlsym(RTLD_DEFAULT, "emulator_hooks"));
  TORCH_CHECK(is_capturing && hooks, "the runtime of the emulator is not preloaded");
  hooks(end_capture, launch);
  auto* library = new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::CUDA, __FILE__, __LINE__);
  for (const auto& name : names) library->impl(name.c_str(), torch::CppFunction::makeFromBoxedFunction<&run>());
}

// A call of Python that a graph repeats; nothing outside a capture.
void record(const py::object& call) {
  if (in_capture())
    recording.push_back({c10::Dispatcher::singleton().findSchemaOrThrow("aten::add", "Tensor"), {}, {}, call});
}

}  // namespace

PYBIND11_MODULE(operators, module) {
  module.def("install", &install);
  module.def("fill_freed_memory", [] { allocator::attachAllocatorTraceTracker(fill_freed); });
  module.def("on_host", &on_host);
  module.def("on_device", [](const Tensor& host) { return on_device(host); });
  module.def("record", &record);
  module.def("in_capture", &in_capture);
  module.def("count", &count);
  module.def("counts", [] { return counts; });
  module.def("clear", [] { counts.clear(); });
}
