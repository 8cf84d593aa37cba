"""The user's code: found by its name, kept from changing what a run needs, and named when it raises.

Everything that is chosen by name is registered in one way: a table in the `__init__` of its room says which object a
name stands for, or where it is as "module:attribute" if it is imported only when it is asked for. A user names his own
as `file.py:NAME` or `package.module:NAME`.

A reward that turns gradients off for a model of its own would otherwise end the run's learning, and nothing would tell.
So what a run needs of its process is put back after a plug-in's code, and said once. Environment variables, the search
path and the generators of random numbers are the plug-in's to change: no result depends on them. Processes of
environments and of `--reward-workers` are the plug-in's own.
"""

import contextlib
import functools
import importlib
import importlib.util
import inspect
import itertools
import os
import signal
import sys
import sysconfig
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from megarl import user_results
from megarl.child_process import STOP_SIGNALS
from megarl.errors import TooManyFailures, UsageError, warn

FORMS = "file.py:function or package.module:function"
_SUFFIX = ".py"
FULL = "MEGARL_TRACEBACK"  # environment variable: `full` shows the whole traceback
_MEGARL = str(Path(__file__).parent)
# Folders of megarl, of packages and of Python; and modules without a file.
_NOT_THE_USERS = (_MEGARL, *(sysconfig.get_path(name) for name in ("purelib", "stdlib")), "<")


def place_of(error: BaseException) -> str:
    """` (FILE:LINE)` where code of the user that megarl called raised, or called what did; "" if none ran."""
    _, own = _own_frames(error)
    return f" ({own[-1].filename}:{own[-1].lineno})" if own else ""


def shows_all() -> bool:
    """Whether `FULL` asks for whole tracebacks, of all ranks."""
    return os.environ.get(FULL) == "full"


def traceback_of(error: BaseException) -> str:
    """The user's frames; the whole traceback if there are none, or if `FULL` asks for it. "" if the error itself has
    the reasons and places."""
    source, own = _own_frames(error)
    if shows_all() or not own and not isinstance(error, TooManyFailures):
        return "".join(traceback.format_exception(error))
    if not own:
        return ""
    lines = ["Traceback of your code:\n", *traceback.format_list(own)]
    return "".join([*lines, *traceback.format_exception_only(source), f"{FULL}=full shows all of it.\n"])


def _own_frames(error: BaseException | None) -> tuple[BaseException | None, list[traceback.FrameSummary]]:
    """The error, or the one that caused it, in which megarl called the user's code; the user's frames from there on."""
    while error is not None:
        frames = itertools.dropwhile(
            lambda frame: not frame.filename.startswith(_MEGARL), traceback.extract_tb(error.__traceback__)
        )
        if own := [frame for frame in frames if not frame.filename.startswith(_NOT_THE_USERS)]:
            return error, own
        error = error.__cause__ or error.__context__
    return None, []


# A state of the process: its name, what reads it, and what puts it back.
_State = tuple[str, Callable[[], Any], Callable[[Any], object]]


_reported: set[tuple[str, str]] = set()  # (caller, name of a state)


@contextlib.contextmanager
def kept(caller: str) -> Iterator[None]:
    """Runs code of the plug-in `caller`, its flag and name; a warning names each state that it changes, once."""
    before = [(name, put, read, read()) for name, read, put in _states()]
    try:
        yield
    finally:
        changed = [(name, put, value) for name, put, read, value in before if read() != value]
        for _, put, value in changed:
            put(value)
        new = [name for name, *_ in changed if (caller, name) not in _reported]
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
    ("the working directory", _working_directory, lambda before: os.chdir(before or ".")),
    ("sys.stdout", functools.partial(_stream, "stdout"), functools.partial(_put_stream, "stdout")),
    ("sys.stderr", functools.partial(_stream, "stderr"), functools.partial(_put_stream, "stderr")),
)
_OF_SIGNALS = tuple(  # that only the main thread can set
    (f"the handler of {each.name}", functools.partial(signal.getsignal, each), functools.partial(signal.signal, each))
    for each in STOP_SIGNALS
)


@functools.cache
def _of_torch() -> tuple[_State, ...]:
    import torch

    return (
        ("whether torch computes gradients", torch.is_grad_enabled, torch.set_grad_enabled),
        ("torch's default dtype", torch.get_default_dtype, torch.set_default_dtype),
        # With None no function that makes tensors goes through a mode of torch; megarl sets no default device.
        ("torch's default device", torch.get_default_device, lambda _: torch.set_default_device(None)),
        ("torch's number of threads", torch.get_num_threads, torch.set_num_threads),
        ("torch's deterministic algorithms", torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
        (
            "torch's precision of matrix products",
            torch.get_float32_matmul_precision,
            torch.set_float32_matmul_precision,
        ),
    )


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
) -> Any:
    """As `load`, for code that runs in the process of the run, whose state is put back after each call.

    `wrap` makes a row of the table, with a field `function`, of a user's function; its ValueError is a UsageError.
    """
    if name in table:
        return load(flag, name, table)
    caller = f"{flag} {name}"
    with kept(caller):
        found = load(flag, name, table, takes)
    try:
        row = wrap(found)
    except ValueError as error:
        raise UsageError(f"{caller}: {error}") from None
    return row._replace(function=keeping(caller, row.function))


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
