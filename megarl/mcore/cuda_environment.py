"""Environment variables that CUDA and NCCL read when they start.

`CUDA_DEVICE_MAX_CONNECTIONS`: how many queues kernels are launched from. Before compute capability 10, tensor and
context parallelism want one, for speed: a collective that is called before a matrix product then also starts before it.
Other layouts want CUDA's default, with which copies, sends and kernels of different streams do not wait for each other.
`NCCL_GRAPH_REGISTER`: NCCL registers the buffers of captured collectives, which may read illegal memory if segments of
torch's allocator are expandable; Megatron refuses both together.
"""

import ctypes
import os
from collections.abc import Iterable

from megarl.mcore import device

QUEUES, REGISTRATION = "CUDA_DEVICE_MAX_CONNECTIONS", "NCCL_GRAPH_REGISTER"
ALLOCATOR = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"
NEEDS_NONE = 10  # compute capability from which the order of launches is kept without it
NVML = "libnvidia-ml.so.1"  # of the driver


def capability() -> int | None:
    """Returns the major compute capability of the node's first device, without starting CUDA; None: not known."""
    try:
        nvml = ctypes.CDLL(NVML)
    except OSError:
        return None
    handle, major, minor = ctypes.c_void_p(), ctypes.c_int(), ctypes.c_int()
    failed = (
        nvml.nvmlInit_v2()
        or nvml.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(handle))
        or nvml.nvmlDeviceGetCudaComputeCapability(handle, ctypes.byref(major), ctypes.byref(minor))
    )
    return None if failed else major.value


def has_expandable_segments() -> bool:
    """Whether the user has chosen expandable segments for torch's allocator."""
    settings = ",".join(os.environ.get(name, "") for name in ALLOCATOR).replace(" ", "")
    return "expandable_segments:True" in settings.split(",")


def choose(roles: Iterable):
    """Sets the variables for the roles of this rank, by their Megatron namespaces, unless the user has set them. Must
    come before CUDA starts. Devices of unknown capability count as older ones."""
    if not device.has_cuda():
        return
    wants_one = any(args.tensor_model_parallel_size > 1 or args.context_parallel_size > 1 for args in roles)
    if wants_one and (capability() or 0) < NEEDS_NONE:
        os.environ.setdefault(QUEUES, "1")
    if has_expandable_segments():
        os.environ.setdefault(REGISTRATION, "0")
