"""The files of a Hugging Face folder: config.json, names, types and shapes of tensors, slices of them, and new files.

A bounded part of the files is mapped at a time; a new one is written through a mapping, tensor by tensor. Small tensors
in which one number that is not finite makes NaN of many are read before any work starts: scales of quantized tensors,
and decays of recurrent states.
"""

import functools
import itertools
import json
import math
import os
import re
import struct
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megarl.errors import UsageError, one_line
from megarl.mcore.weights.hf import quantized
from megarl.mcore.weights.hf.quantized import NAN_EXPONENT, FolderTensor, Index, Mxfp4Tensor, StoredTensor
from megarl.plain_files import is_absent, read_json, reason_of

CONFIG = "config.json"
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
MAX_BYTES = 2**28  # of a JSON file
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
READABLE = tuple(DTYPES)
# Bytes read from files before their mapping is released: pages of a mapped file count as memory of the process.
MAPPED_BYTES = 32 * 2**20
ELEMENTS = 2**22  # at a time
DECAYS = (".A_log", ".dt_bias")
METADATA = {"format": "pt"}
COPIED_BYTES = 16 * 2**20  # at a time
_BITS = re.compile(r"(?:BOOL|[A-Z]+(\d+))(?:_\w+)?")
_LENGTH = struct.Struct("<Q")


class HFFolder:
    """A folder as transformers' `save_pretrained` writes it, with weights in safetensors.

    Every error is a UsageError of one line that starts with `flag` and the path.
    """

    def __init__(self, path: str | Path, flag: str = "--hf-model"):
        """Reads config.json; the weights' headers are read when `tensors` is first used."""
        self.path, self.flag = Path(path), flag
        self.unnamed: set[str] = set()  # tensors that the index does not name, once `tensors` was used
        if not os.path.isdir(self.path):
            is_name = re.fullmatch(r"[\w.-]+/[\w.-]+", str(path))
            hint = f"; nothing is downloaded: fetch it first (hf download {path} --local-dir …)" if is_name else ""
            raise self.error(f"no such folder{hint}")
        self.config = self._json(CONFIG)
        if self.config is None:
            raise self.error(f"{CONFIG} is missing; allowed is a folder of transformers' save_pretrained")

    def error(self, problem: str) -> UsageError:
        """A UsageError about this folder. Names from its files cannot break the line, nor make it endless."""
        return UsageError(one_line(f"{self.flag} {self.path}: {problem}"))

    @functools.cached_property
    def tensors(self) -> dict[str, StoredTensor]:
        """Tensors of the files by name; with an index, those that it names. UsageError for missing or damaged files."""
        index = self._json(INDEX)
        if index is None:
            if not (self.path / SINGLE).exists():
                others = sorted(path.name for path in self.path.glob("*.bin"))
                hint = f"; {others[0]} is a pickle: convert it to safetensors" if others else ""
                raise self.error(f"{SINGLE} and {INDEX} are missing{hint}")
            return self._header(SINGLE)
        file_of = index.get("weight_map")
        if not isinstance(file_of, dict) or not file_of or not all(isinstance(name, str) for name in file_of.values()):
            raise self.error(f"{INDEX} has no weight_map of tensor names to files")
        files = sorted(set(file_of.values()))
        if (self.path / SINGLE).exists() and SINGLE not in files:
            raise self.error(f"holds both {INDEX} and {SINGLE}; remove the one that is not the model's")
        if outside := [file for file in files if Path(file).name != file]:
            raise self.error(f"{INDEX} names {outside[0]!r}, which is no file of this folder")
        headers = {file: self._header(file) for file in files}
        for name, file in file_of.items():
            if name not in headers[file]:
                raise self.error(f"{INDEX} puts {name} into {file}, which does not hold it")
        for file, header in headers.items():
            for name in header:
                if file_of.get(name, file) != file:
                    raise self.error(f"{file} holds {name}, but {INDEX} puts it into {file_of[name]}")
            self.unnamed |= header.keys() - file_of.keys()
        return {name: headers[file_of[name]][name] for name in sorted(file_of)}

    @functools.cached_property
    def weights(self) -> Mapping[str, FolderTensor]:
        """The tensors as a model without quantization has them. UsageError if quantized ones do not fit together."""
        return quantized.dequantized(self.tensors, self.config, self.error)

    @functools.cached_property
    def has_weights(self) -> bool:
        """Whether the folder holds safetensors; without them it only describes a model."""
        return (self.path / SINGLE).exists() or (self.path / INDEX).exists()

    def files(self) -> list[str]:
        """Names of the weight files, in order."""
        return sorted({tensor.file for tensor in self.tensors.values()})

    def _json(self, name: str) -> dict[str, Any] | None:
        """The object in a JSON file; None if there is no such file."""
        try:
            content = read_json(self.path / name, MAX_BYTES)
        except FileNotFoundError:
            if is_absent(self.path / name):
                return None
            raise self.error(f"{name} is a link to a file that does not exist") from None
        except (ValueError, RecursionError) as error:
            raise self.error(f"{name} is not JSON ({reason_of(error)})") from None
        except OSError as error:
            raise self.error(f"{name} cannot be read ({error.strerror})") from None
        if not isinstance(content, dict):
            raise self.error(f"{name} holds no JSON object")
        return content

    def _header(self, file: str) -> dict[str, StoredTensor]:
        path = self.path / file
        try:
            if not path.is_file():
                raise self.error(f"{file} is missing")
            with safe_open(path, framework="pt") as stored:
                slices = {name: stored.get_slice(name) for name in stored.keys()}
                return {x: StoredTensor(file, each.get_dtype(), tuple(each.get_shape())) for x, each in slices.items()}
        except (SafetensorError, OSError, ValueError) as error:
            raise self.error(f"{file} is no readable safetensors file ({' '.join(str(error).split())})") from None


