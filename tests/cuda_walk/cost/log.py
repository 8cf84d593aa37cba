"""Records what a walk does, one thing after another: kernels, waits of the host, copies to the device, collectives."""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from tests.cuda_walk.cost.timeline import Collective, Replay, Send, Wait
from tests.cuda_walk.cost.work import size, work_of
from tests.cuda_walk.device import is_group


class Log(TorchDispatchMode):
    """A `Walk` tells it what it does. Operators that consist of others, as they arrive in inference mode, are taken
    apart, as a device would see them."""

    def __init__(self):
        super().__init__()
        # Of decode steps: lengths are on the device, where nothing has a number; rows above `requests` are padding.
        self.requests = self.keys = 0
        self.events: list = []
        self._captured: dict[int, list] = {}  # by the graph's id
        self._before: list = []

    def take(self) -> list:
        """Returns what was recorded since the last call."""
        events, self.events = self.events, []
        return events

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func.namespace == "prim":  # a question about a tensor
            return func(*args, **kwargs)
        if not torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CUDA"):
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        result = func(*args, **kwargs)
        self.kernel(func, args, kwargs, result)
        return result

    def kernel(self, func, args: tuple, kwargs: dict, result):
        """A call of an operator."""
        work = work_of(func, args, kwargs, result, self.requests, self.keys)
        if work is not None:
            self.events.append(work._replace(is_backward=_in_backward()))

    def crossing(self, to_host: bool):
        """A copy between host and device; the host waits for one that it reads."""
        self.events.append(Wait() if to_host else Send())

    def collective(self, func, args: tuple):
        """A call of a collective: in a ring a rank sends (r − 1)/r of all bytes, in an all-reduce twice that."""
        (group,) = [x for x in pytree.tree_leaves(args) if is_group(x)]
        name, ranks = func.overloadpacket.__name__.strip("_"), dist.ProcessGroup.unbox(group).size()
        largest = max((size(x) for x in args if isinstance(x, (Tensor, list, tuple))), default=0)
        sent = largest * (ranks - 1) / ranks * (2 if name.startswith("allreduce") else 1)
        self.events.append(Collective(name, sent, ranks, _in_backward()))

    def begin_capture(self):
        """What follows is recorded in a graph."""
        self._before, self.events = self.events, []

    def end_capture(self, graph):
        """Until here."""
        self._captured[id(graph)], self.events = self.events, self._before

    def replay(self, graph):
        """A graph is launched."""
        self.events.append(Replay(self._captured[id(graph)]))


def _in_backward() -> bool:
    return torch._C._current_autograd_node() is not None
