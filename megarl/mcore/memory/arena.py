"""Blocks of device memory that move to the host and back while all tensors on them stay valid.

A block frees and reallocates its storage in place, so parameters, their views and Megatron's buffers stay valid. Each
block has one host copy, allocated once and page-locked for CUDA, and moves in one copy operation. Copies run on a side
stream: computation waits for blocks that arrive, but not for blocks that leave.
"""

import functools
import math
import weakref
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from megarl.mcore import device

ALIGNMENT = 64  # bytes, as torch's CPU allocations, so that kernels treat a slice as they treat the original tensor


@functools.cache
def _side_stream():
    return torch.cuda.Stream()


def host_memory(size: int, is_pinned: bool = True) -> Tensor:
    """Allocates [size] bytes on the host, page-locked for CUDA unless not `is_pinned`. torch rounds its own page-locked
    allocations up to powers of two, which could double the memory."""
    memory = torch.empty(size, dtype=torch.uint8)
    if is_pinned and size and device.has_cuda():
        cudart, address = torch.cuda.cudart(), memory.data_ptr()
        torch.cuda.check_error(cudart.cudaHostRegister(address, size, 0))
        # Of the storage: views of it may live longer than this tensor.
        weakref.finalize(memory.untyped_storage(), cudart.cudaHostUnregister, address).atexit = False
    return memory


def storage_of(tensor: Tensor) -> int:
    """Returns the identity of a tensor's storage, which does not change when its memory moves."""
    return tensor.untyped_storage()._cdata


class TensorLayout(NamedTuple):
    """Layout of a tensor on a block; offset and strides in elements."""

    dtype: torch.dtype
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor, offset: int) -> "TensorLayout":
        """That of a tensor if it began at this offset."""
        return cls(dtype=tensor.dtype, offset=offset, shape=tensor.shape, stride=tensor.stride())

    def on(self, storage: torch.UntypedStorage) -> Tensor:
        """Returns the tensor with this layout on a storage."""
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        return empty.set_(storage, self.offset, self.shape, self.stride)


def lay_out(tensors: list[Tensor]) -> tuple[list[TensorLayout], int]:
    """Returns layouts of dense tensors packed one after another, and their total bytes."""
    layouts, end = [], 0
    for tensor in tensors:
        layouts.append(TensorLayout.of(tensor, end // tensor.itemsize))
        end += math.ceil(tensor.nbytes / ALIGNMENT) * ALIGNMENT
    return layouts, end


class DeviceBlock:
    """A device storage that can leave the device. Without a host copy, it loses its contents when it leaves."""

    def __init__(self, storage: torch.UntypedStorage, host_copy: Tensor | None):
        self.storage, self.size = storage, storage.nbytes()
        self.host_copy = host_copy
        self.is_present = True
        self.is_changed = host_copy is not None  # since the last copy to or from the host

    def _bytes(self) -> Tensor:
        return torch.empty(0, dtype=torch.uint8, device=self.storage.device).set_(self.storage)

    def arrive(self):
        """Reallocates device memory and restores the contents; without a host copy they are undefined."""
        self.storage.resize_(self.size)
        if self.host_copy is not None:
            current, side = torch.cuda.current_stream(), _side_stream()
            side.wait_stream(current)  # pending work may still use this memory for a freed tensor
            with torch.cuda.stream(side):
                self._bytes().copy_(self.host_copy, non_blocking=True)
            current.wait_stream(side)
        self.is_present, self.is_changed = True, False

    def leave(self):
        """Frees the device memory, after copying the contents to the host if they have changed since `arrive`."""
        if self.host_copy is not None and self.is_changed:
            side, memory = _side_stream(), self._bytes()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                self.host_copy.copy_(memory, non_blocking=True)
            if memory.is_cuda:
                memory.record_stream(side)  # the allocator must not reuse it before the copy is done
        self.storage.resize_(0)
        self.is_present = False

    def on_host(self, tensor: Tensor) -> Tensor:
        """Returns a tensor's view of the host copy, to be read and written while the block is on the host."""
        _side_stream().synchronize()
        return TensorLayout.of(tensor, int(tensor.storage_offset())).on(self.host_copy.untyped_storage())


class Arena(DeviceBlock):
    """A block that packs tensors of separate storages. It starts on the host."""

    def __init__(self, find: Callable[[], list[Tensor]]):
        """`find` returns the tensors, always in the same order, though some may have been replaced."""
        self.find, tensors = find, find()
        self.layouts, size = lay_out(tensors)
        host_copy = host_memory(size)
        for tensor, layout in zip(tensors, self.layouts, strict=True):
            layout.on(host_copy.untyped_storage()).copy_(tensor.detach())
            tensor.data = tensor.new_empty(0)  # free the tensors before the block is allocated
        super().__init__(torch.empty(size, dtype=torch.uint8, device=device.device()).untyped_storage(), host_copy)
        for tensor, layout in zip(tensors, self.layouts, strict=True):
            tensor.data = layout.on(self.storage)
        self.is_changed = False
        self.leave()

    def leave(self):
        """Same as `DeviceBlock`; first moves replaced tensors, such as loaded optimizer states, onto the block."""
        for tensor, layout in zip(self.find(), self.layouts, strict=True):
            if storage_of(tensor) != self.storage._cdata:
                tensor.data = layout.on(self.storage).copy_(tensor.detach())
                self.is_changed = True
        super().leave()