class FolderReader:
    """The tensors of `HFFolder.weights`, read slice by slice."""

    def __init__(self, folder: HFFolder):
        self._folder = folder
        self._files: dict[str, Any] = {}  # open ones, by name
        self._mapped = 0  # bytes of them, at most

    def read(self, name: str, index: Index | None = None) -> Tensor:
        """A slice of one of the weights, or all of it, which must not be kept."""
        tensor = self._folder.weights[name]
        index = tuple(slice(0, size) for size in tensor.shape) if index is None else index
        if isinstance(tensor, StoredTensor):
            return self.read_stored(name, index)
        return tensor.read(self.read_stored, index)

    def read_stored(self, name: str, index: Index) -> Tensor:
        """A slice of one of `HFFolder.tensors`, as a view of the mapped file; it must not be kept."""
        if self._mapped >= MAPPED_BYTES:
            self.close()
        stored = self._folder.tensors[name]
        if stored.file not in self._files:
            self._files[stored.file] = safe_open(self._folder.path / stored.file, framework="pt")
        found = self._files[stored.file].get_slice(name)[index]
        self._mapped += _mapped_elements(index, stored.shape) * found.element_size()
        return found

    def close(self):
        self._files, self._mapped = {}, 0


def _mapped_elements(index: Index, shape: tuple[int, ...]) -> int:
    """Elements whose pages a slice may map: all from its first row to its last one."""
    for axis, part in enumerate(index):
        if isinstance(part, slice):
            return (part.stop - part.start) * math.prod(shape[axis + 1 :])
    return 1


def slices_of(shape: tuple[int, ...], elements: int) -> Iterator[Index]:
    """Yields indices that make up a tensor, of at most so many elements each if a row is not larger."""
    if not shape:
        yield ()
        return
    *outer, rows, columns = (1, *shape) if len(shape) == 1 else shape
    count = max(1, elements // max(1, columns))
    for place in itertools.product(*map(range, outer)):
        for start in range(0, rows, count):
            part = slice(start, min(rows, start + count)), slice(0, columns)
            yield part[1:] if len(shape) == 1 else (*place, *part)


def damaged_scales(folder: HFFolder) -> list[str]:
    """Names of scales with a NaN or an infinity. Reads all scales of the folder."""
    reader, found = FolderReader(folder), []
    for tensor in folder.weights.values():
        if not isinstance(tensor, StoredTensor):
            _, name = tensor.stored
            parts = (reader.read_stored(name, part) for part in slices_of(folder.tensors[name].shape, ELEMENTS))
            is_exponent = isinstance(tensor, Mxfp4Tensor)
            if any((part == NAN_EXPONENT if is_exponent else ~part.float().isfinite()).any() for part in parts):
                found.append(name)
    return sorted(found)


def damaged_decays(folder: HFFolder, names: Iterable[str]) -> list[str]:
    """Those among the tensors of these names that are decays or their biases, with a NaN or an infinity. Reads them."""
    reader, found = FolderReader(folder), []
    for name in (name for name in sorted(names) if name.endswith(DECAYS)):
        parts = (reader.read(name, part) for part in slices_of(folder.weights[name].shape, ELEMENTS))
        if any((~part.float().isfinite()).any() for part in parts):
            found.append(name)
    return found


# -- files that are written --------------------------------------------------------------------------------------


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
