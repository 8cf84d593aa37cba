// Operators of a CUDA device whose memory is the host's: each runs its CPU kernel on the same memory.
//
// The tensors are torch's real CUDA tensors, with its caching allocator, streams, autograd threads and graphs.
// `install` registers one function for all operators of dispatch key CUDA. It makes CPU tensors of the same memory,
// calls the CPU kernel, and copies what that allocates into memory of the device. Within a capture it also records the
// operator with the addresses that it used; launching the graph runs the records again, on these addresses, and is an error if
// one of them was freed.
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty_strided.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAStream.h>
#include <dlfcn.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <map>
#include <mutex>

#include "hooks.h"
#include "memory.h"
#include "order.h"
#include "refusals.h"

using at::Tensor;
using c10::IValue;
using torch::jit::Stack;
namespace allocator = c10::cuda::CUDACachingAllocator;

namespace {

struct Record {  // one step of a graph: an operator, or a call of Python
  std::string name;
  c10::OperatorHandle op;
  std::vector<IValue> args;
  std::vector<Tensor> outs;
  py::object call;
  std::vector<order::Access> accesses;
};
using Graph = std::vector<Record>;

// They hold Python objects and are never destroyed: the interpreter ends before.
Graph& recording = *new Graph;
std::map<uint64_t, std::shared_ptr<Graph>>& graphs = *new std::map<uint64_t, std::shared_ptr<Graph>>;
std::map<std::string, long> counts;
std::mutex counting;  // autograd has threads of its own
py::object& on_host_wait = *new py::object;  // called after the host has waited; none if nobody asks

void count(const std::string& name) {
  std::lock_guard<std::mutex> guard(counting);
  counts[name]++;
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

void after_host_wait() {
  if (!on_host_wait) return;
  py::gil_scoped_acquire gil;
  if (!on_host_wait.is_none()) on_host_wait();
}

// What a copy between host and device lets the host see, and when.
struct HostCopy {
  bool is_one = false, to_host = false, waits = false, is_pinned = false;
  Tensor host;

  HostCopy(const std::string& name, const std::vector<IValue>& given) {
    if (name != "aten::copy_") return;
    const Tensor &to = given[0].toTensor(), &from = given[1].toTensor();
    is_one = to.is_cuda() != from.is_cuda() && to.numel();
    if (!is_one) return;
    to_host = from.is_cuda();
    host = to_host ? to : from;
    is_pinned = ::is_pinned(host.storage().data());
    waits = !given[2].toBool() || (to_host && !is_pinned);
    if (is_pinned) order::begin_use(begin(), size(), to_host);
  }

  char* begin() const { return reinterpret_cast<char*>(bytes_of(host, false).begin); }
  size_t size() const { return bytes_of(host, false).end - bytes_of(host, false).begin; }

  void done(const order::Use& use) const {
    if (!is_one) return;
    if (waits) {
      order::host_waits_for_stream(use.stream);
      after_host_wait();
    } else if (is_pinned) {
      const auto stream = c10::cuda::getCurrentCUDAStream().unwrap();
      const auto& data = host.storage().data_ptr();
      at::getHostAllocator(at::kCUDA)->record_event(data.get(), data.get_context(), stream);
      (to_host ? order::copies_to : order::copies_from)(use, begin(), size());
    }
    if (is_pinned) order::end_use(begin(), size());
  }
};

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
  const HostCopy copy(schema.name(), given);
  const auto use = order::next(schema.name(), current_stream());
  auto accesses = accesses_of(schema, given);
  touch(use, accesses);
  Stack results(arguments.values);
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &results);
  std::vector<Tensor> outs;
  bool has_moved = false;
  for (size_t i = 0; i < results.size(); i++) {
    const int index = argument_of(schema, i);
    if (index < 0) {
      stack->push_back(on_device(results[i], outs));
      std::vector<order::Access> made;
      add_accesses(stack->back(), true, made);
      touch(use, made);
      accesses.insert(accesses.end(), made.begin(), made.end());
      continue;
    }
    if (given[index].isTensor() && results[i].isTensor())
      has_moved |= follow(given[index].toTensor(), results[i].toTensor());
    stack->push_back(given[index]);
  }
  copy.done(use);
  if (READ_BY_HOST.count(schema.name())) order::host_waits_for_stream(use.stream);
  if (!in_capture()) return;
  if (has_moved) arguments = Arguments(given);
  recording.push_back({schema.name(), op, arguments.values, outs, py::object(), accesses});
}

