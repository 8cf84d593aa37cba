"""Reads slices of a folder's tensors, with a bounded part of its files mapped at a time."""

import itertools
import math
from collections.abc import Iterator
from typing import Any

from safetensors import safe_open
from torch import Tensor

from megarl.mcore.weights.hf.folder import HFFolder
from megarl.mcore.weights.hf.stored_tensors import FolderTensor, Index, StoredTensor

# Bytes read from files before their mapping is released: pages of a mapped file count as memory of the process.
MAPPED_BYTES = 32 * 2**20


class FolderReader:
    """The tensors of `HFFolder.weights`, read slice by slice."""

    def __init__(self, folder: HFFolder):
        self._folder = folder
        self._files: dict[str, Any] = {}  # open ones, by name
        self._mapped = 0  # bytes of them, at most

    def __getitem__(self, name: str) -> "TensorSlices":
        return TensorSlices(self, name, self._folder.weights[name])

    def read(self, name: str, index: Index) -> Tensor:
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


class TensorSlices:
    """One tensor, of which slices are read; its `[...]` takes an `Index`, and gives a tensor that must not be kept."""

    def __init__(self, reader: FolderReader, name: str, tensor: FolderTensor):
        self._reader, self._name, self._tensor = reader, name, tensor

    def __getitem__(self, index: Index) -> Tensor:
        if isinstance(self._tensor, StoredTensor):
            return self._reader.read(self._name, index)
        return self._tensor.read(self._reader.read, index)


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
