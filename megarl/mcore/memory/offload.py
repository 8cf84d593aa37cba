"""Offload: a role's weights, gradients and optimizer states are on the device only while they are used.

Weights and optimizer states move to the host; gradients are dropped between updates. A model's buffers, a few numbers
per expert, stay on the device. `arena` moves the memory. With or without offload, the gradient buffer holds the
rollout's KV cache between updates.
"""

import contextlib
from collections.abc import Callable
from operator import methodcaller

import torch
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace
from megatron.core.dist_checkpointing.mapping import ShardedBase
from torch import Tensor

from megarl.mcore.memory.arena import Arena, DeviceBlock, host_memory, storage_of


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