void replay(const Graph& graph, uint64_t stream) {
  c10::InferenceMode guard(true);
  for (const auto& record : graph) {
    for (const auto& access : record.accesses)
      TORCH_CHECK(is_as_captured(access), "emulator: a graph's ", record.name,
                  " uses memory that was freed since the capture");
    touch(order::next("a graph's " + record.name, stream), record.accesses);
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

void end_capture(uint64_t graph, uint64_t stream) {
  graphs[graph] = std::make_shared<Graph>(std::move(recording));
  recording.clear();
  order::host_waits_for_stream(stream);  // a device has not done that work: nobody need wait for it
}

void launch(uint64_t graph, uint64_t stream) {
  count("graph launch");
  if (graphs.count(graph)) replay(*graphs[graph], stream);
}

void host_waits_for_stream(uint64_t stream) {
  order::host_waits_for_stream(stream);
  after_host_wait();
}

void host_waits_for_event(uint64_t event) {
  count("host waits for an event");
  order::host_waits_for_event(event);
  after_host_wait();
}

void host_waits_for_device() {
  order::host_waits_for_device();
  after_host_wait();
}

const EmulatorHooks HOOKS = {
    end_capture, launch, order::record_event, order::wait_for_event, host_waits_for_stream,
    host_waits_for_event, host_waits_for_device, order::stream_has_passed, order::event_has_passed,
    order::access, order::new_memory, order::unpinned};

void install(const std::vector<std::string>& names) {
  is_capturing = reinterpret_cast<int (*)()>(dlsym(RTLD_DEFAULT, "emulator_is_capturing"));
  is_pinned = reinterpret_cast<int (*)(const void*)>(dlsym(RTLD_DEFAULT, "emulator_is_pinned"));
  const auto set_hooks = reinterpret_cast<void (*)(const EmulatorHooks*)>(dlsym(RTLD_DEFAULT, "emulator_hooks"));
  hidden::pinned_range =
      reinterpret_cast<decltype(hidden::pinned_range)>(dlsym(RTLD_DEFAULT, "emulator_pinned_range"));
  TORCH_CHECK(is_capturing && is_pinned && hidden::pinned_range && set_hooks,
              "the runtime of the emulator is not preloaded");
  set_hooks(&HOOKS);
  auto* library = new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::CUDA, __FILE__, __LINE__);
  for (const auto& name : names) library->impl(name.c_str(), torch::CppFunction::makeFromBoxedFunction<&run>());
}

// Counts what Python does on the current stream, checks its order, and has graphs repeat it. Returns its tick.
long launched(const std::string& name, const std::vector<Tensor>& reads, const std::vector<Tensor>& writes,
              const py::object& repeat) {
  count(name);
  const auto use = order::next(name, current_stream());
  std::vector<order::Access> accesses;
  for (const auto& tensor : reads) add_accesses(tensor, false, accesses);
  for (const auto& tensor : writes) add_accesses(tensor, true, accesses);
  touch(use, accesses);
  if (in_capture())
    recording.push_back({name, c10::Dispatcher::singleton().findSchemaOrThrow("aten::add", "Tensor"), {}, {}, repeat,
                         accesses});
  return use.tick;
}

std::map<std::string, long> all_counts() {
  auto found = counts;
  found["bytes reserved at the peak"] = reserved_at_peak;
  found["bytes allocated at the peak"] = allocated_at_peak;
  return found;
}

}  // namespace

PYBIND11_MODULE(operators, module) {
  module.def("install", &install);
  module.def("follow_memory", [] { allocator::attachAllocatorTraceTracker(follow_memory); });
  module.def("on_host", &on_host);
  module.def("on_device", [](const Tensor& host) { return on_device(host); });
  module.def("launched", &launched);
  module.def("in_capture", &in_capture);
  module.def("name_stream", [](uint64_t stream, const std::string& name) { order::names[stream] = name; });
  module.def("host_has_waited", [](uint64_t stream, long tick) {
    order::Guard guard(order::mutex);
    return order::has_passed(order::host, stream, tick);
  });
  module.def("on_host_wait", [](const py::object& call) { on_host_wait = call; });
  module.def("count", &count);
  module.def("counts", &all_counts);
}
