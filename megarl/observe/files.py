"""Atomic file writes, so that no reader ever sees a partial file, and the JSON lines format."""

import json
import math
import numbers
import os
from pathlib import Path


def step_name(step: int) -> str:
    """`step_00000012`: the name of what a run keeps of a step, without an ending."""
    return f"step_{step:08d}"


def step_of(path: Path) -> int:
    """The step in a name such as step_00000012 or step_00000012.jsonl; -1 without one."""
    digits = path.name.removeprefix("step_").split(".")[0]
    return int(digits) if digits.isdecimal() else -1


def write_atomically(path: Path, data: str | bytes) -> None:
    """Replace `path` by `data` in one step: a temporary file in the same directory, fsync, rename.

    A reader sees the old content or the new, never a partial file. Text is written as UTF-8; a lone surrogate (invalid
    text from a model) becomes its backslash escape, which JSON reads back as the same character.
    Raises OSError when the directory is missing or not writable; the old file is then unchanged.
    """
    path = Path(path)
    raw = data if isinstance(data, bytes) else data.encode("utf-8", errors="backslashreplace")
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(raw)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno and error.filename is None:  # errors of writing name no file
            error.filename = str(path)
        raise
    sync_directory(path.parent)


def sync_directory(directory: Path) -> None:
    """Make the rename survive a power failure."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def json_line(record: dict) -> str:
    """One record as one line of strict JSON, without the newline; key order is kept.

    Floats are printed with `repr`, the shortest text that reads back as the same float64. NaN and infinities, which
    JSON lacks, become null. NumPy and torch scalars become Python numbers. Raises TypeError for anything else.
    """
    try:
        return json.dumps(record, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError):  # a few records have what JSON lacks
        return json.dumps(_plain(record, "record"), ensure_ascii=False, allow_nan=False)


def json_bytes(record: dict) -> bytes:
    """`json_line` as UTF-8. A lone surrogate, which UTF-8 lacks, becomes its escape in JSON."""
    return json_line(record).encode("utf-8", errors="backslashreplace")


def _plain(value: object, where: str) -> object:
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, dict):
        return {str(key): _plain(inner, f"{where}.{key}") for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        if all(type(inner) is float and math.isfinite(inner) for inner in value):
            return value  # a response has thousands of such numbers
        return [_plain(inner, f"{where}[{index}]") for index, inner in enumerate(value)]
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        number = float(value)
        return number if math.isfinite(number) else None
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        return _plain(value.item(), where)
    raise TypeError(f"{where} is a {type(value).__name__}; allowed: numbers, text, booleans, null, lists and dicts")
