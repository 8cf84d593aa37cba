"""Several ranks on one CUDA device: collectives and messages by gloo, over host copies of the device's tensors.

NCCL refuses two ranks on one device (before 2.30, and later unless it is asked), and gloo takes CUDA tensors in some
calls only. Each call here copies its tensors to pinned memory on the group's stream, waits for the copy, and starts
gloo; whoever waits for the work copies back. It is for checks: its speed means nothing, and graphs cannot capture it.

`python -m tools.gpu.staged MODULE FLAG…` runs a program of megarl with it: one rank, as torchrun starts it.
"""

import os
import runpy
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

BACKEND = "staged"
COLLECTIVES = (
    "allreduce", "allreduce_coalesced", "broadcast", "allgather", "_allgather_base", "all_gather_single", "gather",
    "scatter", "reduce", "reduce_scatter", "_reduce_scatter_base", "reduce_scatter_single", "alltoall",
    "alltoall_base", "all_to_all_single", "barrier", "allgather_into_tensor_coalesced", "all_gather_single_coalesced",
    "reduce_scatter_tensor_coalesced", "reduce_scatter_single_coalesced",
)  # fmt: skip
# What gloo has no name for travels as bytes; it cannot be added.
AS_BYTES = {torch.int16, torch.float8_e4m3fn, torch.float8_e5m2}


class OverGloo(dist.ProcessGroup):
    """A process group of CUDA tensors whose data gloo carries. Subclasses start the calls of `COLLECTIVES` and those
    of `_exchange`, and say in `_end_coalescing` what a batch of them is."""

    supports_coalescing = True
    _device_types = property(lambda self: [torch.device("cuda")])
    group_name = property(lambda self: dist.distributed_c10d._world.pg_names[self])
    pg_name = group_name
    _exchange: Callable[[list[tuple]], dist.Work | None]

    def __init__(self, store, rank: int, size: int, timeout):
        super().__init__(rank, size)  # type: ignore[call-arg]  # its stubs lack this form
        self.gloo, self.store = dist.ProcessGroupGloo(store, rank, size, timeout), store

    def size(self) -> int:
        """Ranks."""
        return self.gloo.size()

    def _get_backend(self, device):
        return self

    def send(self, tensors: list[Tensor], peer: int, tag: int = 0):
        """To one rank."""
        return self._exchange([("send", tensors, peer, tag)])

    def recv(self, tensors: list[Tensor], peer: int, tag: int = 0):
        """From one rank."""
        return self._exchange([("recv", tensors, peer, tag)])


class Work(dist.Work):
    """Calls of gloo; `wait` ends them, fills the device's tensors and makes the current stream wait for that."""

    def __init__(self, stream: torch.cuda.Stream, started: list, filled: list[tuple[Tensor, Tensor]]):
        super().__init__()
        self._stream, self._started, self._filled = stream, started, filled
        self._event = stream.record_event()

    def wait(self, timeout=None) -> bool:
        """The host waits for the other ranks, unlike NCCL's."""
        while self._started:  # which must be asked once
            self._started.pop(0).wait()
        if self._filled:
            with torch.cuda.stream(self._stream):
                for tensor, host in self._filled:
                    tensor.data.copy_(host, non_blocking=True)  # below autograd, as a kernel writes
            self._event, self._filled = self._stream.record_event(), []
        torch.cuda.current_stream().wait_event(self._event)
        return True

    def is_completed(self) -> bool:
        """Whether it was waited for."""
        return not self._started and self._event.query()


class StagedGloo(OverGloo):
    """A process group of ranks that share a device."""

    def __init__(self, *args):
        super().__init__(*args)
        self._stream: torch.cuda.Stream | None = None  # made when it is used: a fork may have no CUDA yet
        self._batch: list[Work] | None = None

    def getBackendName(self) -> str:  # noqa: N802
        """As torch asks."""
        return BACKEND

    def _start_coalescing(self, device):
        self._batch = []

    def _end_coalescing(self, device) -> Work:
        works, self._batch = self._batch or [], None
        return Work(torch.cuda.current_stream(), works, [])

    def _exchange(self, messages: list[tuple]) -> Work:
        ((name, tensors, peer, tag),) = messages
        return self._start(name, [tensors, peer, tag], {}, fills=name == "recv")

    def _start(self, name: str, args: list, named: dict, fills: bool = True) -> Work:
        """Starts a call of gloo. `fills`: it writes into the tensors of the first argument."""
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(f"{name} over staged gloo cannot be captured: --decode-graphs off runs without graphs")
        stream = self._stream = self._stream or torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        filled: list[tuple[Tensor, Tensor]] = []
        with torch.cuda.stream(stream):
            hosts = [_on_host(name, value, filled if fills and not index else []) for index, value in enumerate(args)]
            named = {key: _on_host(name, value, []) for key, value in named.items()}
        stream.synchronize()
        work = Work(stream, [getattr(self.gloo, name)(*hosts, **named)], filled)
        if self._batch is not None:
            self._batch.append(work)
        return work


def _on_host(name: str, value, copies: list[tuple[Tensor, Tensor]]):
    """A pinned copy of an argument's tensors at any depth; `copies` gets each tensor with its own."""
    if isinstance(value, list | tuple):
        return type(value)(_on_host(name, each, copies) for each in value)
    if not isinstance(value, Tensor):
        return value
    if not value.is_cuda:
        raise RuntimeError(f"No backend type associated with device type cpu ({name} over staged gloo)")
    if value.dtype in AS_BYTES and "reduce" in name:
        raise TypeError(f"{name} of {value.dtype} over staged gloo: it only moves such numbers")
    host = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
    host.copy_(value.data, non_blocking=True)
    copies.append((value, host))
    return host.unsqueeze(-1).view(torch.uint8) if value.dtype in AS_BYTES else host


def _collective(name: str):
    def call(self, *args, **named):
        return self._start(name, [*args], named)

    return call


def register():
    """Makes the backend known to torch, once."""
    if hasattr(dist.Backend, BACKEND.upper()):
        return
    for name in COLLECTIVES:
        if hasattr(dist.ProcessGroupGloo, name):
            setattr(StagedGloo, name, _collective(name))
    dist.Backend.register_backend(BACKEND, StagedGloo, devices=["cuda"])


if __name__ == "__main__":
    from megarl.mcore import device
    from tools.gpu import staged  # not this module, which runs as __main__

    staged.register()
    os.environ[device.BACKEND] = BACKEND
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
