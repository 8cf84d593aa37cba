"""Rows of unequal length in two flat arrays, which ranks of a node can map from one file."""

import array
from collections.abc import Iterable, Iterator

import numpy as np


class Ragged:
    """Row i is `values[offsets[i] : offsets[i + 1]]`."""

    def __init__(self, values: np.ndarray, offsets: np.ndarray):
        """`values`: [T]; `offsets`: [N + 1] int64, ascending from 0 to T."""
        self.values, self.offsets = values, offsets
        self._view = memoryview(values)

    @classmethod
    def of_rows(cls, rows: Iterable[list]) -> "Ragged":
        """Rows of int32 numbers, of int64 if a number needs it, which are taken one by one."""
        builder = RaggedBuilder()
        for row in rows:
            builder.add(row)
        return builder.build()

    @classmethod
    def of_arrays(cls, arrays: dict[str, np.ndarray]) -> "Ragged":
        """The rows of `arrays()`."""
        return cls(arrays["values"], arrays["offsets"])

    def arrays(self) -> dict[str, np.ndarray]:
        return {"values": self.values, "offsets": self.offsets}

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def lengths(self, rows: np.ndarray) -> np.ndarray:
        """int64: number of items of each of these rows."""
        return self.offsets[rows + 1] - self.offsets[rows]

    def view(self, row: int) -> memoryview:
        """A row without a copy; its items are Python numbers."""
        return self._view[self.offsets[row] : self.offsets[row + 1]]

    def select(self, rows: np.ndarray) -> "Ragged":
        """These rows, in this order."""
        return Ragged.of_rows(self[row] for row in rows.tolist())

    def __getitem__(self, row: int) -> list:
        return self.view(range(len(self))[row]).tolist()

    def __iter__(self) -> Iterator[list]:
        return (self[row] for row in range(len(self)))


class RaggedBuilder:
    """Collects rows without a Python object per number."""

    def __init__(self, dtype=np.int32):
        self._dtype, self._values = dtype, array.array("i" if dtype == np.int32 else "B")
        self._offsets = array.array("q", [0])

    def add(self, row: list):
        try:
            self._values.extend(row)
        except OverflowError:  # ids of images
            del self._values[self._offsets[-1] :]
            self._values = array.array("q", self._values)
            self._values.extend(row)
        self._offsets.append(len(self._values))

    def build(self) -> Ragged:
        dtype = {"i": np.int32, "q": np.int64, "B": self._dtype}[self._values.typecode]
        return Ragged(np.frombuffer(self._values, dtype), np.frombuffer(self._offsets, np.int64))
