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
from megarl.mcore.kernels import with_gradient

NONE = -1  # no state
CHUNK, MIN_CHUNK = 64, 16  # rows of a chunk, at most and at least


class ConvolutionRows(NamedTuple):
    """Which rows a causal convolution reads, among the T rows of the pass, then a row of zeros, then taps − 1 rows of
    each state; int64, on the device."""

    read: Tensor  # [taps, T] for each row, itself last
    states: Tensor  # [S] states that the pass changes
    last: Tensor  # [S, taps − 1] the rows that these then hold
    before: Tensor  # [R, taps − 1] the rows before each run that has rows, in the order of the pass


class Chunks(NamedTuple):
    """Runs cut into M chunks of C rows, each run's next to each other, and the ways through them.

    A way is [n, 5] int64 on the device, of n runs that wait for none of each other: the run's first chunk and the one
    after its last; the first memory that it begins with, and the one after the last; where it leaves its own, or
    `NONE`. It begins with the sum of these memories: forwards one or none, backwards gradients of all that continue it.
    The first way forwards begins with states, others with what earlier ones left.
    """

    total: int  # M
    size: int  # C
    places: tuple[Tensor, Tensor]  # [T] int64 chunk of each row, and its row there, on the device
    forwards: list[Tensor]
    backwards: list[Tensor]
    kept: tuple[int, int]  # memories that the runs leave, forwards and backwards
    after: tuple[Tensor, Tensor]  # int64 numbers of states, and which memories these then hold, on the device


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
    def _convolved(self) -> tuple[np.ndarray, dict[int, list[int]]]:
        """([taps, T] as of `ConvolutionRows`, the rows that changed states then hold)."""
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
        return read, kept

    @functools.cached_property
    def convolution(self) -> ConvolutionRows:
        """What the convolutions of the pass read."""
        read, kept = self._convolved
        last = np.array(list(kept.values()), dtype=np.int64).reshape(-1, self.taps - 1)
        before = read[:-1, self._in_order[:, 0]].T
        return ConvolutionRows(*device.to_device([read, np.array(list(kept), dtype=np.int64), last, before]))

    @functools.cached_property
    def readers(self) -> tuple[Tensor, Tensor]:
        """For the gradients of convolutions: ([T + 1] where those of each row begin, tap · T + row of all that read a
        row); int64, on the device."""
        read = self._convolved[0].ravel()
        bounds = np.append(0, np.bincount(read, minlength=self.rows + 1)[: self.rows].cumsum())
        bounds, readers = device.to_device([bounds, read.argsort(kind="stable")])
        return bounds, readers

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
    def _parents(self) -> np.ndarray:
        """[N] the run whose memory each run continues; `NONE`: no run of the pass."""
        parents, written = [], dict[int, int]()
        for i, (_, _, before, after) in enumerate(self.table.tolist()):
            parents.append(written.get(before, NONE))
            if after != NONE:
                written[after] = i
        return np.array(parents)

    @functools.cached_property
    def _levels(self) -> list[np.ndarray]:
        """Runs that continue none of the others, then those that continue these, and so on; those that continue the
        same one are next to each other."""
        depths: list[int] = []
        for parent in self._parents.tolist():
            depths.append(0 if parent == NONE else depths[parent] + 1)
        order = np.lexsort((self._parents, np.array(depths)))
        return np.split(order, np.bincount(depths).cumsum()[:-1])

    @functools.cached_property
    def chunks(self) -> Chunks:
        """The runs in chunks of `CHUNK` rows, or fewer if all are short."""
        first, rows, before, after = self.table.numpy().T
        size = min(CHUNK, max(MIN_CHUNK, 1 << (int(rows.max()) - 1).bit_length()))
        order, counts, parents = np.concatenate(self._levels), -(-rows // size), self._parents
        ends = np.empty_like(counts)
        ends[order] = counts[order].cumsum()
        left, begun = (_numbered(order, each != NONE) for each in (after, parents))
        source = np.where(parents == NONE, before, left[parents])
        children = np.bincount(parents[parents != NONE], minlength=len(parents))
        child = np.full(len(parents), len(parents))
        np.minimum.at(child, parents[parents != NONE], begun[parents != NONE])
        forwards = np.stack([ends - counts, ends, source, source + (source != NONE), left], 1)
        backwards = np.stack([ends - counts, ends, child, child + children, begun], 1)
        (owner, place), chunk, row = expand_array_counts(rows), np.empty(self.rows, int), np.empty(self.rows, int)
        chunk[first[owner] + place] = (ends - counts)[owner] + place // size
        row[first[owner] + place] = place % size
        final = {number: memory for number, memory in zip(after.tolist(), left.tolist(), strict=True) if number != NONE}
        ways = [way[level] for way in (forwards, backwards) for level in self._levels]
        sent = device.to_device([chunk, row, np.array(list(final), int), np.array(list(final.values()), int), *ways])
        (chunk, row, numbers, memories, *ways), kept = sent, (int((left != NONE).sum()), int((begun != NONE).sum()))
        ahead, back = ways[: len(self._levels)], ways[len(self._levels) :][::-1]
        return Chunks(int(counts.sum()), size, (chunk, row), ahead, back, kept, (numbers, memories))

    @functools.cached_property
    def packed(self) -> tuple[list[PackedRuns], Tensor | None]:
        """(the levels, [T] int64 where the rows of the pass are when the levels follow each other; None: in order)."""
        tables = [self.table.numpy()[level] for level in self._levels]
        rows, every = [_rows_of(table) for table in tables], np.arange(self.rows)
        packed = [
            self._packed(table, None if np.array_equal(own, every) else own)
            for table, own in zip(tables, rows, strict=True)
        ]
        whole = np.concatenate(rows)
        return packed, None if np.array_equal(whole, every) else device.to_device([whole.argsort()])[0]

    @staticmethod
    def _packed(table: np.ndarray, rows: np.ndarray | None) -> PackedRuns:
        cu_rows, chunks = np.append(0, table[:, 1].cumsum()), np.stack(expand_array_counts(-(-table[:, 1] // CHUNK)), 1)
        cu_rows, chunks, *sent = device.to_device([cu_rows, chunks, *([] if rows is None else [rows])])
        return PackedRuns(sent[0] if sent else None, cu_rows, chunks, table[:, 2].tolist(), table[:, 3].tolist())


def _numbered(order: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """[N] numbers from 0 on, in an order, of those that count; `NONE`: others."""
    found = np.full(len(order), NONE)
    own = order[counts[order]]
    found[own] = np.arange(len(own))
    return found


def _rows_of(table: np.ndarray) -> np.ndarray:
    """[n] the rows of runs [N, 4], one run after the other."""
    owner, place = expand_array_counts(table[:, 1])
    return table[owner, 0] + place


# The runs of a decode step that the device plans are [T] int32 on the device: the state that each row continues and
# changes; `NONE`: padding.
AnyRuns = Runs | Tensor


# -- states ----------------------------------------------------------------------------------------------------------


class States(NamedTuple):
    """States by number; fp32."""

    inputs: Tensor  # [S, taps − 1, C] the last inputs of the convolution
    memories: Tensor  # [S, H, K, V]

    @staticmethod
    def shapes(count: int, taps: int, sizes) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of the fields; `sizes`: `HeadSizes` or `SpaceSizes`."""
        return (count, taps - 1, sizes.channels), (count, sizes.heads, sizes.keys, sizes.values)


def has_triton(x: Tensor) -> bool:
    """Whether kernels of Triton do what rules share, on the device of a tensor: in fp32."""
    return x.is_cuda and x.dtype == torch.float32


def convolved(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    runs: Runs,
    states: States | None,
    activates: bool = True,
    heads: tuple[int, int, float] = (0, 0, 0.0),
) -> Tensor:
    """[T, C] after the causal convolution, then its SiLU if it `activates`, then norms; `states` get its last inputs.
    `x`: [T, C]; `weight`: [C, 1, taps]; `bias`: [C]; `heads`: as of `normed`."""
    plan = runs.convolution
    if has_triton(x):
        from megarl.mcore.kernels.cuda import recurrent_chunks  # needs Triton

        return recurrent_chunks.convolved(
            x, weight.contiguous(), bias, runs, states, ([*heads[:2]], heads[2], activates)
        )
    padded = functional.pad(x, (0, 0, 0, 1))
    padded = padded if states is None else torch.cat([padded, states.inputs.flatten(0, 1)])
    total = sum(padded[rows] * tap for rows, tap in zip(plan.read, weight.squeeze(1).t(), strict=True))
    mixed = total if bias is None else total + bias
    mixed = functional.silu(mixed) if activates else mixed
    if states is not None and len(plan.states):
        states.inputs.index_copy_(0, plan.states, padded[plan.last])
    return normed(mixed, heads) if heads[0] else mixed


def normed(x: Tensor, heads: tuple[int, int, float]) -> Tensor:
    """[T, C] whose first heads have the length 1, the first half of them, queries, 1 / √width. `heads`: (how many these
    are, the width of each, what is added to squared lengths)."""
    count, width, epsilon = heads
    own = x[:, : count * width].unflatten(1, (2, count // 2, width))
    own = own * torch.rsqrt(own.square().sum(-1, keepdim=True) + epsilon)
    return torch.cat([own[:, 0].flatten(1) * width**-0.5, own[:, 1].flatten(1), x[:, count * width :]], 1)


# -- chunks ----------------------------------------------------------------------------------------------------------


def decay_ratios(sums: Tensor) -> Tensor:
    """Sums […, C] of logarithms of decays up to each row of a chunk -> […, C, C] those between rows, 0 for later
    rows."""
    return (sums.unsqueeze(-1) - sums.unsqueeze(-2)).tril().exp().tril()


def scan_chunks(terms_of: Callable, rows: Sequence[Tensor], runs: Runs, states: States | None) -> Tensor:
    """[T, H, V]: what the rows read; `states` get the memories after the runs.

    A chunk with the memory S [K, V] before it changes it by U = new − old·S [C, V]; its rows read queries·S + scores·U,
    and S becomes decays·S + keysᵀ·U.

    Args:
        terms_of: What the rule reads of rows of chunks, [M, H, C, …] and 0 in padding -> queries [M, H, C, K], scores
            [M, H, C, C], old [M, H, C, K] or None for 0, new [M, H, C, V], keys [M, H, C, K], decays [M, H, D, 1] with
            D of 1 or K.
        rows: What the rule reads of each row: tensors [T, G or H, …], of which those without channels get one.
    """
    wide = [x if x.dim() == 3 else x.unsqueeze(-1) for x in rows]
    groups, heads = (choice(x.shape[1] for x in wide) for choice in (min, max))
    of_groups = [
        x.unsqueeze(2).expand(-1, -1, heads // groups, -1) if x.shape[1] == groups else x.unflatten(1, (groups, -1))
        for x in wide
    ]
    chunked = _to_chunks(torch.cat(of_groups, -1).flatten(1, 2), runs.chunks)
    queries, scores, old, new, keys, decays = terms_of(*chunked.split([x.shape[2] for x in wide], -1))
    stored = None if states is None else states.memories
    memories, changes, ends = _walked(runs.chunks, stored, old, new, keys, decays)
    if stored is not None:
        numbers, left = runs.chunks.after
        stored.index_copy_(0, numbers, ends[left])
    read = torch.baddbmm(*(x.flatten(0, 1) for x in (queries @ memories, scores, changes)))
    return _to_rows(read.view_as(changes), runs.chunks)


def _in_chunks(x: Tensor, chunks: Chunks) -> Tensor:
    """Rows [T, H, W] -> [M, H, C, W], 0 in padding."""
    found = x.new_zeros(chunks.total, x.shape[1], chunks.size, x.shape[2])
    found.transpose(1, 2).index_put_(chunks.places, x)
    return found


def _in_rows(x: Tensor, chunks: Chunks) -> Tensor:
    """[M, H, C, W] -> rows [T, H, W]."""
    return x.transpose(1, 2)[chunks.places]


@with_gradient(lambda ctx, grad: (_in_rows(grad, ctx.chunks), None))
def _to_chunks(ctx, x: Tensor, chunks: Chunks) -> Tensor:
    ctx.chunks = chunks
    return _in_chunks(x, chunks)


@with_gradient(lambda ctx, grad: (_in_chunks(grad, ctx.chunks), None))
def _to_rows(ctx, x: Tensor, chunks: Chunks) -> Tensor:
    ctx.chunks = chunks
    return _in_rows(x, chunks)


def _walked_gradient(ctx, of_memories: Tensor, of_changes: Tensor, _):
    """Gradients of new, old, keys and decays: a walk from the last chunks to the first, for which old and keys change
    their parts."""
    old, keys, decays, memories, changes = ctx.saved_tensors
    after, of_new = torch.empty_like(memories), torch.empty_like(changes)
    begun = memories.new_empty(ctx.chunks.kept[1], *memories.shape[1:])
    for way in ctx.chunks.backwards:
        walk(way, begun, [old, of_changes.contiguous(), keys, decays], of_memories.contiguous(), [after, of_new, begun])
    of_old = None if old is None else (of_new @ memories.mT).neg_()
    of_decays = (memories * after).sum((-2, -1) if decays.shape[2] == 1 else -1, keepdim=True)
    return None, None, of_old, of_new, changes @ after.mT, of_decays


@with_gradient(_walked_gradient)
def _walked(ctx, chunks: Chunks, stored: Tensor | None, old, new, keys, decays) -> tuple[Tensor, Tensor, Tensor]:
    """Memories before chunks [M, H, K, V], changes by chunks [M, H, C, V], and memories that runs leave; arguments as
    of `scan_chunks`."""
    memories = new.new_empty(*new.shape[:2], keys.shape[3], new.shape[3])
    changes, ends = new.new_empty(new.shape), new.new_empty(chunks.kept[0], *memories.shape[1:])
    for depth, way in enumerate(chunks.forwards):
        starts = ends if depth or stored is None else stored
        walk(way, starts, [old, new, keys, decays], None, [memories, changes, ends])
    ctx.chunks = chunks
    ctx.save_for_backward(old, keys, decays, memories, changes)
    ctx.mark_non_differentiable(ends)
    return memories, changes, ends


def walk(way: Tensor, starts: Tensor, terms: list, added: Tensor | None, results: list[Tensor]):
    """Goes through the chunks of runs, on CUDA by a kernel.

    Args:
        way: [n, 5] of `Chunks`.
        starts: [S, H, K, V] memories with which runs may begin.
        terms: old, new, keys, decays of `scan_chunks`; backwards gradients of changes in the place of new.
        added: [M, H, K, V] backwards: gradients of memories, where runs are walked from their last chunks to their
            first, and old and keys change their parts.
        results: memories before chunks (backwards: gradients of those after them), changes, memories that runs leave.
    """
    old, new, keys, decays = terms
    if has_triton(starts):
        from megarl.mcore.kernels.cuda.recurrent_chunks import walk_chunks  # needs Triton

        old, new, keys = (None if x is None else x.flatten(0, 2) for x in terms[:3])
        return walk_chunks(way, starts, old, new, keys, decays.flatten(0, 1).squeeze(2), added, results)
    memories, changes, ends = results
    for first, last, begin, end, to in way.tolist():
        memory = starts[begin:end].sum(0)
        for i in range(first, last) if added is None else range(last - 1, first - 1, -1):
            memories[i] = memory
            if added is None:
                changes[i] = new[i] if old is None else new[i] - old[i] @ memory
                memory = memory * decays[i] + keys[i].mT @ changes[i]
            else:
                changes[i] = new[i] + keys[i] @ memory
                memory = memory * decays[i] + added[i]
                memory = memory if old is None else memory - old[i].mT @ changes[i]
        if to != NONE:
            ends[to] = memory
