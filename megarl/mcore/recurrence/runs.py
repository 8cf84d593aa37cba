"""Runs: which rows of a pass continue which recurrent state; and what the rules of all recurrent layers share: states,
the convolution before a rule, the way through a run by chunks.

A run is (first row, rows, from, to): consecutive rows that continue state `from` (-1: zeros) and leave theirs in `to`
(-1: nowhere). Runs are done in order, so one that continues another's state comes after it. One description serves
packed training, shared prefixes, prefill, decode and copies, which are runs without rows.
Shapes: T rows, C channels of the convolution, H heads with a memory [K, V] each.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from megarl.batch import expand_array_counts
from megarl.mcore import device

NONE = -1  # no state
CHUNK = 64  # rows of a chunk, at most


class ConvolutionRows(NamedTuple):
    """Which rows a causal convolution reads, among the T rows of the pass, then a row of zeros, then taps − 1 rows of
    each state; int64, on the device."""

    read: Tensor  # [taps, T] for each row, itself last
    states: Tensor  # [S] states that the pass changes
    last: Tensor  # [S, taps − 1] the rows that these then hold
    before: Tensor  # [R, taps − 1] the rows before each run that has rows, in the order of the pass


class Chunks(NamedTuple):
    """Runs of equal depth, cut into M chunks of C rows; runs with more chunks come first, and each has its chunks next
    to each other."""

    rows: Tensor  # [M, C] int64 rows of the chunks, on the device; `T` stands for padding
    steps: list[Tensor]  # of step i the i-th chunks of all runs that have one, int64, on the device
    before: list[int]  # state that each run continues
    after: list[int]  # state in which each run leaves its own


class PackedRuns(NamedTuple):
    """R runs, one after the other, for kernels that cut them into chunks of `CHUNK` rows."""

    rows: Tensor | None  # [n] int64 their rows, on the device; None: all rows of the pass, in their order
    cu_rows: Tensor  # [R + 1] int64 where runs begin and end among these, on the device
    chunks: Tensor  # [M, 2] int64 the run of each chunk, and which of its chunks it is, on the device
    before: list[int]  # state that each run continues
    after: list[int]  # state in which each run leaves its own


@dataclass(frozen=True)
class Runs:
    """The runs of a pass over T rows."""

    table: Tensor  # [N, 4] int64, on the host
    states: int  # number of states that they name, if these belong to the pass alone; 0 if they outlive it
    taps: int  # rows that a convolution reads for each row, itself last

    @functools.cached_property
    def rows(self) -> int:
        """Rows of the pass: each belongs to one run."""
        return int(self.table[:, 1].sum())

    @functools.cached_property
    def decodes(self) -> Tensor | None:
        """[T] int64 the state of each row, on the device, if each run that continues a state has one row and leaves it
        there, as in a decode step; rows of other runs are padding, `NONE`. None: other runs."""
        first, rows, before, after = self.table.t()
        counts = after != NONE
        if self.states or not counts.any() or not ((rows == 1) & (before == after))[counts].all():
            return None
        numbers = np.full(self.rows, NONE)
        numbers[first[counts].numpy()] = before[counts].numpy()
        return device.to_device([numbers])[0]

    @functools.cached_property
    def convolution(self) -> ConvolutionRows:
        """What the convolutions of the pass read."""
        zero, width = self.rows, self.taps - 1
        read = np.arange(zero) + np.arange(-width, 1)[:, None]
        kept: dict[int, list[int]] = {}
        for first, rows, before, after in self.table.tolist():
            own = zero + 1 + before * width
            past = [zero] * width if before == NONE else kept.get(before, list(range(own, own + width)))
            for row in range(min(rows, width)):
                read[: width - row, first + row] = past[row:]
            if after != NONE:
                kept[after] = [*past, *range(first, first + rows)][-width:]
        last = np.array(list(kept.values()), dtype=np.int64).reshape(-1, width)
        before = read[:-1, self._in_order[:, 0]].T
        return ConvolutionRows(*device.to_device([read, np.array(list(kept), dtype=np.int64), last, before]))

    @functools.cached_property
    def _in_order(self) -> np.ndarray:
        """[R, 4] the runs that have rows, in the order of the pass."""
        table = self.table[self.table[:, 1] > 0].numpy()
        return table[table[:, 0].argsort()]

    @functools.cached_property
    def in_order(self) -> PackedRuns:
        """The runs that have rows, of any depth, in the order of the pass."""
        return self._packed(self._in_order, None)

    @functools.cached_property
    def _levels(self) -> list[np.ndarray]:
        """[n, 4] runs that continue none of the others, then those that continue these, and so on."""
        depths, levels = dict[int, int](), dict[int, list]()
        for run in self.table.tolist():
            depth = depths.get(run[2], 0) if run[2] != NONE else 0
            depths |= {run[3]: depth + 1} if run[3] != NONE else {}
            levels.setdefault(depth, []).append(run)
        return [np.array(levels[depth]) for depth in sorted(levels)]

    @functools.cached_property
    def chunks(self) -> list[Chunks]:
        """The levels in chunks of `CHUNK` rows, or fewer if all runs are short."""
        longest = int(self.table[:, 1].max())
        size = min(CHUNK, max(8, 1 << (longest - 1).bit_length()))
        return [self._chunks(table, size) for table in self._levels]

    @functools.cached_property
    def packed(self) -> tuple[list[PackedRuns], Tensor | None]:
        """(the levels, [T] int64 where the rows of the pass are when the levels follow each other; None: in order)."""
        rows, every = [_rows_of(table) for table in self._levels], np.arange(self.rows)
        packed = [
            self._packed(table, None if np.array_equal(own, every) else own)
            for table, own in zip(self._levels, rows, strict=True)
        ]
        whole = np.concatenate(rows)
        return packed, None if np.array_equal(whole, every) else device.to_device([whole.argsort()])[0]

    @staticmethod
    def _packed(table: np.ndarray, rows: np.ndarray | None) -> PackedRuns:
        cu_rows, chunks = np.append(0, table[:, 1].cumsum()), np.stack(expand_array_counts(-(-table[:, 1] // CHUNK)), 1)
        cu_rows, chunks, *sent = device.to_device([cu_rows, chunks, *([] if rows is None else [rows])])
        return PackedRuns(sent[0] if sent else None, cu_rows, chunks, table[:, 2].tolist(), table[:, 3].tolist())

    def _chunks(self, table: np.ndarray, size: int) -> Chunks:
        counts = -(-table[:, 1] // size)
        order = np.argsort(-counts, kind="stable")
        table, counts = table[order], counts[order]
        starts = counts.cumsum() - counts
        padded = np.full(int(counts.sum()) * size, self.rows)
        for start, (first, rows, *_) in zip(starts * size, table, strict=True):
            padded[start : start + rows] = np.arange(first, first + rows)
        steps = [starts[counts > step] + step for step in range(int(counts[0]))]
        rows, *sent = device.to_device([padded.reshape(-1, size), *steps])
        return Chunks(rows, sent, table[:, 2].tolist(), table[:, 3].tolist())


def _rows_of(table: np.ndarray) -> np.ndarray:
    """[n] the rows of runs [N, 4], one run after the other."""
    owner, place = expand_array_counts(table[:, 1])
    return table[owner, 0] + place


# The runs of a decode step that the device plans are [T] int32 on the device: the state that each row continues and
# changes; `NONE`: padding.
AnyRuns = Runs | Tensor


def runs_of_stream(stream, taps: int) -> Runs:
    """The runs of a packed stream: one of each sequence, and several of one that holds a prefix for others, whose state
    has a number of its own. `stream`: an `attention.segments.TokenStream`."""
    prefixes: dict[int, list[int]] = {}
    starts, ends, holders, prefix_lengths = stream
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
    return Runs(torch.tensor(table), len(numbers), taps)


# -- states ----------------------------------------------------------------------------------------------------------


class States(NamedTuple):
    """States by number; fp32."""

    inputs: Tensor  # [S, taps − 1, C] the last inputs of the convolution
    memories: Tensor  # [S, H, K, V]

    @staticmethod
    def shapes(count: int, taps: int, sizes) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of the fields; `sizes`: `HeadSizes` or `SpaceSizes`."""
        return (count, taps - 1, sizes.channels), (count, sizes.heads, sizes.keys, sizes.values)


