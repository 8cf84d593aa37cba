"""Resolves a name given to a flag: a built-in object, or a user's function as `package.module:function`."""

import importlib
from typing import TypeVar

from megarl import user_results
from megarl.errors import UsageError
from megarl.user_code import place_of

T = TypeVar("T")


def load(flag: str, name: str, built_in: dict[str, T], awaits: bool = False) -> T:
    """The object of that name in `built_in`, otherwise the function `package.module:function`, which it imports.

    Args:
        awaits: the caller awaits what an async function gives.

    Raises:
        UsageError: the name is neither, the import fails, or the module has no such function, or one whose result
            nobody reads: a generator, or a coroutine. The message starts with flag and name.
    """
    if name in built_in:
        return built_in[name]
    module_name, colon, function_name = name.partition(":")
    if module_name.endswith(".py"):
        stem = module_name.removesuffix(".py").rpartition("/")[2]
        raise UsageError(f"{flag} {name}: is a file; write {stem}:{function_name}, with its folder in PYTHONPATH")
    if not (module_name and colon and function_name):
        raise UsageError(
            f"{flag} {name}: unknown; allowed: {', '.join(built_in)}, or a plug-in as package.module:function"
        )
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        # A plug-in can fail at import in any way, and every failure is the user's to fix.
        reason = " ".join(f"{type(error).__name__}: {error}{place_of(error)}".split())
        raise UsageError(f"{flag} {name}: cannot import {module_name}: {reason}") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        problem = "has no" if function is None else "has a non-callable"
        raise UsageError(f"{flag} {name}: {module_name} {problem} {function_name}; a function is needed")
    if user_results.is_generator(function):
        raise UsageError(f"{flag} {name}: yields; allowed is a function that returns its result")
    if not awaits and user_results.is_async(function):
        raise UsageError(f"{flag} {name}: is async, and nothing awaits it; allowed is a plain function")
    return function
