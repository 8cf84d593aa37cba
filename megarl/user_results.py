"""What functions of the user give: numbers in the forms of any library, and results that must be awaited."""

import asyncio
import functools
import inspect
import math
import os
from collections.abc import Awaitable, Callable, Coroutine
from decimal import Decimal
from numbers import Real
from typing import Any, TypeVar

T = TypeVar("T")

_SHOWN = 200  # characters of a value in a message

_runners: dict[int, asyncio.Runner] = {}  # by process, because a fork must not use its parent's loop


def number_of(value: Any) -> float | None:
    """The number that a value is; None if it is none. Numbers are Python's, `Decimal` and `Fraction`, and those of
    numpy, torch and JAX: scalars, and arrays of one element. A number that no float holds is infinite, and a signalling
    NaN is NaN.
    """
    if not isinstance(value, Real | Decimal):
        item = getattr(value, "item", None)
        if not callable(item) or isinstance(value, type):
            return None
        try:
            value = item()
        except Exception:  # of an array of several elements; a method of another meaning can raise anything
            return None
        if not isinstance(value, Real | Decimal):
            return None
    try:
        return float(value)
    except OverflowError:
        return math.copysign(math.inf, value > 0 or -1)  # type: ignore[operator]  # real numbers have an order
    except ValueError:
        return float("nan")


def shown(value: Any) -> str:
    """A value for a message, of bounded length. Raises nothing: `repr` of a whole number of 5,000 digits does, and
    that of an object of the user may."""
    try:
        text = repr(value)
    except Exception:
        text = f"a value of the type {type(value).__name__}"
    return text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…"


def shown_error(error: BaseException) -> str:
    """Type and text of an exception, whose text may raise one itself."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return type(error).__name__


def is_async(function: Any) -> bool:
    """Whether a call gives a coroutine: of a coroutine function, a `partial` of one, or an object with such a call."""
    return any(map(inspect.iscoroutinefunction, _called(function)))


def is_generator(function: Any) -> bool:
    """Whether a call gives a generator, plain or asynchronous."""
    kinds = inspect.isgeneratorfunction, inspect.isasyncgenfunction
    return any(kind(each) for kind in kinds for each in _called(function))


def _called(function: Any) -> tuple[Any, Any]:
    """The function of a `partial`, and the method that a call of it runs if it is an object."""
    while isinstance(function, functools.partial):
        function = function.func
    return function, getattr(type(function), "__call__", None)  # noqa: B004  # the method itself, not whether it exists


def settled(result: Any) -> Any:
    """The result of a function; one that is awaitable is awaited here."""
    return run(_awaited(result)) if inspect.isawaitable(result) else result


def run(work: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine in the event loop of this process, which stays: clients of a module belong to it. What
    an alarm interrupts is cancelled when the loop runs again. For the main thread.
    """
    runner = _runners.get(os.getpid())
    if runner is None:
        runner = _runners[os.getpid()] = asyncio.Runner()
    try:
        return runner.run(work)
    except BaseException:
        for task in asyncio.all_tasks(runner.get_loop()):
            task.cancel()
        raise


async def together(
    function: Callable[[Any], Coroutine[Any, Any, T]], items: list[Any], seconds: float, concurrency: int
) -> list[T | BaseException]:
    """Results of an async function for each item, in their order; an exception instead where it raised. `seconds`:
    limit of each call from its start on; a later one is a `LateCall`. `concurrency`: calls that run at a time.
    """
    slots = asyncio.Semaphore(concurrency)

    async def one(item: Any) -> T | BaseException:
        async with slots:
            try:
                return await limited(function(item), seconds)
            except (Exception, SystemExit) as error:
                return error

    return await asyncio.gather(*map(one, items))


async def limited(work: Awaitable[T], seconds: float, what: str = "result") -> T:
    """The result of some work. LateCall, and the work is cancelled, if there is none within `seconds`; what it raises
    itself is raised, also a TimeoutError. `what`: names the result in the message.
    """
    limit = asyncio.timeout(seconds)
    try:
        async with limit:
            return await work
    except (Exception, SystemExit):
        if limit.expired():
            raise LateCall(f"no {what} within {seconds:g} s") from None
        raise


class LateCall(TimeoutError):
    """A call took longer than allowed. `is_stuck`: a thread still runs it."""

    is_stuck = False


async def _awaited(result: Any) -> Any:
    return await result
