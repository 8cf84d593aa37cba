"""Blocks of device memory that leave for the host and come back; every tensor on a block stays what it is.

A block's storage is emptied and filled again, so that parameters, their views and Megatron's buffers stay valid. Each
block has one twin on the host, allocated once and page-locked for CUDA, and moves in one copy. Copies run on a stream
of their own: what is computed next waits for what comes, and not for what leaves.
"""

import functools
import math
import weakref
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from megarl.mcore import device

ALIGNMENT = 64  # bytes: of torch's own CPU allocations, so that kernels see a slice as they saw the tensor


@functools.cache
def _side_stream():
    return torch.cuda.Stream()


def host_memory(size: int) -> Tensor:
    """[size] bytes on the host, page-locked where the device is CUDA.

    torch's own page-locked memory comes in powers of two, which could double the payload.
    """
    memory = torch.empty(size, dtype=torch.uint8)
    if device.has_cuda():
        cudart, address = torch.cuda.cudart(), memory.data_ptr()
        torch.cuda.check_error(cudart.cudaHostRegister(address, size, 0))
        weakref.finalize(memory, cudart.cudaHostUnregister, address).atexit = False
    return memory


def storage_of(tensor: Tensor) -> int:
    """What tells a tensor's storage from others, wherever its bytes are."""
    return tensor.untyped_storage()._cdata


class TensorLayout(NamedTuple):
    """Where a tensor stands on a block: offset and strides in elements."""

    dtype: torch.dtype
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]

    def on(self, storage: torch.UntypedStorage) -> Tensor:
        """The tensor that stands there."""
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        return empty.set_(storage, self.offset, self.shape, self.stride)


def lay_out(tensors: list[Tensor]) -> tuple[list[TensorLayout], int]:
    """Places of dense tensors behind each other, and the bytes of all."""
    places, end = [], 0
    for tensor in tensors:
        places.append(TensorLayout(tensor.dtype, end // tensor.itemsize, tensor.shape, tensor.stride()))
        end += math.ceil(tensor.nbytes / ALIGNMENT) * ALIGNMENT
    return places, end


class DeviceBlock:
    """A storage of the device that is there in its turn. Without a twin what it held is forgotten in between."""

    def __init__(self, storage: torch.UntypedStorage, host_copy: Tensor | None):
        self.storage, self.host_copy, self.size = storage, host_copy, storage.nbytes()
        self.is_present = True
        self.is_changed = host_copy is not None  # since the twin was last the same

    def _bytes(self) -> Tensor:
        return torch.empty(0, dtype=torch.uint8, device=self.storage.device).set_(self.storage)

    def arrive(self):
        """Takes device memory again, with what left; contents are undefined without a twin."""
        self.storage.resize_(self.size)
        if self.host_copy is not None:
            here, side = torch.cuda.current_stream(), _side_stream()
            side.wait_stream(here)  # the memory may be another's whose work is not done
            with torch.cuda.stream(side):
                self._bytes().copy_(self.host_copy, non_blocking=True)
            here.wait_stream(side)
        self.is_present, self.is_changed = True, False

    def leave(self):
        """Gives its device memory back; copies to the host what has changed since it came."""
        if self.host_copy is not None and self.is_changed:
            here, side, memory = torch.cuda.current_stream(), _side_stream(), self._bytes()
            side.wait_stream(here)
            with torch.cuda.stream(side):
                self.host_copy.copy_(memory, non_blocking=True)
            if memory.is_cuda:
                memory.record_stream(side)  # it is nobody else's before the copy is done
        self.storage.resize_(0)
        self.is_present = False

    def on_host(self, tensor: Tensor) -> Tensor:
        """What a tensor on the block is on its twin, to be read and written while the block is away."""
        _side_stream().synchronize()
        role_groups = TensorLayout(tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride())
        return role_groups.on(self.host_copy.untyped_storage())


class Arena(DeviceBlock):
    """A block onto which tensors that had storages of their own are packed. It starts on the host."""

    def __init__(self, find: Callable[[], list[Tensor]]):
        """`find` gives the tensors in an order that stays, though others may have come into their places."""
        self.find, tensors = find, find()
        self.places, size = lay_out(tensors)
        host_copy = host_memory(size)
        for tensor, place in zip(tensors, self.places, strict=True):
            place.on(host_copy.untyped_storage()).copy_(tensor.detach())
            tensor.data = tensor.new_empty(0)  # tensors and block are never on the device together
        super().__init__(torch.empty(size, dtype=torch.uint8, device=device.device()).untyped_storage(), host_copy)
        for tensor, place in zip(tensors, self.places, strict=True):
            tensor.data = place.on(self.storage)
        self.is_changed = False
        self.leave()

    def leave(self):
        """As a block; takes in what has come into a tensor's place, as a loaded optimizer's states do."""
        for tensor, place in zip(self.find(), self.places, strict=True):
            if storage_of(tensor) != self.storage._cdata:
                tensor.data = place.on(self.storage).copy_(tensor.detach())
                self.is_changed = True
        super().leave()
