"""Tensors of a checkpoint, a Hugging Face folder or a PEFT adapter, read one at a time, without a process group.

A checkpoint may stack a weight of all layers in one tensor `decoder.layers.mlp.linear_fc1.weight` of shape [layers, …],
or, if layers differ, have a tensor for each. Both appear here by layer: `decoder.layers.3.mlp.linear_fc1.weight`.
"""

import abc
import functools
import re
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from megarl.errors import UsageError
from megarl.mcore.lora.peft_files import CONFIG as PEFT_CONFIG
from megarl.mcore.lora.peft_files import WEIGHTS as PEFT_WEIGHTS
from megarl.mcore.weights.checkpoint_files import SafeReader
from megarl.mcore.weights.hf.folder import HFFolder
from megarl.observe.terminal import printable, ranges_text
from megarl.plain_files import check_regular

STACKED = re.compile(r"\.layers\.(?!\d)")
_SAFETENSORS = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16", "I64": "int64",
                "I32": "int32", "U8": "uint8", "BOOL": "bool", "F8_E4M3": "float8_e4m3fn"}  # fmt: skip


class TensorPart(NamedTuple):
    """A tensor, or one layer of a tensor that stacks layers."""

    key: str  # under which it is stored
    layer: int | None  # index of its first dimension
    dtype: str  # as torch names it, without `torch.`
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return torch.Size(self.shape).numel()

    @property
    def bytes(self) -> int:
        """Size in memory."""
        dtype = getattr(torch, self.dtype, None)
        return self.numel * (dtype.itemsize if isinstance(dtype, torch.dtype) else 1)


class TensorSource(abc.ABC):
    """Named tensors of a folder. All errors are UsageErrors of one line that begins with `where`."""

    def __init__(self, where: str, parts: dict[str, TensorPart]):
        self.where, self.parts = where, parts

    def read(self, name: str) -> Tensor:
        """A part's values, on the CPU."""
        try:
            found = self._read(self.parts[name])
        except Exception as error:  # damaged data can raise anything
            raise damage(self.where, f"{name} cannot be read", error) from None
        return found

    @abc.abstractmethod
    def _read(self, part: TensorPart) -> Tensor:
        """The values; may raise anything."""


def damage(where: str, problem: str, error: Exception) -> UsageError:
    """One printable line about a file that cannot be read."""
    reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    return UsageError(printable(f"{where}: {problem} ({reason})"))


class CheckpointTensors(TensorSource):
    """The tensors of a checkpoint's folder."""

    def __init__(self, folder: Path, where: str):
        """Reads the metadata."""
        self._reader = SafeReader(str(folder))
        try:
            metadata = self._reader.read_metadata()
            self._reader.set_up_storage_reader(metadata, is_coordinator=True)
            self._stored = {
                key: entry
                for key, entry in metadata.state_dict_metadata.items()
                if isinstance(entry, TensorStorageMetadata)
            }
            parts = {name: part for key, entry in self._stored.items() for name, part in _parts(key, entry)}
        except Exception as error:  # a damaged pickle can raise anything
            raise damage(where, "unreadable checkpoint", error) from None
        super().__init__(where, parts)

    def _read(self, part: TensorPart) -> Tensor:
        entry = self._stored[part.key]
        offsets, sizes = [0] * len(entry.size), list(entry.size)
        if part.layer is not None:
            offsets[0], sizes[0] = part.layer, 1
        found = torch.empty(sizes, dtype=entry.properties.dtype)
        wanted = [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))]
        items = create_read_items_for_chunk_list(part.key, entry, wanted)
        if sum(item.lengths.numel() for item in items) != found.numel():
            raise ValueError("its stored parts do not make up its shape")
        self._reader.read_data(LoadPlan(items), _Into(found)).wait()
        return found.view(part.shape)


class _Into:
    """The part of torch's load planner that a reader calls: where an item goes in a tensor."""

    def __init__(self, tensor: Tensor):
        self._tensor = tensor

    def resolve_tensor(self, item) -> Tensor:
        view = self._tensor
        for dimension, (start, length) in enumerate(zip(item.dest_offsets, item.lengths, strict=True)):
            view = view.narrow(dimension, start, length)
        return view

    def commit_tensor(self, item, tensor: Tensor):
        """Nothing is left to do: the reader copied into a view."""


