"""Offload: a role's weights, gradients and optimizer states are on the device in their turns alone.

Weights and optimizer states wait on the host; gradients are dead between updates and wait nowhere. Buffers of a model,
a few numbers for each expert, stay. What moves, and that it stays valid, is `memory`'s. With or without offload the
bytes of dead gradients hold the rollout's cache.
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
    """What moves of one role's memory on this rank, by kind: "weights", "gradients", "optimizer"."""

    def __init__(self, blocks: dict[str, list[DeviceBlock]]):
        """Everything in `blocks` leaves at once. `timed` may become a context manager's factory: it times moves."""
        self.blocks, self.timed = blocks, contextlib.nullcontext
        for block in self._all():
            if block.is_present:
                block.leave()

    def _all(self) -> list[DeviceBlock]:
        return [block for blocks in self.blocks.values() for block in blocks]

    @property
    def bytes(self) -> int:
        """Of host memory on this rank."""
        return sum(block.size for block in self._all() if block.host_copy is not None)

    def metrics(self, role: str) -> dict[str, int]:
        """`memory/<role>/offloaded_bytes` of a role that has offload, else nothing."""
        return {f"memory/{role}/offloaded_bytes": self.bytes} if self.blocks else {}

    @contextlib.contextmanager
    def present(self, *kinds: str, changed: bool = False):
        """These kinds are on the device inside; a block that was there already stays behind it.

        `changed`: they are written to. What is only read is not copied back. After an exception blocks leave as well,
        and one of leaving does not take its place.
        """
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

    def _move(self, blocks: list[DeviceBlock], way: Callable[[DeviceBlock], None]):
        with self.timed() if blocks else contextlib.nullcontext():
            for block in blocks:
                way(block)

    def on_host(self, state: dict) -> dict:
        """Lets a checkpoint's entries read and fill the twins of what is away, in place."""
        away = {block.storage._cdata: block for block in self._all() if not block.is_present}

        def moved(entry):
            if isinstance(entry, ShardedBase) and isinstance(entry.data, Tensor) and storage_of(entry.data) in away:
                entry.data = away[storage_of(entry.data)].on_host(entry.data)
            return entry

        dict_list_map_inplace(moved, state)
        return state


class KVCacheInGradBuffer:
    """Bytes of gradients for what is dead while they live: the cache of a rollout on the module that learns."""

    def __init__(self, wrapped, offload: Offload):
        """`wrapped`: the chunks with gradient buffers, `optimizer.wrap`; each update must zero them first."""
        self._buffers, self.offload = _grad_buffers(wrapped), offload

    def present(self):
        """Context in which the bytes are there; what they held before is forgotten where gradients are offloaded."""
        return self.offload.present("gradients")

    def memory(self, size: int) -> Tensor:
        """[size] bytes on the largest buffer, which grows to them where it has less; the same at each call."""
        with self.present():
            buffer = max(self._buffers, key=lambda buffer: buffer.grad_data.nbytes)
            storage = buffer.grad_data.untyped_storage()
            if storage.nbytes() < size:
                storage.resize_(0)  # else the old and the new bytes would be there together
                storage.resize_(size)
                buffer.grad_data.zero_()
            for block in self.offload.blocks.get("gradients", ()):
                if block.storage._cdata == storage._cdata:
                    block.size = storage.nbytes()
            return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (size,))


def _grad_buffers(wrapped) -> list:
    return [buffer for chunk in wrapped for buffer in chunk.buffers + chunk.expert_parallel_buffers]


def offload_frozen(stages) -> Offload:
    """The weights of a model that never learns; they are on the host from now on."""
    return _guarded(stages, {"weights": _weights(stages, [])})


def offload_trainable(stages, wrapped, optimizer, keeps_weights: bool = False) -> Offload:
    """Gradients, optimizer states and, unless it `keeps_weights`, weights of a role that learns; all away from now on.

    Args:
        stages: the model's bare chunks.
        wrapped: the chunks with gradient buffers, `optimizer.wrap`.
        optimizer: `optimizer.build_optimizer`, its states created.
    """
    buffers = _grad_buffers(wrapped)
    weights = [] if keeps_weights else _weights(stages, [b.param_data for b in buffers if b.param_data is not None])
    blocks = {
        "weights": weights,
        "gradients": [DeviceBlock(buffer.grad_data.untyped_storage(), None) for buffer in buffers],
        "optimizer": _arena(lambda: _states(stages, optimizer)),
    }
    return _guarded(stages, blocks)


def _arena(find) -> list[DeviceBlock]:
    return [Arena(find)] if find() else []


def _weights(stages, buffers: list[Tensor]) -> list[DeviceBlock]:
    """Buffers that hold weights as they are, and the weights that stand alone."""
    held = {storage_of(buffer) for buffer in buffers}
    alone = [p for p in stages.parameters() if storage_of(p) not in held]
    return [*(DeviceBlock(b.untyped_storage(), host_memory(b.nbytes)) for b in buffers), *_arena(lambda: alone)]


def _states(stages, optimizer) -> list[Tensor]:
    """What an optimizer holds beside the weights: fp32 copies of them, moments."""
    weights, found = {storage_of(p) for p in stages.parameters()}, []
    for part in optimizer.chained_optimizers:
        for parameter in (p for group in part.optimizer.param_groups for p in group["params"]):
            states = part.optimizer.state.get(parameter, {})
            held = [parameter, *(states[name] for name in sorted(states))]
            found += [t for t in held if isinstance(t, Tensor) and storage_of(t) not in weights]
    return found


def _guarded(stages, blocks: dict[str, list[DeviceBlock]]) -> Offload:
    """The offload; a forward that nobody brought the weights for would read memory that is not there."""

    def check(*_):
        if not all(block.is_present for block in blocks["weights"]):
            raise RuntimeError("a forward while the model's weights are on the host")

    for chunk in stages:
        chunk.register_forward_pre_hook(check)
    return Offload(blocks)
