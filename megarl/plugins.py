"""What a flag names: something built in, or a user's own function as `package.module:function`."""

import importlib
from typing import TypeVar

from megarl.errors import UsageError

T = TypeVar("T")


def load(flag: str, name: str, built_in: dict[str, T]) -> T:
    """What `built_in` has under a name, else the plug-in `package.module:function`, which is imported here.

    Raises:
        UsageError: neither; it cannot be imported; it has no such function. One line that starts with flag and name.
    """
    if name in built_in:
        return built_in[name]
    module_name, colon, function_name = name.partition(":")
    if not (module_name and colon and function_name):
        raise UsageError(
            f"{flag} {name}: unknown; allowed: {', '.join(built_in)}, or a plug-in as package.module:function"
        )
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        # A plug-in may fail at import in any way; whatever it is, this is the user's file to mend.
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise UsageError(f"{flag} {name}: cannot import {module_name}: {reason}") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        problem = "has no" if function is None else "has a non-callable"
        raise UsageError(f"{flag} {name}: {module_name} {problem} {function_name}; a function is needed")
    return function
