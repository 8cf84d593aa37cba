"""What a run needs of its process and a plug-in may change: it is put back after the plug-in's code, and said once.

A reward that turns gradients off for a model of its own would otherwise end the run's learning, and nothing would tell.
Environment variables, the search path and the generators of random numbers are the plug-in's to change: no result
depends on them. Processes of environments and of `--reward-workers` are the plug-in's own.
"""

import contextlib
import functools
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from megarl.errors import warn
from megarl.stop_signals import STOP_SIGNALS


class _State(NamedTuple):
    name: str
    read: Callable[[], Any]
    put: Callable[[Any], object]


_reported: set[tuple[str, str]] = set()  # (caller, name of a state)


@contextlib.contextmanager
def kept(caller: str) -> Iterator[None]:
    """Runs code of the plug-in `caller`, its flag and name; a warning names each state that it changes, once."""
    before = [(state, state.read()) for state in _states()]
    try:
        yield
    finally:
        changed = [(state, value) for state, value in before if state.read() != value]
        for state, value in changed:
            state.put(value)
        new = [state.name for state, _ in changed if (caller, state.name) not in _reported]
        if new:
            _reported.update((caller, name) for name in new)
            warn([f"{caller} changed {', '.join(new)}; the run needs it, so it is put back after each call"])


def keeping(caller: str, function: Callable) -> Callable:
    """The function, called within `kept`."""

    @functools.wraps(function)
    def call(*args, **kwargs):
        with kept(caller):
            return function(*args, **kwargs)

    return call


def _states() -> tuple[_State, ...]:
    of_signals = _OF_SIGNALS if threading.current_thread() is threading.main_thread() else ()
    return _OF_PYTHON + of_signals + (_of_torch() if "torch" in sys.modules else ())


def _working_directory() -> str | None:
    try:
        return os.getcwd()
    except FileNotFoundError:  # it was removed
        return None


def _stream(name: str) -> tuple[Any, bool]:
    """A stream, and whether it is closed."""
    return getattr(sys, name), getattr(getattr(sys, name), "closed", False)


def _put_stream(name: str, before: tuple[Any, bool]):
    stream, was_closed = before
    if getattr(stream, "closed", False) and not was_closed:
        number = {"stdout": 1, "stderr": 2}[name]
        stream = open(number, "w", 1, encoding="utf-8", errors="backslashreplace", closefd=False)
    setattr(sys, name, stream)


_OF_PYTHON = (
    _State("the working directory", _working_directory, lambda before: os.chdir(before or ".")),
    _State("sys.stdout", functools.partial(_stream, "stdout"), functools.partial(_put_stream, "stdout")),
    _State("sys.stderr", functools.partial(_stream, "stderr"), functools.partial(_put_stream, "stderr")),
)
_OF_SIGNALS = tuple(  # that only the main thread can set
    _State(f"the handler of {each.name}", functools.partial(signal.getsignal, each),
           functools.partial(signal.signal, each))
    for each in STOP_SIGNALS
)  # fmt: skip


@functools.cache
def _of_torch() -> tuple[_State, ...]:
    import torch

    return (
        _State("whether torch computes gradients", torch.is_grad_enabled, torch.set_grad_enabled),
        _State("torch's default dtype", torch.get_default_dtype, torch.set_default_dtype),
        # With None no function that makes tensors goes through a mode of torch; megarl sets no default device.
        _State("torch's default device", torch.get_default_device, lambda _: torch.set_default_device(None)),
        _State("torch's number of threads", torch.get_num_threads, torch.set_num_threads),
        _State("torch's deterministic algorithms", torch.get_deterministic_debug_mode,
               torch.set_deterministic_debug_mode),
        _State("torch's precision of matrix products", torch.get_float32_matmul_precision,
               torch.set_float32_matmul_precision),
    )  # fmt: skip
