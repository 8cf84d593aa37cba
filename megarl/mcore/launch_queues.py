"""How many queues CUDA launches kernels from; it reads `CUDA_DEVICE_MAX_CONNECTIONS` when it starts.

Before compute capability 10, tensor and context parallelism want one queue: a collective that is called before a matrix
product then also starts before it, and both overlap. It is speed, not correctness. Other layouts want CUDA's default,
with which copies, sends and kernels of different streams do not wait for each other.
"""

import ctypes
import os
from collections.abc import Iterable

from megarl.mcore import device

VARIABLE = "CUDA_DEVICE_MAX_CONNECTIONS"
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


def choose(roles: Iterable):
    """Sets the variable for the roles of this rank, by their Megatron namespaces, unless the user has set it.

    Must come before CUDA starts. Devices of unknown capability count as older ones.
    """
    wants_one = any(args.tensor_model_parallel_size > 1 or args.context_parallel_size > 1 for args in roles)
    if device.has_cuda() and wants_one and (capability() or 0) < NEEDS_NONE:
        os.environ.setdefault(VARIABLE, "1")
