"""Parquet files, Arrow files, and streams of record batches as `datasets` saves them, read batch by batch.

pyarrow is the extra `parquet`. It is imported when such a file is read, and reads without threads of its own: ranks are
forked from the process that checks the input.
"""

import contextlib
import functools
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megarl import bundled, plain_files
from megarl.data.arrow_values import Converters, features_of, holds_bytes, is_json
from megarl.data.content_limit import ContentLimit, compressed_buffers, decoded_bytes, parquet_columns
from megarl.data.sources import printable
from megarl.errors import UsageError
from megarl.plain_files import check_regular

_PROBED_FILES = 100  # whose footers a child process reads
ROWS = 1024  # that are Python objects at the same time
_PIECE_BYTES = 2**28  # of the rows that are Python objects at the same time, unless a single row is longer
_POINTER = b"version https://git-lfs"
_FILE_MAGIC = b"ARROW1"  # at the start and the end of an Arrow file; streams have none
_FILE_HEADER = 8  # bytes


class ArrowTable:
    """The rows of a Parquet or Arrow file (`tables.Table`)."""

    def __init__(self, path: str, flag: str):
        """Reads the schema. Raises UsageError for a file that cannot be read, and without pyarrow."""
        self._path, self._where = path, f"{flag} {path}"
        self._arrow = _import_pyarrow(self._where)
        try:
            check_regular(path)
        except FileNotFoundError:
            raise UsageError(f"{self._where}: no such file") from None
        except OSError as error:
            raise UsageError(f"{self._where}: cannot be read: {error.strerror}") from None
        with self._errors(), self._opened() as (schema, *_):
            self._set_columns(schema)

    def _set_columns(self, schema):
        names, types = schema.names, schema.types
        for name, count in Counter(names).items():
            if count > 1:
                raise UsageError(f"{self._where}: has {count} columns named {printable(name)}")
        of_bytes = {name: holds_bytes(self._arrow, kind) for name, kind in zip(names, types, strict=True)}
        self.left_out = tuple(name for name in names if of_bytes[name])
        self.columns = tuple(name for name in names if not of_bytes[name])
        is_struct = self._arrow.types.is_struct
        self._inner = {
            name: frozenset(field.name for field in kind)
            for name, kind in zip(names, types, strict=True)
            if is_struct(kind)
        }
        features = features_of(schema)
        self._of_json = {name for name in names if is_json(self._arrow, schema.field(name), features.get(name))}

    def names_in(self, column: str) -> frozenset[str]:
        """The names inside a column of objects. A column of JSON is read for them."""
        if column in self._of_json and column not in self._inner:
            objects = (row[column] for row in self.rows([column]) if isinstance(row[column], dict))
            self._inner[column] = frozenset(name for each in objects for name in each)
        return self._inner.get(column, frozenset())

    def rows(self, names: Sequence[str]) -> Iterator[dict[str, Any]]:
        """Every row with these columns; only they are read. UsageError if they expand without measure."""
        count, limit = 0, ContentLimit(self._path, self._where)
        with self._errors(lambda: f" after row {count}"), self._opened() as (schema, batches, expected):
            features, made = features_of(schema), Converters(self._arrow, self._where)
            converters = {name: made.of(schema.field(name), features.get(name), name) for name in names}
            for batch in batches(list(names)):
                batch.validate(full=True)  # of a damaged file, offsets may lead out of memory
                size = batch.num_rows + sum(decoded_bytes(self._arrow, column) for column in batch.columns)
                limit.add(size)
                step = max(1, min(ROWS, batch.num_rows * _PIECE_BYTES // max(1, size)))
                for start in range(0, batch.num_rows, step):
                    piece = batch.slice(start, step)
                    piece = piece.cast(self._arrow.schema([schema.field(name) for name in piece.schema.names]))
                    for row in piece.to_pylist() if names else [{}] * piece.num_rows:
                        yield {name: converters[name](value) for name, value in row.items()}
                        count += 1
            if expected not in (None, count):
                raise ValueError(f"its footer says that it has {expected:,} rows")

    @contextlib.contextmanager
    def _opened(self):
        """(schema, function of names of columns that returns record batches, rows if the file says how many)."""
        arrow = self._arrow
        if self._path.endswith(".parquet"):
            from pyarrow import parquet

            with parquet.ParquetFile(self._path, pre_buffer=False) as file:
                # pyarrow makes no views of a dictionary.
                keeps = not any("string_view" in str(kind) for kind in file.schema_arrow.types)
                batches = functools.partial(self._parquet_batches, parquet, file.metadata, keeps)
                yield file.schema_arrow, batches, file.metadata.num_rows
            return
        with arrow.OSFile(self._path) as raw:
            _skip_file_header(raw)
            ContentLimit(self._path, self._where).add(compressed_buffers(raw))
            with arrow.ipc.open_stream(raw, options=arrow.ipc.IpcReadOptions(use_threads=False)) as reader:
                yield reader.schema, lambda names: (batch.select(names) for batch in reader), None

    def _parquet_batches(self, parquet, metadata, keeps: bool, names: list[str]) -> Iterator[Any]:
        columns, limit = parquet_columns(metadata, names), ContentLimit(self._path, self._where)
        limit.add(sum(column.bytes for column in columns))
        # Dictionaries stay, since all rows of a batch may name the same long string, until the batch has been counted.
        kept = {each.path for each in columns if keeps and each.kind == "STRING" and each.has_dictionary}
        # Those of JSON do not stay, and in the other encoding each value may be nearly as long as the column is.
        repeated = (each for each in columns if each.may_repeat(each.path in kept))
        most = max((each.bytes for each in repeated), default=1)
        rows = max(1, min(ROWS, limit.bytes // max(1, most)))
        with parquet.ParquetFile(self._path, pre_buffer=False, read_dictionary=list(kept)) as file:
            yield from file.iter_batches(rows, columns=names, use_threads=False)

    @contextlib.contextmanager
    def _errors(self, place=lambda: ""):
        try:
            yield
        except FileNotFoundError:
            raise UsageError(f"{self._where}: no such file") from None
        # Only of pyarrow's calls: the caller's code runs while `rows` waits, and raises UsageError.
        except (self._arrow.ArrowException, OSError, ValueError, KeyError, ArithmeticError) as error:
            reason = printable(" ".join(str(error).split()) or type(error).__name__, 200)
            if _starts_with(self._path, _POINTER):
                reason = "it is a pointer of Git LFS; fetch the file itself (git lfs pull)"
            raise UsageError(f"{self._where}: cannot be read{place()}: {reason}") from None


def check_footers(paths: Sequence[str], flag: str):
    """UsageError for the first Parquet file whose footer takes too much to read, or would end the process. What else is
    wrong with a file is found when it is read. A missing pyarrow is no error here.
    """
    paths = [path for path in paths if path.endswith(".parquet")]
    if not paths:
        return
    with contextlib.suppress(UsageError):
        arrow = _import_pyarrow(flag)
        import pyarrow.parquet  # noqa: F401  # once, and not in each child

        arrow.allocate_buffer(1)  # the allocator takes a GiB of addresses with the first one
    for start in range(0, len(paths), _PROBED_FILES):
        _check_footers(paths[start : start + _PROBED_FILES], flag)


def _check_footers(paths: Sequence[str], flag: str):
    if plain_files.ends_in_child(lambda: [_read_footer(path) for path in paths]):
        return
    for path in paths:
        if not plain_files.ends_in_child(functools.partial(_read_footer, path)):
            raise UsageError(
                f"{flag} {path}: cannot be read: the footer is damaged, or takes more than "
                f"{plain_files.child_limits()}, to read"
            )


def _read_footer(path: str):
    from pyarrow import parquet

    check_regular(path)
    with parquet.ParquetFile(path, pre_buffer=False) as file:
        list(file.schema_arrow)
        parquet_columns(file.metadata)


def _skip_file_header(raw):
    """Moves to the stream inside an Arrow file: pyarrow's reader of such files starts threads."""
    if raw.read(len(_FILE_MAGIC)) != _FILE_MAGIC:
        raw.seek(0)
        return
    raw.seek(raw.size() - len(_FILE_MAGIC))
    if raw.read(len(_FILE_MAGIC)) != _FILE_MAGIC:
        raise ValueError("the end of the Arrow file is missing")
    raw.seek(_FILE_HEADER)


@contextlib.contextmanager
def opened_zstd(path: str, where: str) -> Iterator[Any]:
    """A file compressed with Zstandard, to read its content. UsageError if it is damaged, and without pyarrow."""
    arrow = _import_pyarrow(where)
    try:
        with arrow.OSFile(path) as raw, arrow.CompressedInputStream(raw, "zstd") as file:
            yield file
    except (arrow.ArrowException, OSError) as error:
        raise UsageError(f"{where}: cannot be decompressed: {printable(' '.join(str(error).split()), 200)}") from None


def _import_pyarrow(where: str):
    # A thread of the allocator, which is not used, would keep the launcher from forking the ranks.
    os.environ.setdefault("JE_ARROW_MALLOC_CONF", "background_thread:false")
    try:
        import pyarrow
        import pyarrow.ipc
        import pyarrow.types
    except ImportError:
        command = bundled.install_command("parquet")
        raise UsageError(f"{where}: the package pyarrow reads this file and is not installed: run {command}") from None
    return pyarrow


def _starts_with(path: str, magic: bytes) -> bool:
    with contextlib.suppress(OSError), open(path, "rb") as file:
        return file.read(len(magic)) == magic
    return False


def is_arrow(path: str) -> bool:
    """Whether a file's name says that it is a Parquet or Arrow file."""
    return Path(path).suffix in (".parquet", ".arrow")