def has_kernels(x: Tensor) -> bool:
    """Whether compiled kernels compute the rules on the device of a tensor."""
    return not x.is_cuda


def own_states(x: Tensor, sizes, runs: Runs) -> States:
    """Uninitialized states of the pass alone; arguments as of `States.shapes`."""
    return States(*map(x.new_empty, States.shapes(runs.states, runs.taps, sizes)))


def convolved(
    x: Tensor, weight: Tensor, bias: Tensor | None, runs: Runs, states: States | None, activates: bool = True
) -> Tensor:
    """[T, C] after the causal convolution, and its SiLU if it `activates`, of PyTorch's operations; `states` get its
    last inputs. `x`: [T, C]; `weight`: [C, 1, taps]; `bias`: [C]."""
    taps, plan = weight.squeeze(1).t(), runs.convolution
    padded = functional.pad(x, (0, 0, 0, 1))
    padded = padded if states is None else torch.cat([padded, states.inputs.flatten(0, 1)])
    total = sum(padded[rows] * tap for rows, tap in zip(plan.read, taps, strict=True))
    mixed = total if bias is None else total + bias
    mixed = functional.silu(mixed) if activates else mixed
    if states is not None and len(plan.states):
        states.inputs.index_copy_(0, plan.states, padded[plan.last])
    return mixed


