"""Runs: which rows of a pass continue which recurrent state.

A run is (first row, rows, from, to): consecutive rows that continue state `from` (-1: zeros) and leave theirs in `to`
(-1: nowhere). Runs are done in order, so one that continues another's state comes after it. One description serves
packed training, shared prefixes, prefill, decode and copies, which are runs without rows.
"""

import functools
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from megarl.batch import expand_ranges

NONE = -1  # no state


class Chunks(NamedTuple):
    """Runs of equal depth, cut into chunks of C rows; runs with more chunks come first, and each has its chunks next
    to each other. All int64, on the host."""

    rows: Tensor  # [M, C] rows of the chunks; `T` stands for padding
    counts: Tensor  # [R] chunks of each run, falling
    before: Tensor  # [R] state that each run continues
    after: Tensor  # [R] state in which each run leaves its own


@dataclass(frozen=True)
class Runs:
    """The runs of a pass over T rows."""

    table: Tensor  # [N, 4] int64, on the host
    states: int  # number of states that they name, if these belong to the pass alone; 0 if they outlive it

    def previous_rows(self, taps: int) -> Tensor:
        """[taps, T] int64: the rows that a causal convolution reads for each row, itself last; `T` where none is."""
        total, kept = self.rows, {}
        found = torch.arange(total) + torch.arange(1 - taps, 1).unsqueeze(1)
        for first, rows, before, after in self.table.tolist():
            past = kept.get(before, [total] * (taps - 1))
            for row in range(min(rows, taps - 1)):
                found[: taps - 1 - row, first + row] = torch.tensor(past[row:])
            if after != NONE:
                kept[after] = [*past, *range(first, first + rows)][-(taps - 1) :] if taps > 1 else []
        return found

    @property
    def rows(self) -> int:
        """Rows of the pass: each belongs to one run."""
        return int(self.table[:, 1].sum())

    @functools.cached_property
    def chunks(self) -> list[Chunks]:
        """The runs in chunks of 64 rows, or fewer if all are short. Those that start from zeros come first, then those
        that continue these, and so on."""
        longest, depths = int(self.table[:, 1].max()), {NONE: 0}
        size, levels = min(64, max(8, 1 << (longest - 1).bit_length())), {}
        for run in self.table.tolist():
            depth = depths[run[2]]
            depths |= {run[3]: depth + 1} if run[3] != NONE else {}
            levels.setdefault(depth, []).append(run)
        return [self._chunks(torch.tensor(levels[depth]), size) for depth in sorted(levels)]

    def _chunks(self, table: Tensor, size: int) -> Chunks:
        counts = -(-table[:, 1] // size)
        order = counts.argsort(descending=True, stable=True)
        table, counts = table[order], counts[order]
        padded = torch.full((int(counts.sum()) * size,), self.rows)
        starts = (counts.cumsum(0) - counts) * size
        padded[expand_ranges(starts, table[:, 1])] = expand_ranges(table[:, 0], table[:, 1])
        return Chunks(padded.view(-1, size), counts, table[:, 2], table[:, 3])


def runs_of_stream(starts: np.ndarray, ends: np.ndarray, holders: np.ndarray, prefix_lengths: np.ndarray) -> Runs:
    """The runs of a packed stream: one of each sequence, and several of one that holds a prefix for others.

    A prefix's state is kept under a number of its own for the sequences that continue it. Arguments are the fields of
    an `attention.segments.TokenStream`.
    """
    prefixes: dict[int, list[int]] = {}
    for holder, length in zip(holders.tolist(), prefix_lengths.tolist(), strict=True):
        if length and length not in prefixes.setdefault(holder, []):
            prefixes[holder].append(length)
    table, numbers = [], {}
    for holder, lengths in sorted(prefixes.items()):
        at, state = 0, NONE
        for length in sorted(lengths):
            numbers[holder, length] = len(numbers)
            table.append((int(starts[holder]) + at, length - at, state, numbers[holder, length]))
            at, state = length, numbers[holder, length]
    for i, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
        holder, length = int(holders[i]), int(prefix_lengths[i])
        if i in prefixes:  # the rest of a holder
            holder, length = i, max(prefixes[i])
            start += length
        table.append((start, end - start, numbers.get((holder, length), NONE) if length else NONE, NONE))
    return Runs(torch.tensor(table), len(numbers))
