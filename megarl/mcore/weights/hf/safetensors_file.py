"""A safetensors file that is written tensor by tensor through a memory mapping, never held in memory as a whole."""

import json
import math
import os
import re
import struct
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_BITS = re.compile(r"(?:BOOL|[A-Z]+(\d+))(?:_\w+)?")
METADATA = {"format": "pt"}
COPIED_BYTES = 16 * 2**20  # at a time
_LENGTH = struct.Struct("<Q")


class Header(NamedTuple):
    """The header of a file: its bytes, length included, and type, shape and byte range of each tensor by name."""

    content: bytes
    tensors: dict[str, dict]

    @property
    def file_bytes(self) -> int:
        return len(self.content) + max((entry["data_offsets"][1] for entry in self.tensors.values()), default=0)


def read_header(path: Path) -> Header:
    """The header of an existing file, which the library has checked."""
    with path.open("rb") as file:
        length = file.read(_LENGTH.size)
        content = file.read(_LENGTH.unpack(length)[0])
    tensors = json.loads(content)
    tensors.pop("__metadata__", None)
    return Header(length + content, tensors)


def make_header(tensors: dict[str, tuple[str, tuple[int, ...]]]) -> Header:
    """The header of a new file, as the library writes it, from (type, shape) by name.

    Tensors are stored by falling element size, then by name; spaces align the data to 8 bytes.
    """
    entries, end = {}, 0
    for name, (dtype, shape) in sorted(tensors.items(), key=lambda item: (-_bits(item[1][0]), item[0])):
        start, end = end, end + size_of(dtype, shape)
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps({"__metadata__": METADATA} | entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return Header(_LENGTH.pack(len(text)) + text, entries)


def _bits(dtype: str) -> int:
    """Size of an element of any type, as safetensors names them: BOOL, I64, F8_E4M3, F4 …"""
    match = _BITS.fullmatch(dtype)
    return int(match[1] or 8) if match else 8


def size_of(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor."""
    return math.prod(shape) * _bits(dtype) // 8


class MappedFile:
    """The tensors of a new file as views of it."""

    def __init__(self, path: Path, header: Header):
        """Creates the file with its final size; tensors are 0 until they are written."""
        with path.open("wb") as file:
            file.write(header.content)
            file.truncate(header.file_bytes)
        self._path, self._header, self.names = path, header, list(header.tensors)
        self._bytes = torch.from_file(str(path), shared=True, size=header.file_bytes, dtype=torch.uint8)

    def __getitem__(self, name: str) -> Tensor:
        entry, (start, end) = self._header.tensors[name], self._range(name)
        return self._bytes[start:end].view(DTYPES[entry["dtype"]]).view(entry["shape"])

    def _range(self, name: str) -> tuple[int, int]:
        """Where a tensor begins and ends in the file."""
        start, end = self._header.tensors[name]["data_offsets"]
        return len(self._header.content) + start, len(self._header.content) + end

    def copy_from(self, source: Path, names: Collection[str]):
        """Copies tensors of these names, of any type, from another file."""
        header = read_header(source)
        with source.open("rb") as file:
            for name in names:
                start, end = self._range(name)
                file.seek(len(header.content) + header.tensors[name]["data_offsets"][0])
                for at in range(start, end, COPIED_BYTES):
                    part = file.read(min(COPIED_BYTES, end - at))
                    self._bytes[at : at + len(part)] = torch.frombuffer(bytearray(part), dtype=torch.uint8)

    def flush(self):
        """Waits until the data is on the disk."""
        with self._path.open("rb+") as file:
            os.fsync(file.fileno())
