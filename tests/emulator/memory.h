// Memory of the device: what an operator uses of it, which block of the allocator that is, how much there is.
#pragma once
#include <ATen/core/Tensor.h>
#include <ATen/core/function_schema.h>
#include <c10/cuda/CUDACachingAllocator.h>

#include "order.h"

using at::Tensor;
using c10::IValue;
namespace allocator = c10::cuda::CUDACachingAllocator;

namespace {

int (*is_capturing)() = nullptr, (*is_pinned)(const void*) = nullptr;

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

struct Block {  // of the allocator
  uintptr_t end;
  long number;
};
std::map<uintptr_t, Block>& blocks = *new std::map<uintptr_t, Block>;  // in use, without those of graphs

// Number of the block at an address; 0: memory of a graph, or none.
long block_at(uintptr_t address) {
  order::Guard guard(order::mutex);
  auto after = blocks.upper_bound(address);
  if (after == blocks.begin()) return 0;
  const auto& [begin, block] = *std::prev(after);
  return address < block.end ? block.number : 0;
}

uint64_t current_stream() { return reinterpret_cast<uint64_t>(c10::cuda::getCurrentCUDAStream().stream()); }

bool is_memory_of_streams(const Tensor& tensor) {
  return tensor.defined() && tensor.has_storage() && tensor.numel() && tensor.storage().nbytes() &&
         (tensor.is_cuda() || is_pinned(tensor.storage().data()));
}

// The bytes from the first to the last element.
order::Access bytes_of(const Tensor& tensor, bool writes) {
  size_t last = 0;
  for (int64_t i = 0; i < tensor.dim(); i++) last += (tensor.size(i) - 1) * tensor.stride(i);
  const auto begin = reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
  order::Access found{begin, begin + (last + 1) * tensor.itemsize(), writes};
  if (in_capture()) found.block = block_at(begin), found.storage = tensor.storage().getWeakStorageImpl();
  return found;
}

// Whether memory that a graph uses is what it was: never freed since, or again that of the same storage.
bool is_as_captured(const order::Access& access) {
  if (!access.block || access.block == block_at(access.begin)) return true;
  const auto storage = access.storage->lock();
  const auto begin = storage ? reinterpret_cast<uintptr_t>(storage->data()) : 0;
  return begin && begin <= access.begin && access.end <= begin + storage->nbytes();
}

void add_accesses(const IValue& value, bool writes, std::vector<order::Access>& accesses) {
  if (value.isTensor()) {
    if (is_memory_of_streams(value.toTensor())) accesses.push_back(bytes_of(value.toTensor(), writes));
  } else if (value.isList()) {
    for (const IValue& each : value.toListRef()) add_accesses(each, writes, accesses);
  }
}

bool is_written(const c10::AliasInfo* alias) {
  if (!alias) return false;
  if (alias->isWrite()) return true;
  for (const auto& each : alias->containedTypes()) if (is_written(&each)) return true;
  return false;
}

std::vector<order::Access> accesses_of(const c10::FunctionSchema& schema, const std::vector<IValue>& given) {
  std::vector<order::Access> accesses;
  for (size_t i = 0; i < given.size(); i++)
    add_accesses(given[i], is_written(schema.arguments()[i].alias_info()), accesses);
  return accesses;
}

void touch(const order::Use& use, const std::vector<order::Access>& accesses) {
  for (const auto& access : accesses) order::touch(use, access);
}

// Bytes that programs have asked for, and that the allocator has taken; at the peak of the latter.
long allocated = 0, reserved = 0, allocated_at_peak = 0, reserved_at_peak = 0, last_block = 0;

void count_memory(const allocator::TraceEntry& entry) {
  using Entry = allocator::TraceEntry;
  const long size = entry.size_;
  if (entry.action_ == Entry::ALLOC) allocated += size;
  if (entry.action_ == Entry::FREE_COMPLETED) allocated -= size;
  if (entry.action_ == Entry::SEGMENT_ALLOC) reserved += size;
  if (entry.action_ == Entry::SEGMENT_FREE) reserved -= size;
  if (reserved > reserved_at_peak) reserved_at_peak = reserved, allocated_at_peak = 0;
  if (reserved == reserved_at_peak) allocated_at_peak = std::max(allocated_at_peak, allocated);
}

// Fills what is freed with NaN, but for memory of graphs: their launches write it again.
void follow_memory(const allocator::TraceEntry& entry) {
  order::Guard guard(order::mutex);
  count_memory(entry);
  if (entry.mempool_.first || entry.mempool_.second) return;
  const uintptr_t begin = entry.addr_;
  if (entry.action_ == allocator::TraceEntry::ALLOC) blocks[begin] = {begin + entry.size_, ++last_block};
  if (entry.action_ != allocator::TraceEntry::FREE_COMPLETED) return;
  blocks.erase(begin);
  std::memset(reinterpret_cast<void*>(begin), 0xff, entry.size_);
}

}  // namespace
