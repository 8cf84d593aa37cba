"""GPUs by their data sheets, and the cluster that a plan is for."""

from dataclasses import dataclass
from typing import NamedTuple

from megarl.mcore.config.megatron_flags import parallel_sizes
from megarl.planning.memory import GIB

RESERVE = 0.1  # of a GPU's memory: CUDA context, NCCL buffers, workspaces, fragmentation, errors of the estimates
BANDWIDTH_SHARE = 0.8  # of a data sheet's bandwidth that transfers are assumed to reach
MFU, NETWORK = 0.4, 50.0  # assumed: share of the peak FLOPs; GB/s of a GPU between nodes (400 Gbit/s)
LATENCY = 20e-6  # assumed seconds of a collective of a decode step, whose few bytes take no time
RANKS_PER_NODE = 8


class GPU(NamedTuple):
    """A data sheet: memory in GiB, dense 16-bit FLOPs per second, bytes per second of memory and of links one way."""

    memory: float
    flops: float
    bandwidth: float
    link: float


# NVIDIA's data sheets of the SXM and HGX modules; FLOPs without sparsity, links at half of NVLink's total.
GPUS = {
    "a100": GPU(80, 312e12, 2.039e12, 300e9),
    "h100": GPU(80, 989e12, 3.35e12, 450e9),
    "h200": GPU(141, 989e12, 4.8e12, 450e9),
    "b200": GPU(180, 2250e12, 8.0e12, 900e9),
}


@dataclass(frozen=True)
class Cluster:
    """Nodes of equal GPUs. `mfu`: assumed share of the peak FLOPs; `network`: bytes/s of a GPU between nodes."""

    name: str
    gpu: GPU
    mfu: float
    network: float
    ranks_per_node: int

    def speed(self, ranks: int) -> float:
        """Bytes per second that a rank sends in a group of so many consecutive ranks, or one that spans them."""
        in_node = ranks <= self.ranks_per_node
        return BANDWIDTH_SHARE * (self.gpu.link if in_node else self.network)

    @property
    def flops(self) -> float:
        """FLOPs per second that a rank is assumed to reach."""
        return self.mfu * self.gpu.flops

    @property
    def assumptions(self) -> str:
        """What an estimate assumes, in one line."""
        gpu = self.gpu
        return (
            f"{self.name}: {self.mfu:.0%} of {gpu.flops / 1e12:.0f} TFLOPS; {BANDWIDTH_SHARE:.0%} of "
            f"{gpu.bandwidth / 1e12:.2f} TB/s memory, {gpu.link / 1e9:.0f} GB/s in nodes of {self.ranks_per_node}, "
            f"{self.network / 1e9:.0f} GB/s between"
        )


def expert_nodes(args, ranks_per_node: int) -> int:
    """Nodes over which the all-to-all of a role's experts goes, whose groups are consecutive ranks; 1 without one."""
    sizes = parallel_sizes(args)
    return -(-sizes.expert * sizes.expert_tensor // ranks_per_node) if sizes.expert > 1 else 1


def available(memory_gib: float) -> int:
    """Bytes of a GPU that a plan may use."""
    return int(memory_gib * GIB * (1 - RESERVE))
