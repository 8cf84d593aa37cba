"""gloo as NCCL: it refuses what NCCL refuses, and its collectives can be captured."""

import functools

import operators  # type: ignore[import-not-found]
import torch
import torch.distributed as dist
from torch import Tensor

BACKEND = "emulated_nccl"
DTYPES = {
    torch.int8, torch.uint8, torch.bool, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32,
    torch.float64, torch.float8_e4m3fn, torch.float8_e5m2,
}  # fmt: skip
COLLECTIVES = (
    "allreduce", "allreduce_coalesced", "broadcast", "allgather", "_allgather_base", "all_gather_single", "gather",
    "scatter", "reduce", "reduce_scatter", "_reduce_scatter_base", "reduce_scatter_single", "alltoall",
    "alltoall_base", "all_to_all_single", "send", "recv", "barrier", "allgather_into_tensor_coalesced",
    "all_gather_single_coalesced", "reduce_scatter_tensor_coalesced", "reduce_scatter_single_coalesced",
)  # fmt: skip


class EmulatedNccl(dist.ProcessGroup):
    """A process group on the emulated device."""

    supports_coalescing = False
    _device_types = property(lambda self: [torch.device("cuda")])
    group_name = property(lambda self: dist.distributed_c10d._world.pg_names[self])
    pg_name = group_name

    def __init__(self, store, rank: int, size: int, timeout):
        super().__init__(rank, size)
        self.gloo, self.store = dist.ProcessGroupGloo(store, rank, size, timeout), store
        self._calls = 0

    def size(self) -> int:
        """Ranks."""
        return self.gloo.size()

    def getBackendName(self) -> str:
        """As torch asks."""
        return "nccl"

    def _get_backend(self, device):
        return self

    def _get_sequence_number_for_group(self) -> int:
        return self._calls


def _collective(name: str):
    def call(self, *args, **kwargs):
        mapped, named = [_on_host(name, x) for x in args], {key: _on_host(name, x) for key, x in kwargs.items()}
        operators.count(f"nccl {name}")
        self._calls += 1
        operators.record(lambda: getattr(self.gloo, name)(*mapped, **named).wait())
        return getattr(self.gloo, name)(*mapped, **named)

    return call


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


def _renamed(function):
    @functools.wraps(function)
    def call(*args, **kwargs):
        def named(value):
            return BACKEND if value == "nccl" else value

        return function(*map(named, args), **{key: named(value) for key, value in kwargs.items()})

    return call
