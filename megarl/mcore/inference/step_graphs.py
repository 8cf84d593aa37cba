"""CUDA graphs of decode steps: the kernels of a step, launched together.

A small model's step has hundreds of kernels that take less time than their launches. Megarl has a runner of its own,
since Megatron's asks for process-wide groups.
"""

from collections.abc import Callable, Hashable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from megarl.mcore import device


def can_capture(model) -> bool:
    """Whether a decode step of a model can be a graph: its kernels and their shapes depend on nothing that the host
    reads from the device, and its weights stay where they are, which those of --use-torch-fsdp2 do not."""
    reads_host = any(getattr(module, "reads_host", False) for module in model.modules())
    return device.has_cuda() and not reads_host and not any(isinstance(p, DTensor) for p in model.parameters())


class StepGraphs:
    """Graphs by key. The first call of a key runs its function, the second captures it, later ones replay it."""

    def __init__(self):
        self._graphs: dict[Hashable, tuple[Any, Any] | None] = {}  # key -> (graph, outputs); None: ran once
        self._addresses: tuple[int, ...] = ()  # of the memory that the graphs read
        self._pool = None  # memory that all graphs share, since one runs at a time

    def begin(self, memory: Iterable[Tensor]):
        """Begins a time in which all of `memory`, what functions read beside their inputs and own results, stays where
        it is. Graphs of earlier times are kept if it is where it was then."""
        addresses = tuple(tensor.data_ptr() for tensor in memory)
        if addresses != self._addresses:  # for example, weights came back from the host to another place
            self._graphs.clear()
            self._addresses, self._pool = addresses, None

    def run(self, key: Hashable, function: Callable[[], Any]) -> Any:
        """Returns the outputs of `function`, which the next call of any key may overwrite.

        `key`: calls of one key launch the same kernels on the same shapes, and read inputs from the same memory.
        """
        if key not in self._graphs:
            self._graphs[key] = None
            return function()
        if self._graphs[key] is None:
            self._graphs[key] = self._capture(function)
        graph, outputs = self._graphs[key]
        graph.replay()
        return outputs

    def _capture(self, function: Callable[[], Any]) -> tuple[Any, Any]:
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            outputs = function()
        self._pool = graph.pool()
        return graph, outputs