def _parts(key: str, entry: TensorStorageMetadata):
    """(name, part) of a stored tensor, or of each of its layers."""
    dtype, size = str(entry.properties.dtype).removeprefix("torch."), tuple(entry.size)
    if not STACKED.search(key) or not size:
        yield key, TensorPart(key, None, dtype, size)
        return
    for layer in range(size[0]):
        yield STACKED.sub(f".layers.{layer}.", key, count=1), TensorPart(key, layer, dtype, size[1:])


class SafetensorsFiles(TensorSource):
    """The tensors of safetensors files."""

    def __init__(self, where: str, files: dict[Path, list[str] | None]):
        """`files`: names of the tensors to show of each; None: all."""
        parts, self._file_of = {}, {}
        for path, names in files.items():
            try:
                check_regular(path)
                with safe_open(path, framework="pt") as stored:
                    for name in stored.keys() if names is None else names:
                        tensor = stored.get_slice(name)
                        dtype = tensor.get_dtype()
                        parts[name] = TensorPart(name, None, _SAFETENSORS.get(dtype, dtype), tuple(tensor.get_shape()))
                        self._file_of[name] = path
            except (SafetensorError, OSError, ValueError) as error:
                raise damage(where, f"{path.name} is no readable safetensors file", error) from None
        super().__init__(where, parts)

    def _read(self, part: TensorPart) -> Tensor:
        with safe_open(self._file_of[part.key], framework="pt") as stored:
            return stored.get_tensor(part.key)


def is_safetensors_folder(folder: Path) -> bool:
    """Whether a folder is one of `open_safetensors`."""
    return any((folder / name).exists() for name in (PEFT_CONFIG, "config.json"))


def open_safetensors(folder: Path, flag: str) -> SafetensorsFiles:
    """A PEFT adapter or a Hugging Face folder."""
    where = printable(f"{flag} {folder}")
    if (folder / PEFT_CONFIG).exists():
        if not (folder / PEFT_WEIGHTS).exists():
            raise UsageError(f"{where}: {PEFT_WEIGHTS} is missing")
        return SafetensorsFiles(where, {folder / PEFT_WEIGHTS: None})
    tensors = HFFolder(folder, flag).tensors
    files: dict[Path, list[str]] = {}
    for name, tensor in tensors.items():
        files.setdefault(folder / tensor.file, []).append(name)
    return SafetensorsFiles(where, files)


class Difference(NamedTuple):
    """How two tensors of one shape differ."""

    is_equal: bool  # all bits, types included
    largest: float  # absolute difference; infinite where one of them is not finite and the other differs
    relative: float  # divided by the largest magnitude of the first


BLOCK = 1 << 22  # elements that are compared at once


def difference(one: Tensor, other: Tensor) -> Difference:
    """Compares two tensors of one shape, in double precision, block by block."""
    largest = scale = 0.0
    for a, b in zip(one.flatten().split(BLOCK), other.flatten().split(BLOCK), strict=True):
        if not a.numel():
            continue
        a, b = a.double(), b.double()
        same = (a == b) | (a.isnan() & b.isnan())
        gap = torch.where(same, 0.0, (a - b).abs().nan_to_num(nan=torch.inf, posinf=torch.inf))
        largest, scale = max(largest, gap.max().item()), max(scale, a.nan_to_num(0, 0, 0).abs().max().item())
    is_equal = one.dtype == other.dtype and all(
        map(torch.equal, *(tensor.contiguous().flatten().view(torch.uint8).split(BLOCK) for tensor in (one, other)))
    )
    relative = largest / scale if scale else (0.0 if largest == 0 else float("inf"))
    return Difference(is_equal, largest, relative)


_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


def groups(parts: dict[str, TensorPart]) -> dict[str, list[str]]:
    """Names that differ in numbers alone, with one type and shape, by pattern: `layers.{0-3}.mlp…` -> their names."""
    found: dict[tuple, list[str]] = {}
    for name, part in parts.items():
        found.setdefault((_NUMBER.sub("#", name), part.dtype, part.shape), []).append(name)
    result: dict[str, list[str]] = {}
    for (template, *_), names in found.items():
        columns = zip(*([int(number) for number in _NUMBER.findall(name)] for name in names), strict=True)
        ranges = [_ranges(set(column)) for column in columns]
        pattern = functools.reduce(lambda text, numbers: text.replace("#", numbers, 1), ranges, template)
        while pattern in result:  # of another type or shape
            pattern += " "
        result[pattern] = names
    return result


def _ranges(numbers: set[int]) -> str:
    """`3` for one number, `{0-3,6}` for several."""
    text = ranges_text(numbers)
    return text if len(numbers) == 1 else f"{{{text}}}"
