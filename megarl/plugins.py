"""What the name that a flag gets stands for: a row of a room's table, or something of the user's own.

Everything that is chosen by name is registered in one way: a table in the `__init__` of its room says which object a
name stands for, or where it is as "module:attribute" if it is imported only when it is asked for. A user names his own
as `file.py:NAME` or `package.module:NAME`.
"""

import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

from megarl import process_state, user_results
from megarl.errors import UsageError
from megarl.user_code import place_of

FORMS = "file.py:function or package.module:function"
_SUFFIX = ".py"


def is_plugin(name: str) -> bool:
    """Whether a name has the form of something of the user's own."""
    module, colon, attribute = name.rpartition(":")
    if not colon or not attribute.isidentifier():
        return False
    is_file = module.endswith(_SUFFIX) and not module.startswith(_SUFFIX)
    return is_file or all(part.isidentifier() for part in module.split("."))


def load(flag: str, name: str, table: Mapping[str, Any], takes: Sequence[str] | None = None, awaits: bool = False):
    """The object of that name in `table`, otherwise the user's, which is imported.

    Args:
        takes: the arguments of a call of the user's function; None: its signature is not checked.
        awaits: the caller awaits what an async function gives.

    Raises:
        UsageError: the name is neither, the import fails, or there is no such function, or one whose result nobody
            reads: a generator, or a coroutine; or one with other arguments. The message starts with flag and name.
    """
    if name in table:
        row = table[name]
        return _attribute(flag, name, *row.split(":")) if isinstance(row, str) else row
    module_name, colon, function_name = name.rpartition(":")
    if name.removesuffix(":").endswith(_SUFFIX):
        raise UsageError(f"{flag} {name}: names a file alone; write {name.removesuffix(':')}:NAME, of a function in it")
    if not (module_name and colon and function_name):
        raise UsageError(f"{flag} {name}: unknown; allowed: {', '.join(table)}, or a plug-in as {FORMS}")
    function = _attribute(flag, name, module_name, function_name)
    if not callable(function):
        problem = "has no" if function is None else "has a non-callable"
        raise UsageError(f"{flag} {name}: {module_name} {problem} {function_name}; a function is needed")
    if user_results.is_generator(function):
        raise UsageError(f"{flag} {name}: yields; allowed is a function that returns its result")
    if not awaits and user_results.is_async(function):
        raise UsageError(f"{flag} {name}: is async, and nothing awaits it; allowed is a plain function")
    if takes is not None and (found := other_signature(function, takes)):
        raise UsageError(f"{flag} {name}: takes {found}{_defined(function)}; megarl calls it with ({', '.join(takes)})")
    return function


def load_kept(
    flag: str, name: str, table: Mapping[str, Any], takes: Sequence[str], wrap: Callable[[Callable], Any]
) -> Any:  # fmt: skip
    """As `load`, for code that runs in the process of the run, whose state is put back after each call.

    Args:
        wrap: makes a row of the table, with a field `function`, of a user's function.

    Raises:
        UsageError: as of `load`, or `wrap` raises ValueError.
    """
    if name in table:
        return load(flag, name, table)
    caller = f"{flag} {name}"
    with process_state.kept(caller):
        found = load(flag, name, table, takes)
    try:
        row = wrap(found)
    except ValueError as error:
        raise UsageError(f"{caller}: {error}") from None
    return row._replace(function=process_state.keeping(caller, row.function))


def other_signature(function: Callable, takes: Sequence[str]) -> str | None:
    """The signature of a function that cannot be called with these positional arguments; None if it can."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # of functions in C, which do not tell
        return None
    try:
        signature.bind(*takes)
    except TypeError:
        return str(signature)
    return None


def _defined(function: Any) -> str:
    """` (FILE:LINE)` where a function of the user is defined; "" where that cannot be told."""
    code = getattr(inspect.unwrap(getattr(function, "__func__", function)), "__code__", None)
    return "" if code is None else f" ({code.co_filename}:{code.co_firstlineno})"


def _attribute(flag: str, name: str, module_name: str, attribute: str) -> Any:
    """An attribute of a module or a file, None if it has none. UsageError if the import fails."""
    try:
        is_file = module_name.endswith(_SUFFIX)
        module = _module_of_file(module_name) if is_file else importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        # A plug-in can fail at import in any way, and every failure is the user's to fix.
        reason = " ".join(f"{type(error).__name__}: {error}{place_of(error)}".split())
        raise UsageError(f"{flag} {name}: cannot import {module_name}: {reason}") from error
    return getattr(module, attribute, None)


def _module_of_file(path: str) -> ModuleType:
    """The module of a file, imported once; it finds what lies in its folder, after all else that Python finds."""
    path = os.path.abspath(path)
    name = f"{os.path.basename(path).removesuffix(_SUFFIX)}@{os.path.dirname(path)}".replace(".", "_")
    if name in sys.modules:
        return sys.modules[name]
    if not os.path.isfile(path):
        raise FileNotFoundError(f"no such file {path}")
    if os.path.dirname(path) not in sys.path:
        sys.path.append(os.path.dirname(path))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None  # it is a file of Python
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
