"""How much a data file may hold once it is decompressed and decoded, found before the memory for it is taken.

A file of kilobytes can be made that expands to gigabytes: compressed repetition, one long string that many rows of a
dictionary name, lengths that are lies. Text compresses 3 to 30 times.
"""

import os
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from megarl.errors import UsageError

MAX_EXPANSION = 200  # times the size of a file
MIN_CONTENT = 2**26  # bytes that any file may have
_CONTINUATION = -1  # before a message's length


class ContentLimit:
    """Counts a file's content; `bytes`: what it may have."""

    def __init__(self, path: str, where: str):
        self.bytes = max(MIN_CONTENT, MAX_EXPANSION * os.path.getsize(path))
        self._where, self._found = where, 0

    def add(self, count: int):
        """UsageError if the content is far more than text compresses to."""
        self._found += count
        if self._found > self.bytes:
            raise UsageError(
                f"{self._where}: expands to more than {self.bytes:,} bytes, {MAX_EXPANSION} times its size"
            )


# -- values --------------------------------------------------------------------------------------------------------


def decoded_bytes(arrow: Any, array: Any) -> int:
    """Bytes of an Arrow array's values with each dictionary's entry counted as often as it is named, and a byte a row.
    ValueError for types whose values may overlap in memory.
    """
    types, kind = arrow.types, array.type
    if isinstance(kind, arrow.BaseExtensionType):
        return decoded_bytes(arrow, array.storage)
    if types.is_dictionary(kind):
        return len(array) + _dictionary_bytes(arrow, array)
    if types.is_struct(kind):
        return len(array) + sum(decoded_bytes(arrow, child) for child in array.flatten())
    if types.is_string_view(kind) or types.is_binary_view(kind):
        lengths = np.frombuffer(array.buffers()[1] or b"", np.int32)[::4]
        return len(array) + int(lengths[array.offset : array.offset + len(array)].sum(dtype=np.int64))
    if types.is_map(kind):  # whose flatten pyarrow lacks
        return len(array) + decoded_bytes(arrow, array.keys) + decoded_bytes(arrow, array.items)
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return len(array) + decoded_bytes(arrow, array.flatten())
    if types.is_nested(kind) and not types.is_union(kind) or types.is_run_end_encoded(kind):
        raise ValueError(f"a column has the type {kind}; save it as a plain list or without encoding")
    return len(array) + array.nbytes


def _dictionary_bytes(arrow: Any, array: Any) -> int:
    from pyarrow import compute

    kind = array.type.value_type
    if arrow.types.is_string(kind) or arrow.types.is_large_string(kind):
        lengths = compute.take(compute.binary_length(array.dictionary), array.indices)
        return compute.sum(lengths).as_py() or 0
    if arrow.types.is_primitive(kind):
        return array.nbytes
    return len(array) * decoded_bytes(arrow, array.dictionary)


# -- Parquet -------------------------------------------------------------------------------------------------------


class ParquetColumn(NamedTuple):
    """A leaf of a Parquet file's columns."""

    path: str
    bytes: int  # decompressed, before it is decoded
    encodings: frozenset[str]
    kind: str  # "STRING", "JSON" or another logical type

    @property
    def has_dictionary(self) -> bool:
        """Whether many rows may name the same stored value."""
        return not self.encodings.isdisjoint({"RLE_DICTIONARY", "PLAIN_DICTIONARY"})

    def may_repeat(self, is_kept: bool) -> bool:
        """Whether reading may give each text nearly all bytes of the column. `is_kept`: its dictionary is."""
        of_texts = self.kind in ("STRING", "JSON") and self.has_dictionary
        return "DELTA_BYTE_ARRAY" in self.encodings or of_texts and not is_kept


def parquet_columns(metadata: Any, names: Sequence[str] | None = None) -> list[ParquetColumn]:
    """The leaves of these columns of a file, by default of all."""
    found = []
    groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
    for i in range(metadata.num_columns):
        column, chunks = metadata.schema.column(i), [group.column(i) for group in groups]
        if names is None or any(column.path == name or column.path.startswith(f"{name}.") for name in names):
            size = sum(max(0, chunk.total_uncompressed_size) for chunk in chunks)
            encodings = frozenset(encoding for chunk in chunks for encoding in chunk.encodings)
            found.append(ParquetColumn(column.path, size, encodings, column.logical_type.type))
    return found


# -- Arrow ---------------------------------------------------------------------------------------------------------


def compressed_buffers(raw: Any) -> int:
    """Bytes that the compressed buffers of a stream's messages have by the lengths before them; `raw` stays in place.
    The format: https://arrow.apache.org/docs/format/Columnar.html#ipc. A damaged message ends the count: pyarrow, which
    reads the same, says what is wrong with it.
    """
    start, total = raw.tell(), 0
    try:
        while metadata := _next_metadata(raw):
            total += _buffers_of(raw, metadata)
    except (struct.error, IndexError, ValueError, OSError):
        pass
    raw.seek(start)
    return total


def _next_metadata(raw: Any) -> bytes:
    """The metadata of the next message, before its body; nothing at the end."""
    (length,) = struct.unpack("<i", raw.read(4))
    if length == _CONTINUATION:
        (length,) = struct.unpack("<i", raw.read(4))
    if length > raw.size():
        raise ValueError
    return raw.read(length) if length > 0 else b""


def _buffers_of(raw: Any, metadata: bytes) -> int:
    body, message = raw.tell(), _number(metadata, 0, "<I")
    kind, size = (_field(metadata, message, i) for i in (1, 3))
    header, total = _field(metadata, message, 2), 0
    batch = _target(metadata, header) if header else 0
    if kind and metadata[kind] == 2:  # a batch of a dictionary: its field 1 is the record batch
        batch = _target(metadata, _field(metadata, batch, 1))
    if kind and metadata[kind] in (2, 3) and _field(metadata, batch, 3):  # a record batch with compression
        buffers = _target(metadata, _field(metadata, batch, 2))
        for i in range(_number(metadata, buffers, "<I")):
            offset, length = struct.unpack_from("<qq", metadata, buffers + 4 + 16 * i)
            if length >= 8:
                raw.seek(body + offset)
                total += max(0, struct.unpack("<q", raw.read(8))[0])  # -1: this buffer is not compressed
    raw.seek(body + max(0, _number(metadata, size, "<q") if size else 0))
    return total


def _number(data: bytes, place: int, format: str) -> int:
    return struct.unpack_from(format, data, place)[0]


def _target(data: bytes, place: int) -> int:
    return place + _number(data, place, "<I")


def _field(data: bytes, table: int, number: int) -> int:
    """The place of a field of a flatbuffer's table; 0 if it is absent."""
    entries = table - _number(data, table, "<i")
    if 4 + 2 * number >= _number(data, entries, "<H"):
        return 0
    offset = _number(data, entries + 4 + 2 * number, "<H")
    return table + offset if offset else 0
