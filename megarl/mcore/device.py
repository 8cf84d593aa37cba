"""Runs unmodified megatron-core 0.19 without CUDA, over gloo; does nothing if CUDA is present.

megarl calls `device()` and `backend()`. megatron-core hard-codes "cuda" for things that have a CPU equivalent: the
current device, a pinned buffer, a stream to wait for. `install()` patches these once, before megatron is imported: a
torch function mode would slow down every operation of a decode step.
"""

import contextlib
import functools
import logging
import os
import sys
import time
import types

import numpy as np
import torch
import torch.utils._device

from megarl.errors import UsageError

BACKEND = "MEGARL_DEVICE_BACKEND"
CPU = torch.device("cpu")
# Makes torch ask the driver's library for devices, which does not start CUDA: `cuda_environment` chooses before that.
ASK_DRIVER = "PYTORCH_NVML_BASED_CUDA_CHECK"
# Megarl hides them from Megatron without a device: their layers and optimizers would be chosen, and cannot run.
DEVICE_PACKAGES = ("transformer_engine", "apex")
FACTORIES = tuple("empty zeros ones full tensor arange rand randn randint empty_like zeros_like".split())


def has_cuda() -> bool:
    """Returns whether this process has a CUDA device."""
    return torch.cuda.is_available()


def device() -> torch.device:
    """Returns the device that holds this rank's models and batches."""
    return torch.device("cuda", torch.cuda.current_device()) if has_cuda() else CPU


def backend() -> str:
    """Returns the torch.distributed backend for `device()`; UsageError if `BACKEND` is set outside a check."""
    wanted = os.environ.get(BACKEND)
    if wanted and not (wanted == "staged" and has_cuda() and hasattr(torch.distributed.Backend, "STAGED")):
        raise UsageError(f"{BACKEND} {wanted}: only tools.gpu.staged sets it, for checks on a CUDA device; unset it")
    return wanted or ("nccl" if has_cuda() else "gloo")


def to_device(arrays: list[np.ndarray]) -> list[torch.Tensor]:
    """Returns int64 host arrays as tensors on `device()`: one asynchronous copy, without a device synchronisation."""
    if not has_cuda():
        return [torch.from_numpy(array) for array in arrays]
    flat = torch.from_numpy(np.concatenate([array.ravel() for array in arrays])).pin_memory()
    tensors = flat.to(device(), non_blocking=True).split([array.size for array in arrays])
    return [tensor.view(array.shape) for tensor, array in zip(tensors, arrays, strict=True)]


def accelerator_name() -> str | None:
    """Returns the name of this process's CUDA device, such as "NVIDIA H200"; None without one."""
    return torch.cuda.get_device_name() if has_cuda() else None


def peak_bytes() -> int | None:
    """Returns the peak bytes that tensors of this process have allocated on its CUDA device; None without one. The host
    has no equivalent: its peak resident set counts everything and varies from run to run."""
    return torch.cuda.max_memory_allocated() if has_cuda() else None


def _no_op():
    """Returns a new no-op function each time: torch's compiler keeps one rule per function object."""
    return lambda *_, **__: None


def _is_finished(*_) -> bool:
    return True


class CpuEvent:
    """A `torch.cuda.Event` for a device without streams: recorded work has already finished."""

    def __init__(self, *_, **__):
        self._time = 0.0

    def record(self, *_):
        self._time = time.perf_counter()

    synchronize = wait = _no_op()
    query = _is_finished

    def elapsed_time(self, end: "CpuEvent") -> float:
        """Returns milliseconds between the two records, as CUDA events do."""
        return (end._time - self._time) * 1e3


class CpuStream:
    """A `torch.cuda.Stream` for a device without streams."""

    cuda_stream = 0

    def __init__(self, *_, **__):
        self.device = CPU

    synchronize = wait_stream = wait_event = _no_op()
    query = _is_finished

    def record_event(self, event=None):
        event = event or CpuEvent()
        event.record()
        return event


_STREAM = CpuStream()


def _on_cpu(factory):
    """Wraps a factory function so that device "cuda" means the CPU and `pin_memory` is ignored."""

    @functools.wraps(factory)
    def wrapped(*args, **kwargs):
        if kwargs:
            requested = kwargs.get("device")
            if requested is not None and str(requested).startswith("cuda"):
                kwargs["device"] = CPU
            if kwargs.get("pin_memory"):
                kwargs["pin_memory"] = False
        return factory(*args, **kwargs)

    return wrapped


