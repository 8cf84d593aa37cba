"""gloo as NCCL: it refuses what NCCL refuses, works on streams of its own, and its collectives can be captured."""

import contextlib
import functools
import sys

import operators  # type: ignore[import-not-found]
import torch
import torch.distributed as dist
from torch import Tensor

from tests.emulator import matching
from tools.gpu.staged import COLLECTIVES, OverGloo

BACKEND = "emulated_nccl"
DTYPES = {
    torch.int8, torch.uint8, torch.bool, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32,
    torch.float64, torch.float8_e4m3fn, torch.float8_e5m2,
}  # fmt: skip
IN_PLACE = ("allreduce", "allreduce_coalesced", "broadcast", "reduce")  # others: outputs, then inputs


_pending: list["Work"] = []  # for which the host has not yet waited


class Work(dist.Work):
    """Work on a stream of NCCL's: `wait` makes the current stream wait for it. Holds the tensors until then."""

    def __init__(self, of_gloo: list, stream: torch.cuda.Stream, tick: int, tensors: list[Tensor]):
        super().__init__()
        self._of_gloo, self._event, self._stream, self.tick = of_gloo, stream.record_event(), stream.cuda_stream, tick
        self._tensors = tensors
        self.before_passing = lambda: None
        _pending.append(self)
        operators.on_host_wait(_host_waits)

    def wait(self, timeout=None) -> bool:
        """The emulated device is ready when gloo is."""
        self._finish()
        torch.cuda.current_stream().wait_event(self._event)
        return True

    def is_completed(self) -> bool:
        """Whether the host knows that it has passed."""
        return self._event.query()

    def pass_if_waited(self) -> bool:
        """Does what is still to be done if the host has waited for this work; whether it has."""
        if not operators.host_has_waited(self._stream, self.tick):
            return False
        self.before_passing()
        self._finish()
        return True

    def _finish(self):
        while self._of_gloo:  # which must be asked once
            self._of_gloo.pop(0).wait()
        self._tensors = []


class Barrier(Work):
    """The host waits for it."""

    def wait(self, timeout=None) -> bool:
        """Until all ranks are there."""
        super().wait()
        torch.cuda.current_stream().synchronize()
        return True


def _host_waits():
    works, _pending[:] = list(_pending), []
    _pending.extend([work for work in works if not work.pass_if_waited()])


class EmulatedNccl(OverGloo):
    """A process group on the emulated device."""

    def __init__(self, store, rank: int, size: int, timeout):
        super().__init__(store, rank, size, timeout)
        self._streams: dict[int | None, torch.cuda.Stream] = {}
        self._batch: tuple[list, list[Work]] | None = None  # messages, and collectives that have begun
        self.calls = matching.Calls(store, rank, size)

    def getBackendName(self) -> str:
        """As torch asks."""
        return "nccl"

    def _get_sequence_number_for_group(self) -> int:
        return self.calls.count

    def stream(self, peer: int | None = None) -> torch.cuda.Stream:
        """Of the group, or of sends to a peer and receives from it."""
        if peer not in self._streams:
            found = self._streams[peer] = torch.cuda.Stream()
            to = "" if peer is None else f" with rank {peer}"
            operators.name_stream(found.cuda_stream, f"NCCL's stream of group {self.group_name}{to}")
        return self._streams[peer]

    @contextlib.contextmanager
    def on_stream(self, peer: int | None = None):
        """Work on NCCL's stream, behind all of the current one."""
        stream = self.stream(peer)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            yield stream

    # -- sends and receives

    def _start_coalescing(self, device):
        self._batch = [], []

    def _end_coalescing(self, device):
        (messages, works), self._batch = self._batch, None
        if messages:
            works.append(self._exchange(messages, is_batch=True))
        return Work(works, self.stream(), max((work.tick for work in works), default=0), [])

    def _exchange(self, messages: list[tuple], is_batch: bool = False):
        host = [_on_host(name, tensors) for name, tensors, *_ in messages]
        if self._batch is not None:
            self._batch[0].extend(messages)
            return None
        with self.on_stream(None if is_batch else messages[0][2]) as stream:
            for name, tensors, *_ in messages:
                read, written = (tensors, []) if name == "send" else ([], tensors)
                tick = operators.launched(f"nccl {name}", read, written, None)
        sent = self.calls.exchange([(name, *tensors, peer) for name, tensors, peer, _ in messages], is_batch)
        started = [getattr(self.gloo, name)(x, *to) for (name, _, *to), x in zip(messages, host, strict=True)]
        work = Work(started, stream, tick, [x for _, tensors, *_ in messages for x in tensors])
        work.before_passing = lambda: self.calls.wait_for_receivers(sent)
        return work


