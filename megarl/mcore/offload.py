"""Offload: a role's weights, gradients and optimizer states are on the device only while they are used.

Weights and optimizer states move to the host; gradients are dropped between updates. A model's buffers, a few numbers
per expert, stay on the device. With or without offload, the gradient buffer holds the rollout's KV cache between
updates.

Memory moves in blocks, while all tensors on them stay valid: a block frees and reallocates its storage in place. Each
has one host copy, allocated once and page-locked for CUDA, and moves in one copy operation. Copies run on a side
stream: computation waits for blocks that arrive, but not for blocks that leave.
"""

import contextlib
import functools
import math
import weakref
from collections.abc import Callable
from operator import methodcaller
from typing import NamedTuple

import torch
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace
from megatron.core.dist_checkpointing.mapping import ShardedBase
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


# -- what a role moves -------------------------------------------------------------------------------------------


class Offload:
    """One role's memory on this rank that moves, by kind: "weights", "gradients", "optimizer"."""

    def __init__(self, blocks: dict[str, list[DeviceBlock]], host_states: int = 0):
        """Moves all `blocks` to the host. `timed` may be set to a factory of context managers that time moves.
        `host_states`: bytes of optimizer states that stay there (`training.adam`)."""
        self.blocks, self.host_states = blocks, host_states
        self.timed: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext
        for block in self._all():
            if block.is_present:
                block.leave()

    def _all(self) -> list[DeviceBlock]:
        return [block for blocks in self.blocks.values() for block in blocks]

    @property
    def bytes(self) -> int:
        """Bytes of host copies on this rank, and of states that stay on the host."""
        return self.host_states + sum(block.size for block in self._all() if block.host_copy is not None)

    def metrics(self, role: str) -> dict[str, float]:
        """Returns `memory/<role>/offloaded_bytes`; empty for a role without offload."""
        return {f"memory/{role}/offloaded_bytes": self.bytes} if self.blocks or self.host_states else {}

    @contextlib.contextmanager
    def present(self, *kinds: str, changed: bool = False):
        """Context in which these kinds are on the device; blocks that were there before stay afterwards. `changed`: the
        caller writes to them, else they are not copied back. They also leave after an exception, which is raised."""
        blocks = [block for kind in kinds for block in self.blocks.get(kind, ())]
        arriving = [block for block in blocks if not block.is_present]
        self._move(arriving, methodcaller("arrive"))
        for block in blocks:
            block.is_changed |= changed
        try:
            yield
        except BaseException:
            with contextlib.suppress(Exception):
                for block in arriving:
                    block.leave()
            raise
        self._move(arriving, methodcaller("leave"))

    def _move(self, blocks: list[DeviceBlock], move: Callable[[DeviceBlock], None]):
        with self.timed() if blocks else contextlib.nullcontext():
            for block in blocks:
                move(block)

    def on_host(self, state: dict) -> dict:
        """Points a checkpoint's entries for offloaded tensors at their host copies, in place."""
        away = {block.storage._cdata: block for block in self._all() if not block.is_present}

        def redirect(entry):
            if isinstance(entry, ShardedBase) and isinstance(entry.data, Tensor) and storage_of(entry.data) in away:
                entry.data = away[storage_of(entry.data)].on_host(entry.data)
            return entry

        dict_list_map_inplace(redirect, state)
        return state


class KVCacheInGradBuffer:
    """The rollout's KV cache in the gradient buffer of the model that trains: they are never needed together."""

    def __init__(self, wrapped, offload: Offload):
        """`wrapped`: chunks from `optimizer.wrap_for_training`; each update must zero the gradients first."""
        self._buffers, self.offload = _grad_buffers(wrapped), offload

    def present(self):
        """Context in which the memory is on the device; with offloaded gradients its old contents are lost."""
        return self.offload.present("gradients")

    def memory(self, size: int) -> Tensor:
        """Returns [size] bytes of the largest gradient buffer, which grows if needed; the same memory each time."""
        with self.present():
            buffer = max(self._buffers, key=lambda buffer: buffer.grad_data.nbytes)
            storage = buffer.grad_data.untyped_storage()
            if storage.nbytes() < size:
                storage.resize_(0)  # otherwise the old and the new memory would be allocated together
                storage.resize_(size)
                buffer.grad_data.zero_()
            for block in self.offload.blocks.get("gradients", ()):
                if block.storage._cdata == storage._cdata:
                    block.size = storage.nbytes()
            return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (size,))


def _grad_buffers(wrapped) -> list:
    return [buffer for chunk in wrapped for buffer in chunk.buffers + chunk.expert_parallel_buffers]


def offload_frozen(stages) -> Offload:
    """Moves the weights of a frozen model to the host and returns their offload."""
    return _guarded(stages, {"weights": _weights(stages, [])})


def offload_trainable(stages, wrapped, optimizer, keeps_weights: bool = False) -> Offload:
    """Offloads gradients, optimizer states and, unless it `keeps_weights`, weights of a trained role: its bare chunks,
    those `wrapped` by `optimizer.wrap_for_training`, and its optimizer, with its states created."""
    buffers = _grad_buffers(wrapped)
    weights = [] if keeps_weights else _weights(stages, [b.param_data for b in buffers if b.param_data is not None])
    blocks = {
        "weights": weights,
        "gradients": [DeviceBlock(buffer.grad_data.untyped_storage(), None) for buffer in buffers],
        "optimizer": _arena(lambda: _states(stages, optimizer)),
    }
    return _guarded(stages, blocks, bytes_on_host(optimizer))


def bytes_on_host(optimizer) -> int:
    """Bytes that an optimizer keeps on the host, with and without offload (`training.adam`)."""
    return sum(getattr(part.optimizer, "host_bytes", 0) for part in optimizer.chained_optimizers)


def _arena(find) -> list[DeviceBlock]:
    return [Arena(find)] if find() else []


def _weights(stages, buffers: list[Tensor]) -> list[DeviceBlock]:
    """Returns one block per parameter buffer, and one for all weights outside these buffers."""
    held = {storage_of(buffer) for buffer in buffers}
    separate = [p for p in stages.parameters() if storage_of(p) not in held]
    return [*(DeviceBlock(b.untyped_storage(), host_memory(b.nbytes)) for b in buffers), *_arena(lambda: separate)]


def _states(stages, optimizer) -> list[Tensor]:
    """Returns an optimizer's tensors on the device other than the weights: their fp32 copies, and moments."""
    weights, tensors = {storage_of(p) for p in stages.parameters()}, []
    for chained in optimizer.chained_optimizers:
        parameters = (p for group in chained.optimizer.param_groups for p in group["params"])
        for parameter in (p for p in parameters if p not in getattr(chained.optimizer, "on_host", ())):
            states = chained.optimizer.state.get(parameter, {})
            candidates = [parameter, *(states[name] for name in sorted(states))]
            tensors += [t for t in candidates if isinstance(t, Tensor) and storage_of(t) not in weights]
    return tensors


def _guarded(stages, blocks: dict[str, list[DeviceBlock]], host_states: int = 0) -> Offload:
    """Returns the offload, with hooks that reject a forward without weights, which would read freed memory."""

    def check(*_):
        if not all(block.is_present for block in blocks["weights"]):
            raise RuntimeError("forward while the model's weights are on the host: use Offload.present")

    for chunk in stages:
        chunk.register_forward_pre_hook(check)
    return Offload(blocks, host_states)
