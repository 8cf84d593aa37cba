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
    def of_tokens(cls, rows: Iterable[list[int]]) -> "Ragged":
        """Rows of token ids as int32, which are read one by one."""
        values, offsets = array.array("i"), array.array("q", [0])
        for row in rows:
            values.extend(row)
            offsets.append(len(values))
        return cls(np.frombuffer(values, np.int32), np.frombuffer(offsets, np.int64))

    @classmethod
    def of_arrays(cls, arrays: dict[str, np.ndarray]) -> "Ragged":
        """The rows of `arrays()`."""
        return cls(arrays["values"], arrays["offsets"])

    def arrays(self) -> dict[str, np.ndarray]:
        """Both arrays by name."""
        return {"values": self.values, "offsets": self.offsets}

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def view(self, row: int) -> memoryview:
        """A row without a copy; its items are Python numbers."""
        return self._view[self.offsets[row] : self.offsets[row + 1]]

    def __getitem__(self, row: int) -> list[int]:
        return self.view(range(len(self))[row]).tolist()

    def __iter__(self) -> Iterator[list[int]]:
        return (self[row] for row in range(len(self)))
