"""CUDA graphs of decode steps: the kernels of a step, launched together.

A small model's step has hundreds of kernels that take less time than their launches. Megarl has a runner of its own,
since Megatron's asks for process-wide groups.
"""

from collections.abc import Callable, Hashable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megarl.mcore import device


def can_capture(model) -> bool:
    """Whether a decode step of a model can be a graph: its kernels and their shapes depend on nothing that the host
    reads from the device, and its weights stay where they are, which those of --use-torch-fsdp2 do not."""
    reads_host = any(getattr(module, "reads_host", False) for module in model.modules())
    return device.has_cuda() and not reads_host and not any(isinstance(p, DTensor) for p in model.parameters())


class _MemoryRead(TorchDispatchMode):
    """Collects the memory that operators use and that none of them has made."""

    def __init__(self):
        super().__init__()
        self.held: dict[int, torch.UntypedStorage] = {}  # by address
        self._made: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        for tensor in _tensors((args, kwargs)):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self._made:
                self.held[storage.data_ptr()] = storage
        results = func(*args, **(kwargs or {}))
        self._made.update(tensor.untyped_storage().data_ptr() for tensor in _tensors(results))
        return results


def _tensors(tree) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


# A graph, its outputs, and what it reads where it is and nobody else may hold: tables, constants.
_Graph = tuple[torch.cuda.CUDAGraph, Any, list[torch.UntypedStorage]]


class StepGraphs:
    """Graphs by key. The first call of a key runs its function, the second captures it, later ones replay it."""

    def __init__(self):
        self._graphs: dict[Hashable, _Graph | None] = {}  # None: ran once
        self._addresses: tuple[int, ...] = ()  # of the memory that the graphs read
        self._pool = None  # memory that all graphs share, since one runs at a time

    def begin(self, memory: Iterable[Tensor], is_so_on_any_rank: Callable[[bool], bool] = bool):
        """Begins a time in which all of `memory`, what functions read and others write, stays where it is. Graphs of
        earlier times are kept if it is where it was then, on all ranks with which functions communicate: NCCL wants a
        collective to be part of a graph on all of its ranks or on none. What else graphs read must never change."""
        addresses = tuple(tensor.data_ptr() for tensor in memory)
        # For example, weights came back from the host to another place.
        if is_so_on_any_rank(addresses != self._addresses):
            self._graphs.clear()
            self._addresses, self._pool = addresses, None

    def is_captured(self, key: Hashable) -> bool:
        """Whether the next call of a key replays a graph."""
        return self._graphs.get(key) is not None

    def run(self, key: Hashable, function: Callable[[], Any]) -> Any:
        """Returns the outputs of `function`, which the next call of any key may overwrite. `key`: calls of one key
        launch the same kernels on the same shapes, and read inputs from the same memory."""
        if key not in self._graphs:
            self._graphs[key] = None
            return function()
        found = self._graphs[key]
        if found is None:
            found = self._graphs[key] = self._capture(function)
        graph, outputs, _ = found
        graph.replay()
        return outputs

    def _capture(self, function: Callable[[], Any]) -> _Graph:
        torch.cuda.synchronize()
        graph, read = torch.cuda.CUDAGraph(), _MemoryRead()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"), read:
            outputs = function()
        self._pool = graph.pool()
        return graph, outputs, list(read.held.values())