def chunk_memories(zeros: Tensor, numbers: list[int], kept: dict[int, Tensor], states: States | None) -> Tensor:
    """[R, H, K, V] of the states with these numbers: those of `kept`, else of `states`; `NONE`: `zeros` [H, K, V]."""
    stored = None if states is None else states.memories
    found = (zeros if i == NONE else kept[i] if i in kept or stored is None else stored[i] for i in numbers)
    return torch.stack(list(found))


def store_memories(kept: dict[int, Tensor], states: States | None):
    """Writes the memories that the runs left, by the numbers of their states."""
    if states is not None and kept:
        numbers = torch.tensor(list(kept), device=states.memories.device)
        states.memories.index_copy_(0, numbers, torch.stack(list(kept.values())))


def decay_ratios(sums: Tensor) -> Tensor:
    """Sums […, C] of logarithms of decays up to each row of a chunk -> […, C, C] those between rows."""
    above = torch.ones(sums.shape[-1], sums.shape[-1], dtype=torch.bool, device=sums.device).triu(1)
    return (sums.unsqueeze(-1) - sums.unsqueeze(-2)).masked_fill(above, float("-inf")).exp()


def scan_chunks(steps_of: Callable, rows: Sequence[Tensor], zeros: Tensor, runs: Runs, states: States | None) -> Tensor:
    """[T, H, V]: what the rows read; `states` get the memories after the runs.

    Args:
        steps_of: How a rule goes through chunks of equal depth: what it reads of their rows, [M, H, C, …] and 0 in
            padding -> (which of the chunks, memories before them [n, H, K, V]) -> (results [n, H, C, V], memories).
        rows: What the rule reads of each row: tensors [T, H, …], of which those without channels get one.
        zeros: [H, K, V] the memory of a run that continues no state.
    """
    kept, found, places = dict[int, Tensor](), [], []  # memories by the number of the state; results and their rows
    wide = [x if x.dim() == 3 else x.unsqueeze(-1) for x in rows]
    for chunks in runs.chunks:
        step = steps_of(*(functional.pad(x, (0, 0, 0, 0, 0, 1))[chunks.rows].transpose(1, 2) for x in wide))
        memory = chunk_memories(zeros, chunks.before, kept, states)
        for at in chunks.steps:
            _keep_memories(kept, chunks, memory, len(at))
            out, memory = step(at, memory[: len(at)])
            found.append(out.transpose(1, 2).flatten(0, 1))
            places.append(chunks.rows[at].flatten())
        _keep_memories(kept, chunks, memory, 0)
    store_memories(kept, states)
    # Padding rows of chunks have the number T; those that count come first in the sorted order.
    return torch.cat(found)[torch.cat(places).argsort(stable=True)[: len(rows[0])]]


def _keep_memories(kept: dict[int, Tensor], chunks: Chunks, memory: Tensor, active: int):
    """Keeps the memories of the runs that have ended: those after the first `active` ones."""
    for i in range(active, len(memory)):
        if (number := chunks.after[i]) != NONE:
            kept[number] = memory[i]