def _tensor_type(original):
    """Makes `Tensor.type()` return the CUDA type name: optimizers compare it with 'torch.cuda.FloatTensor'."""

    @functools.wraps(original)
    def wrapped(self, *args, **kwargs):
        name = original(self, *args, **kwargs)
        if not args and not kwargs and self.device.type == "cpu":
            return name.replace("torch.", "torch.cuda.", 1)
        return name

    return wrapped


def _tensor_to(original):
    """Makes `Tensor.to("cuda")` stay on the CPU."""

    @functools.wraps(original)
    def wrapped(self, *args, **kwargs):
        if args and (isinstance(args[0], (str, torch.device))) and str(args[0]).startswith("cuda"):
            args = (CPU, *args[1:])
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = CPU
        return original(self, *args, **kwargs)

    return wrapped


def _as_numpy(tensor, as_numpy: bool = False, **_):
    """Returns what a copy from the device would: the tensor, or its numpy array."""
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def _eager(function=None, **_):
    """Replaces `torch.compile` by a no-op: on a CPU it would start a C++ compiler for every small fusion."""
    return function if function is not None else lambda f: f


def cuda_functions() -> dict:
    """Returns replacements of the `torch.cuda` attributes that megatron-core calls on the paths megarl uses."""
    return {
        "current_device": lambda: CPU,
        "set_device": _no_op(),
        "device_count": lambda: 1,
        "synchronize": _no_op(),
        "empty_cache": _no_op(),
        "memory_stats": lambda *_, **__: dict.fromkeys(
            ("allocated_bytes.all.current", "reserved_bytes.all.current", "allocation.all.current"), 0
        ),
        "memory_allocated": lambda *_: 0,
        "memory_reserved": lambda *_: 0,
        "max_memory_allocated": lambda *_: 0,
        "is_current_stream_capturing": lambda: False,
        "get_device_capability": lambda *_: (0, 0),
        "get_device_properties": lambda *_: types.SimpleNamespace(name="cpu", major=0, minor=0, total_memory=0),
        "get_rng_state": lambda *_: torch.get_rng_state(),
        "set_rng_state": lambda state, *_: torch.set_rng_state(state),
        "manual_seed": lambda seed: torch.default_generator.manual_seed(seed),
        "Event": CpuEvent,
        "Stream": CpuStream,
        "current_stream": lambda *_: _STREAM,
        "default_stream": lambda *_: _STREAM,
        "stream": lambda *_: contextlib.nullcontext(),
        "set_stream": _no_op(),
    }


def _patch_torch():
    for name, function in cuda_functions().items():
        setattr(torch.cuda, name, function)
    torch.cuda.random.get_rng_state = torch.cuda.get_rng_state
    torch.cuda.random.set_rng_state = torch.cuda.set_rng_state
    torch.cuda.nvtx.range_push, torch.cuda.nvtx.range_pop = _no_op(), _no_op()
    torch.compile = _eager  # type: ignore[assignment]  # fewer overloads
    # torch lists its factory functions when a device is first used as a context manager. After the wrapping it would
    # list the wrappers, and `with torch.device("meta")`, with which transformers loads models, would do nothing.
    torch.utils._device._device_constructors()
    for name in FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    torch.Tensor.cuda = lambda self, *_, **__: self
    torch.Tensor.pin_memory = lambda self, *_, **__: self
    torch.Tensor.type = _tensor_type(torch.Tensor.type)
    torch.Tensor.to = _tensor_to(torch.Tensor.to)
    torch.nn.Module.cuda = lambda self, *_, **__: self


def _patch_megatron():
    """Patches the few calls that test for a GPU kernel instead of a device."""
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import token_dispatcher

    # Megatron leaves split sizes that are on the CPU as tensors, which all_to_all_single does not accept.
    token_dispatcher.maybe_move_tensor_to_cpu = _as_numpy
    # Both use CUDA's lazy calls, which never run on a machine without CUDA.
    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)


_installed = False


def install():
    """Sets what holds on every device; without CUDA, patches torch and megatron-core. The package calls it once."""
    global _installed
    if _installed:
        return
    # It builds a plan for every new shape, which takes longer than many steps; packed batches have new shapes always.
    torch.backends.cuda.enable_cudnn_sdp(False)
    os.environ.setdefault(ASK_DRIVER, "1")
    if has_cuda():
        return
    os.environ.pop(ASK_DRIVER)  # it would count the devices that `cuda_functions` reports
    _installed = True
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # "No CUDA runtime is found"
    for name in DEVICE_PACKAGES:
        sys.modules.setdefault(name, None)  # as `absent`, for good
    _patch_torch()
    _patch_megatron()
