"""Rows of data files as objects of plain JSON types, in pieces: JSON lines, lists of objects, Parquet, Arrow."""

import codecs
import gzip
import json
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megarl.data.arrow_files import ArrowTable, opened_zstd
from megarl.data.content_limit import ContentLimit
from megarl.data.prompt import json_problem, parse_line
from megarl.data.ragged import Ragged
from megarl.errors import UsageError
from megarl.plain_files import check_regular

ZSTD = ".zst"
_PART = 2**24


def read_text(path: str, flag: str) -> bytes:
    """The bytes of a UTF-8 file without its byte order mark, decompressed by its suffix (.gz, .zst)."""
    try:
        raw = _decompressed(path, f"{flag} {path}")
        raw.decode("utf-8-sig")
        return raw.removeprefix(codecs.BOM_UTF8)
    except FileNotFoundError:
        raise UsageError(f"{flag} {path}: no such file") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{flag} {path}: not UTF-8 (byte {error.start}); convert the file to UTF-8") from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UsageError(f"{flag} {path}: cannot be decompressed: {' '.join(str(error).split())}") from None
    except OSError as error:
        raise UsageError(f"{flag} {path}: cannot be read: {error.strerror or error}") from None


def _decompressed(path: str, where: str) -> bytes:
    check_regular(path)  # so that a missing file is one, with or without pyarrow
    limit = ContentLimit(path, where)
    if path.endswith(".gz"):
        with gzip.open(path) as file:
            return _limited(file, limit)
    if path.endswith(ZSTD):
        with opened_zstd(path, where) as file:
            return _limited(file, limit)
    return Path(path).read_bytes()


def _limited(file: Any, limit: ContentLimit) -> bytes:
    content = bytearray()
    while part := file.read(_PART):
        limit.add(len(part))
        content += part
    return bytes(content)


def split_lines(text: bytes, where: str) -> Ragged:
    """The lines of a text, without blank ones at its end; UsageError if there is none."""
    values = np.frombuffer(text, np.uint8)
    breaks = np.flatnonzero(values == ord("\n"))  # in UTF-8 no other character contains this byte
    # One line, one prompt: line number = index + 1, which `PromptSet.where` relies on.
    lines = Ragged(values, np.concatenate([[0], breaks + 1, [len(values)]]).astype(np.int64))
    count = len(lines)
    while count and not lines.view(count - 1).tobytes().decode().strip():
        count -= 1
    if not count:
        raise UsageError(f"{where}: the file holds no prompt")
    offsets = lines.offsets[: count + 1]
    return Ragged(values[: offsets[-1]], offsets)


class JsonRows:
    """Objects on lines. A pass over them finds the names of all columns, another one gives the rows."""

    left_out: tuple[str, ...] = ()

    def __init__(self, lines: Ragged, where: str):
        """Reads the lines once; UsageError at the first that is not an object."""
        self._lines, self._where = lines, where
        columns: dict[str, set[str]] = {}
        for entry in self.rows(()):
            for name, value in entry.items():
                columns.setdefault(name, set()).update(value if isinstance(value, dict) else ())
        self.columns, self._inner = tuple(columns), columns

    def names_in(self, column: str) -> frozenset[str]:
        """The names inside a column of objects."""
        return frozenset(self._inner.get(column, ()))

    def rows(self, names: Sequence[str]) -> Iterator[dict[str, Any]]:
        """Every object, with all its names."""
        for i in range(len(self._lines)):
            yield parse_line(self._lines.view(i).tobytes().decode().removesuffix("\n"), f"{self._where}:{i + 1}")


# `columns`: the names of a file's columns; `left_out`: those that cannot be read, because they hold bytes.
Table = ArrowTable | JsonRows


def lines_of_list(text: bytes, where: str) -> Ragged:
    """The objects of a JSON list, one a line; UsageError if it is none, or empty."""
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        raise UsageError(f"{where}: malformed JSON: {json_problem(error)} ({place})") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where}: malformed JSON: {error}") from None
    if not found:
        raise UsageError(f"{where}: the file holds no prompt")
    return Ragged.of_lines(map(json_line, found))


def json_line(value: Any) -> bytes:
    """A value as a line of JSON in UTF-8, halves of surrogate pairs escaped."""
    try:
        return json.dumps(value, ensure_ascii=False).encode() + b"\n"
    except UnicodeEncodeError:
        return json.dumps(value).encode() + b"\n"
