"""From what a walk did, one thing after another, to the time that it is predicted to take on an H100.

The host issues work, and the device does it in order. The host is ahead of the device until it waits for it. Links and
their latency are those of `megarl.plan`, from data sheets.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from megarl.planning.step_time import GPUS, LATENCY, MFU, NETWORK, RANKS_PER_NODE, Cluster
from tests.cuda_walk.cost.work import Work


class Constants(NamedTuple):
    """Of a device and its host: seconds, bytes per second, FLOPs per second."""

    bandwidth: float  # that a copy reaches
    flops: float  # that a product of 8192 × 8192 matrices in bf16 reaches
    fp32_flops: float
    kernel: float  # that a kernel takes besides its bytes or FLOPs
    gap: float  # between two kernels
    operator: float  # that the host takes for an operator of Python's
    call: float  # that the host takes for an operator of autograd's, a copy, or the launch of a graph
    step: float  # that the host takes between two steps of the rollout


# Bandwidth and FLOPs as measured (docs/figures.md); in fp32 the data sheet's, at the share that bf16 reaches; gap, call
# assumed. `kernel`, `step` and `operator` are those with which a decode step of one request of 1.7 B parameters takes
# the 2.6 ms of kernels, 3.2 ms in a graph and 26 ms without that were measured. Nothing else was fitted.
H100 = Constants(
    3.0e12, 774e12, 52e12, kernel=3.6e-6, gap=1.3e-6, operator=73e-6, call=10e-6, step=0.1e-3
)  # fmt: skip
CLUSTER = Cluster("h100", GPUS["h100"], MFU, NETWORK * 1e9, RANKS_PER_NODE)


class Collective(NamedTuple):
    """What a collective of a group sends from a rank."""

    name: str
    bytes: float
    ranks: int
    is_backward: bool = False  # issued by autograd

    @property
    def seconds(self) -> float:
        """A group of up to 8 ranks is within a node."""
        return LATENCY + self.bytes / CLUSTER.speed(self.ranks) if self.ranks > 1 else 0.0


class Wait(NamedTuple):
    """The host waits for the device."""


class Send(NamedTuple):
    """The host copies to the device."""


class Replay(NamedTuple):
    """The launch of a graph of what a capture has recorded."""

    work: list


@dataclass
class Prediction:
    """Counts of a phase and its predicted seconds: of the device's kernels, of the host, and of both together."""

    eager: int = 0  # kernels that are launched one by one
    in_graph: int = 0
    bytes: float = 0.0
    flops: float = 0.0
    waits: int = 0
    sends: int = 0
    collectives: int = 0
    sent: float = 0.0
    device: float = 0.0
    host: float = 0.0
    seconds: float = 0.0
    by_name: Counter = field(default_factory=Counter)  # the device's seconds


def kernel_seconds(work: Work | Collective, c: Constants) -> float:
    """Seconds of the device."""
    if isinstance(work, Collective):
        return work.seconds
    flops = c.fp32_flops if work.is_fp32 else c.flops
    return max(work.bytes / c.bandwidth, work.flops / flops) + work.kernels * c.kernel


def predict(events: list, c: Constants = H100) -> Prediction:
    """Plays events on two clocks, the host's and the device's."""
    found, host, device = Prediction(), 0.0, 0.0
    for event in events:
        if isinstance(event, Wait):
            found.waits += 1
            host = device = max(host, device)
        elif isinstance(event, Send):
            found.sends += 1
            host += c.call
            found.host += c.call
        elif isinstance(event, Replay):
            host += c.call
            found.host += c.call
            device = max(host, device) + sum(_done(work, found, c) for work in event.work)
            found.in_graph += sum(getattr(work, "kernels", 1) for work in event.work)
        else:
            issued = c.call if event.is_backward else c.operator
            host += issued
            found.host += issued
            device = max(host, device) + _done(event, found, c)
            found.eager += getattr(event, "kernels", 1)
    found.seconds = max(host, device)
    return found


def _done(work: Work | Collective, found: Prediction, c: Constants) -> float:
    """Counts what the device does; its seconds, with the gap after it."""
    seconds = kernel_seconds(work, c)
    found.device += seconds
    found.by_name[work.name] += seconds
    if isinstance(work, Collective):
        found.collectives += work.ranks > 1
        found.sent += work.bytes
        return seconds + c.gap
    found.bytes += work.bytes
    found.flops += work.flops
    return seconds + work.kernels * c.gap
