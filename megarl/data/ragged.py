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
        values, offsets = array.array("i"), array.array("q", [0])  # no Python object per number
        for row in rows:
            try:
                values.extend(row)
            except OverflowError:  # ids of images
                values = array.array("q", values[: offsets[-1]])
                values.extend(row)
            offsets.append(len(values))
        dtype = np.int32 if values.typecode == "i" else np.int64
        return cls(np.frombuffer(values, dtype), np.frombuffer(offsets, np.int64))

    @classmethod
    def of_lines(cls, lines: Iterable[bytes]) -> "Ragged":
        """Lines of text, which are taken one by one."""
        values, offsets = bytearray(), array.array("q", [0])
        for line in lines:
            values += line
            offsets.append(len(values))
        return cls(np.frombuffer(values, np.uint8), np.frombuffer(offsets, np.int64))

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
