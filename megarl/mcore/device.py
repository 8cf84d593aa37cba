"""Runs unmodified megatron-core 0.19 without CUDA, over gloo; does nothing at all when CUDA is present.

megarl's own code asks `device()` and `backend()` and never writes "cuda". megatron-core does write it, in places
that have a CPU meaning: "the current device", a pinned buffer, a stream to wait for. `install()` gives each of
those its CPU meaning, once, before megatron is imported. Nothing sits in the dispatch path of tensor operations:
only factory functions are wrapped, since a torch function mode would tax every operation of a decode step.
"""

import contextlib
import functools
import logging
import time
import types

import numpy as np
import torch

CPU = torch.device("cpu")
FACTORIES = (
    "empty", "zeros", "ones", "full", "tensor", "arange", "rand", "randn", "randint", "empty_like", "zeros_like",
)  # fmt: skip


def has_cuda() -> bool:
    """Whether this process has a CUDA device."""
    return torch.cuda.is_available()


def device() -> torch.device:
    """The device that models and batches of this rank live on."""
    return torch.device("cuda", torch.cuda.current_device()) if has_cuda() else CPU


def backend() -> str:
    """The torch.distributed backend for `device()`."""
    return "nccl" if has_cuda() else "gloo"


def send(arrays: list[np.ndarray]) -> list[torch.Tensor]:
    """int64 arrays of the host as tensors on `device()`: one copy, and nobody waits for what the device does."""
    if not has_cuda():
        return [torch.from_numpy(array) for array in arrays]
    whole = torch.from_numpy(np.concatenate([array.ravel() for array in arrays])).pin_memory()
    parts = whole.to(device(), non_blocking=True).split([array.size for array in arrays])
    return [part.view(array.shape) for part, array in zip(parts, arrays, strict=True)]


def peak_bytes() -> int | None:
    """Most memory that tensors of this process have held on its CUDA device; None without one.

    A host has no such number: its peak resident set counts everything and differs from run to run.
    """
    return torch.cuda.max_memory_allocated() if has_cuda() else None


class CpuEvent:
    """A `torch.cuda.Event` on a device without queues: what was recorded has already happened."""

    def __init__(self, *_, **__):
        self._time = 0.0

    def record(self, *_):
        self._time = time.perf_counter()

    def synchronize(self):
        """Nothing is pending."""

    def wait(self, *_):
        """Nothing is pending."""

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: "CpuEvent") -> float:
        """Milliseconds between two records, as CUDA's events report them."""
        return (end._time - self._time) * 1e3


class CpuStream:
    """A `torch.cuda.TokenStream` on a device without queues."""

    cuda_stream = 0

    def __init__(self, *_, **__):
        self.device = CPU

    def wait_stream(self, *_):
        """Nothing is pending."""

    def wait_event(self, *_):
        """Nothing is pending."""

    def synchronize(self):
        """Nothing is pending."""

    def record_event(self, event=None):
        event = event or CpuEvent()
        event.record()
        return event

    def query(self) -> bool:
        return True


_STREAM = CpuStream()


def _nothing():
    """A function of its own that does nothing: torch's compiler keeps one rule for each function object."""
    return lambda *_, **__: None


def _set_cpu_rng_state(state, *_):
    torch.set_rng_state(state)


def _on_cpu(factory):
    """A factory that reads device "cuda" as CPU and drops the wish for pinned memory."""

    @functools.wraps(factory)
    def wrapped(*args, **kwargs):
        if kwargs:
            wanted = kwargs.get("device")
            if wanted is not None and str(wanted).startswith("cuda"):
                kwargs["device"] = CPU
            if kwargs.get("pin_memory"):
                kwargs["pin_memory"] = False
        return factory(*args, **kwargs)

    return wrapped


def _tensor_type(original):
    """`Tensor.type()` names the CUDA class of a dtype: optimizers compare with 'torch.cuda.FloatTensor'."""

    @functools.wraps(original)
    def wrapped(self, *args, **kwargs):
        name = original(self, *args, **kwargs)
        if not args and not kwargs and self.device.type == "cpu":
            return name.replace("torch.", "torch.cuda.", 1)
        return name

    return wrapped


def _tensor_to(original):
    """`Tensor.to("cuda")` stays on the CPU."""

    @functools.wraps(original)
    def wrapped(self, *args, **kwargs):
        if args and (isinstance(args[0], (str, torch.device))) and str(args[0]).startswith("cuda"):
            args = (CPU, *args[1:])
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = CPU
        return original(self, *args, **kwargs)

    return wrapped


def _as_numpy(tensor, as_numpy: bool = False, **_):
    """What a copy from the device would give: a tensor, or its numpy array."""
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def _eager(function=None, **_):
    """`torch.compile` leaves functions as they are: on a CPU it would start a C++ compiler for every tiny fusion."""
    return function if function is not None else lambda f: f


def cuda_functions() -> dict:
    """Replacement of each `torch.cuda` attribute that megatron-core calls on the paths megarl uses."""
    return {
        "current_device": lambda: CPU,
        "set_device": _nothing(),
        "device_count": lambda: 1,
        "synchronize": _nothing(),
        "empty_cache": _nothing(),
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
        "set_rng_state": _set_cpu_rng_state,
        "manual_seed": lambda seed: torch.default_generator.manual_seed(seed),
        "Event": CpuEvent,
        "Stream": CpuStream,
        "current_stream": lambda *_: _STREAM,
        "default_stream": lambda *_: _STREAM,
        "stream": lambda *_: contextlib.nullcontext(),
        "set_stream": _nothing(),
    }


def _patch_torch():
    for name, function in cuda_functions().items():
        setattr(torch.cuda, name, function)
    torch.cuda.random.get_rng_state = torch.cuda.get_rng_state
    torch.cuda.random.set_rng_state = torch.cuda.set_rng_state
    torch.cuda.nvtx.range_push, torch.cuda.nvtx.range_pop = _nothing(), _nothing()
    torch.compile = _eager
    for name in FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    torch.Tensor.cuda = lambda self, *_, **__: self
    torch.Tensor.pin_memory = lambda self, *_, **__: self
    torch.Tensor.type = _tensor_type(torch.Tensor.type)
    torch.Tensor.to = _tensor_to(torch.Tensor.to)
    torch.nn.Module.cuda = lambda self, *_, **__: self


def _patch_megatron():
    """The few places that test for a GPU kernel instead of asking for a device."""
    import megatron.core.inference.communication_utils as communication
    import megatron.core.inference.contexts.dynamic_context as dynamic_context
    import megatron.core.tensor_parallel.random as random
    import megatron.core.transformer.attention as attention
    import megatron.core.transformer.moe.token_dispatcher as token_dispatcher

    attention.is_fa_min_version = lambda *_: (
        True
    )  # the check only guards the kernel that mcore/attention/packed_attention.py replaces
    dynamic_context.triton_append_key_value_cache = None
    communication._is_cuda = _nothing()
    # "On the CPU already" leaves split sizes as tensors, which all_to_all_single does not take.
    token_dispatcher.maybe_move_tensor_to_cpu = _as_numpy
    # Both go through CUDA's lazy calls, which a machine without CUDA never executes.
    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)


_installed = False


def install():
    """Makes megatron-core run on the CPU; called once by the package. With CUDA present it changes nothing."""
    global _installed
    if _installed or has_cuda():
        return
    _installed = True
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # "No CUDA runtime is found"
    _patch_torch()
    _patch_megatron()