def _collective(name: str):
    def call(self, *args, **kwargs):
        mapped, named = [_on_host(name, x) for x in args], {key: _on_host(name, x) for key, x in kwargs.items()}
        outs, *ins = [list(_tensors(x)) for x in [*args, *kwargs.values()] if isinstance(x, list | tuple | Tensor)] or [
            []
        ]
        inputs = outs if name in IN_PLACE else [x for each in ins for x in each]
        root = next((x.rootRank for x in [*args, *kwargs.values()] if hasattr(x, "rootRank")), None)

        def start():
            self.calls.collective(name, outs, inputs, root)
            return getattr(self.gloo, name)(*mapped, **named)

        with self.on_stream() as stream:
            written = [] if _only_reads(self, name, root) else outs
            tick = operators.launched(f"nccl {name}", inputs, written, lambda: start().wait())
        work = (Barrier if name == "barrier" else Work)([start()], stream, tick, [*outs, *inputs])
        if self._batch is not None:
            self._batch[1].append(work)
        return work

    return call


def _only_reads(group: EmulatedNccl, name: str, root: int | None) -> bool:
    return name == ("broadcast" if group.rank() == root else "reduce")


def _tensors(value):
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)


def _on_host(name: str, value):
    """Tensors of an argument on the host, at any depth; raises what NCCL raises."""
    if isinstance(value, list | tuple):
        return type(value)(_on_host(name, each) for each in value)
    if not isinstance(value, Tensor):
        return value
    if not value.is_cuda:
        raise RuntimeError(f"No backend type associated with device type cpu ({name} over NCCL)")
    if value.dtype not in DTYPES:
        raise TypeError(f"Input tensor data type is not supported for NCCL process group: {value.dtype} ({name})")
    if not value.is_contiguous():
        raise ValueError(f"Tensors must be contiguous ({name} over NCCL)")
    return operators.on_host(value)


def install():
    """Groups that ask for NCCL get the emulated one."""
    for name in COLLECTIVES:
        if hasattr(dist.ProcessGroupGloo, name):
            setattr(EmulatedNccl, name, _collective(name))
    dist.Backend.register_backend(BACKEND, EmulatedNccl, devices=["cuda"])
    dist.init_process_group = _renamed(dist.init_process_group)
    dist.new_group = _renamed(dist.new_group)
    dist.destroy_process_group = _ending(dist.destroy_process_group)


def _renamed(function):
    @functools.wraps(function)
    def call(*args, **kwargs):
        def named(value):
            return BACKEND if value == "nccl" else value

        return function(*map(named, args), **{key: named(value) for key, value in kwargs.items()})

    return call


def _ending(destroy):
    """Compares how often the ranks called before it destroys all groups."""

    @functools.wraps(destroy)
    def call(group=None):
        groups = [each for each in dist.distributed_c10d._world.pg_map if isinstance(each, EmulatedNccl)]
        if group is None and groups and sys.exc_info()[0] is None:
            for each in groups:
                each.calls.end()
            dist.group.WORLD.calls.leave()
        return destroy(group)

    return call
