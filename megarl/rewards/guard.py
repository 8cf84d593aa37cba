"""A time limit for a call in this process: an alarm that raises inside it."""

import signal
import sys
import threading
import time
from collections.abc import Callable

from megarl.errors import UsageError

_REPEAT = 1.0  # seconds until the next alarm for a call that swallowed one


class _Expired(BaseException):
    """Not an Exception, so that an `except Exception` in a verifier does not catch it."""


def check_here():
    """UsageError unless alarms can be set here: they need POSIX timers and the main thread."""
    if not hasattr(signal, "setitimer"):
        raise UsageError("--reward-workers 0: needs POSIX timers, which this platform lacks; allowed: 1 or more")
    if threading.current_thread() is not threading.main_thread():
        raise UsageError("--reward-workers 0: only a main thread can stop a verifier that hangs; allowed: 1 or more")


def call(function: Callable, argument, seconds: float):
    """Return `function(argument)`; TimeoutError after `seconds`, even if the function catches the alarm and returns.

    The alarm interrupts Python code, regular expressions and system calls, but not C code that never checks signals.
    Restores the earlier SIGALRM handler and timer, minus the time spent here. Raises what the function raises, and
    UsageError if no alarm can be set (see `check_here`).
    """
    check_here()
    here, armed, expired = sys._getframe(), True, False

    def expire(_, frame):
        nonlocal expired
        expired = expired or armed
        # Raise only inside the call: an exception between two lines of this function would skip its clean-up.
        while armed and frame is not here:
            if frame.f_code is _run.__code__:
                raise _Expired
            frame = frame.f_back

    handler = signal.signal(signal.SIGALRM, expire)
    started = time.monotonic()
    left, interval = signal.setitimer(signal.ITIMER_REAL, seconds, _REPEAT)
    try:
        result = _run(function, argument)
    except _Expired:
        result = None
    finally:
        armed = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        if left:
            # If it expired meanwhile, fire it now: zero would cancel it.
            signal.setitimer(signal.ITIMER_REAL, max(left - (time.monotonic() - started), 1e-6), interval)
    if expired:
        raise TimeoutError(f"no result within {seconds:g} s")
    return result


def _run(function: Callable, argument):
    return function(argument)
