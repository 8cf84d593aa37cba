"""Which keys a query attends to in layers with a lightning indexer (DeepSeek-V3.2, 2512.02556 §2.1), and its attention.

One function chooses them in prefill, decode, scoring and training. It depends on a query and the keys of its sequence
alone, by a compiled kernel (`chosen_keys.h`); of equal scores at the border the first positions win. ReLU makes scores
of exactly 0, so that ties are common with few heads.
A query that sees at most `count` keys attends to all of them, as in dense layers. Any other attends to chosen latents,
without expanding them: its heads are multiplied by the expansion's weights before, and the result after attention.
The kernels of a CPU compute in fp32. In bf16 they read widened numbers, and the result is rounded: a query's bits
follow from its own bits and those of the keys that it sees.
On CUDA `latent_rows` chooses and attends.
Shapes: T tokens of a rank, T' rows of latents, of the stream or the cache; I heads of the indexer with C channels; A
heads of attention, L + r numbers of a latent and its rotated key; K keys of a segment.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from megarl.mcore.attention.cache_attention import CacheReads
from megarl.mcore.attention.native_attention import NativeDecodes
from megarl.mcore.attention.packing import PackedLayout
from megarl.mcore.attention.segments import SegmentBatch
from megarl.mcore.kernels import native, with_gradient
from megarl.mcore.kernels.batch_invariance import VECTOR

QUERIES = 512  # whose heads, and whose lists, are in memory together
COMPARED_OF = 64  # one query in so many is compared with its attention; one in `count` if that is less


class LongSegment(NamedTuple):
    """The q queries of a segment that see more keys than they may choose."""

    queries: Tensor  # [q] int64 tokens
    keys: Tensor  # [K] int64 rows of latents
    seen: Tensor  # [q] int64 how many of them each query sees; ascending


# Queries that attend to all keys that they see: rows [m] int64 of latents that are expanded for them, and batches whose
# keys are among these.
DenseReads = tuple[Tensor, list[SegmentBatch]]


class KeyReads:
    """How the queries of a micro-batch, or of a step, attend on a CPU; the same for all layers."""

    def __init__(self, dense: list[DenseReads], long: list[LongSegment]):
        self.dense, self.long, self.is_long = dense, long, bool(long)
        self.of_long = torch.cat([each.queries for each in long]) if long else None  # [n] int64 tokens
        self.choices: dict[int, Choice] = {}  # those that layers share, by the layer that makes them
        self.rows: Tensor | None = None  # of the cache, which the others count; None: those are of the whole cache
        # The queries whose choice is compared with their attention: their places [m] int64 among the n long ones, the
        # keys that each sees, and how many sequences have it.
        self.compared: tuple[Tensor, Tensor, Tensor] | None = None

    @classmethod
    def of_stream(cls, layout: PackedLayout, kind: int, count: int) -> "KeyReads":
        """Those of a micro-batch in layers of a kind; `count`: keys that a query chooses."""
        short, long = _split(layout.attention[kind].batches, count)
        reads = cls([_dense(short)] if short else [], long)
        if long:
            seen = torch.cat([each.seen for each in long])
            places = (seen % min(COMPARED_OF, count) == 0).nonzero().flatten()
            reads.compared = places, seen[places], uses_of(layout, reads.of_long[places])
        return reads

    def of_read_rows(self) -> "KeyReads":
        """The same reads, of the rows of the cache that some query reads, each once."""
        places = [rows for rows, _ in self.dense] + [each.keys for each in self.long]
        rows, inverse = torch.cat(places).unique(return_inverse=True)
        parts = iter(inverse.split([len(each) for each in places]))
        dense = [(next(parts), batches) for _, batches in self.dense]
        found = KeyReads(dense, [each._replace(keys=next(parts)) for each in self.long])
        found.rows = rows
        return found

    @classmethod
    def of_step(cls, reads: CacheReads, count: int) -> "KeyReads":
        """Those of a step's `CacheReads`."""
        dense, long = [], []
        for each in reads.decodes:
            some, others = _of_decodes(each, reads.total, count)
            dense, long = dense + some, long + others
        for batch in reads.prefills:
            short, others = _split([batch], count)
            dense, long = dense + ([_dense(short)] if short else []), long + others
        return cls(dense, long)


def uses_of(layout: PackedLayout, tokens: Tensor) -> Tensor:
    """How many sequences have each of some of this rank's tokens."""
    stream = layout.token_indices[tokens]
    if layout.source is None:
        return stream < layout.tokens
    uses = layout.source.new_zeros(layout.tokens + layout.padding)  # `bincount` would read its size from a device
    return uses.index_add_(0, layout.source, torch.ones_like(layout.source))[stream]


def _of_decodes(reads: NativeDecodes, total: int, count: int) -> tuple[list[DenseReads], list[LongSegment]]:
    tokens, dense, long = torch.arange(total)[reads.tokens], [], []
    for rows, segments in reads.parts:
        placed = dataclasses.replace(segments, queries=tokens[segments.queries])
        if placed.keys.shape[1] <= count:
            dense.append((rows, [placed]))
            continue
        short, others = _split([dataclasses.replace(placed, keys=rows[placed.keys])], count)
        dense, long = dense + ([_dense(short)] if short else []), long + others
    return dense, long


def queries_of(batch: SegmentBatch) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(tokens [m], keys [n, K], segment [m] of each query, how many of its first keys [m] each sees)."""
    width, real = batch.queries.shape[1], batch.real_queries
    seen = 1 + (real % width if batch.last_keys is None else batch.last_keys.flatten()[real])
    return batch.queries.flatten()[real], batch.keys, real // width, seen


def _split(batches: list[SegmentBatch], count: int) -> tuple[list[SegmentBatch], list[LongSegment]]:
    """(the segments of queries that see at most `count` keys, those of the others)."""
    short, long = [], []
    for batch in batches:
        if batch.keys.shape[1] <= count:
            short.append(batch)
            continue
        real, (tokens, _, segments, seen) = batch.real_queries, queries_of(batch)
        is_long = seen > count
        if not is_long.all():
            few = real[~is_long]
            short.append(dataclasses.replace(batch, keys=batch.keys[:, :count].contiguous(), real_queries=few))
        for number in segments[is_long].unique().tolist():
            own = is_long & (segments == number)
            long.append(LongSegment(tokens[own], batch.keys[number, : int(seen[own].max())], seen[own]))
    return short, long


def _dense(batches: list[SegmentBatch]) -> DenseReads:
    """Segments whose keys are rows of latents; only rows of segments with queries are expanded."""
    used, sizes = [], []
    for batch in batches:
        owners = (batch.real_queries // batch.queries.shape[1]).unique()
        used.append(_at(batch, owners))
        sizes.append(used[-1].keys.numel())
    rows, places = torch.cat([batch.keys.flatten() for batch in used]).unique(return_inverse=True)
    parts = zip(used, places.split(sizes), strict=True)
    return rows, [dataclasses.replace(batch, keys=part.view_as(batch.keys)) for batch, part in parts]


def _at(batch: SegmentBatch, segments: Tensor) -> SegmentBatch:
    """Some segments of a batch, with all of its real queries in them."""
    if len(segments) == len(batch.queries):
        return batch
    width, real = batch.queries.shape[1], batch.real_queries
    places = torch.searchsorted(segments, real // width) * width + real % width
    last = None if batch.last_keys is None else batch.last_keys[segments]
    return SegmentBatch(batch.window, batch.queries[segments], batch.keys[segments], places, last)


# -- the choice ----------------------------------------------------------------------------------------------------


class Choice(NamedTuple):
    """The keys that the n queries of `KeyReads.long` chose: a bit for each pair, until the lists are needed."""

    tiles: list[tuple[Tensor, Tensor]]  # rows of a segment's first keys, as there; [q, ⌈K/8⌉] bits of q of its queries
    topk: int  # keys of each query

    def lists(self) -> Iterator[Tensor]:
        """Yields the chosen rows of latents [q, topk], by ascending positions, of some queries after others."""
        for rows, bits in self.tiles:
            yield native.ops.chosen_rows(bits, rows, self.topk)

    def parts(self) -> Iterator[tuple[slice, "Choice"]]:
        """Yields (which of the n queries, their choice), about `QUERIES` at a time."""
        first, tiles = 0, []
        for tile in self.tiles:
            tiles.append(tile)
            size = sum(len(bits) for _, bits in tiles)
            if size >= QUERIES or tile is self.tiles[-1]:
                yield slice(first, first + size), Choice(tiles, self.topk)
                first, tiles = first + size, []


@torch.no_grad()
def choose(
    heads_of: Callable[[Tensor], Tensor], weights: Tensor, keys: Tensor, segments: list[LongSegment], count: int
) -> Choice:
    """The choice of `count` keys by all queries of some segments.

    Args:
        heads_of: tokens [q] int64 -> the indexer's rotated heads [q, I, C].
        weights: [T, I] of the heads, fp32.
        keys: index keys [T', C], fp32.
    """
    tokens = torch.cat([segment.queries for segment in segments])
    found, starts = Choice([], count), np.cumsum([0, *(len(segment.queries) for segment in segments)])
    for start in range(0, len(tokens), QUERIES):
        part = tokens[start : start + QUERIES]
        heads, own_weights = heads_of(part).to(keys.dtype).contiguous(), weights[part]
        for segment, first in zip(segments, (starts[:-1] - start).tolist(), strict=True):
            here = slice(max(first, 0), max(0, min(first + len(segment.queries), len(part))))
            if here.start < here.stop:
                own = slice(here.start - first, here.stop - first)
                seen = segment.seen[own]
                rows = segment.keys[: int(seen.max())]
                bits = native.ops.choose_keys(heads[here], own_weights[here], keys, rows, seen, count)
                found.tiles.append((rows, bits))
    return found


# -- attention over the chosen keys --------------------------------------------------------------------------------


def _chosen_attention_gradient(ctx, grad):
    query, latents, out, sums = ctx.saved_tensors
    key, value, grad = latents.unsqueeze(1), latents[:, None, : out.shape[2]], grad.contiguous()
    grads = [torch.zeros(x.shape, dtype=x.dtype) for x in (query, key, value)]
    for fields in _single_queries(ctx.choice):
        native.ops.segment_attention_backward(
            grad, query, key, value, *fields, out, sums, ctx.scale, None, None, *grads
        )
    of_latents = grads[1].squeeze(1)
    of_latents[:, : out.shape[2]] += grads[2].squeeze(1)
    return grads[0], of_latents, None, None, None


@with_gradient(_chosen_attention_gradient)
def _chosen_attention(ctx, query, latents, width: int, choice: Choice, scale: float):
    """query [n, A, W], latents [T', W] of which the first `width` numbers are values -> [n, A, width]."""
    out, sums = query.new_empty(*query.shape[:2], width), query.new_empty(query.shape[:2])
    key, value = latents.unsqueeze(1), latents[:, None, :width]
    for fields in _single_queries(choice):
        native.ops.segment_attention(query, key, value, *fields, scale, None, None, None, out, sums)
    ctx.save_for_backward(query, latents, out, sums)
    ctx.choice, ctx.scale = choice, scale
    return out


def _single_queries(choice: Choice) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Yields segments of one query each, as the compiled kernels read them: queries, keys, last keys, real queries."""
    first = 0
    for lists in choice.lists():
        numbers = torch.arange(len(lists))
        yield first + numbers[:, None], lists, torch.full((len(lists), 1), choice.topk - 1), numbers
        first += len(lists)


def chosen_attention(query: Tensor, latents: Tensor, width: int, choice: Choice, scale: float) -> Tensor:
    """Attention of queries [n, A, L + r] to the latents [T', L + r] that each chose, of which the first `width` numbers
    are values -> [n, A, width]."""
    if not query.shape[-1] % VECTOR and not width % VECTOR:
        return _chosen_attention(query, latents, width, choice, scale)
    whole, padded = -(-width // VECTOR) * VECTOR, (0, -query.shape[-1] % VECTOR)  # zeros at the end change no bit
    return _chosen_attention(pad(query, padded), pad(latents, padded), whole, choice, scale)[..., :width]


# -- the choice, compared with the attention -----------------------------------------------------------------------


@torch.no_grad()
def disagreement(
    query: Tensor, latents: Tensor, choice: Choice, compared: tuple[Tensor, Tensor, Tensor], scale: float, group
) -> Tensor:
    """How far a choice is from the attention that a model would pay to all keys: [2] float64, a sum over compared
    queries and their number, each as often as sequences have it. Collective.

    A query's attention to a key is the mean over all heads of the softmax over the keys that it sees, which DeepSeek's
    indexers are trained to follow (2512.02556 eq. 3). Its part of the sum is 1 − (attention to the chosen keys) /
    (attention to the as many keys that get the most): 0 if no other list has more.

    Args:
        query: the compared ones, absorbed [m, A, L + r].
        compared: of `KeyReads`.
        group: ranks that have the other heads.
    """
    places, seen, uses = compared
    ends = np.cumsum([len(bits) for _, bits in choice.tiles])
    total = torch.zeros(2, dtype=torch.float64, device=query.device)
    for (rows, bits), end in zip(choice.tiles, ends.tolist(), strict=True):
        own = ((places >= end - len(bits)) & (places < end)).nonzero().flatten()
        if not len(own):
            continue
        scores = torch.einsum("maw,kw->mak", query[own], latents[rows]).float() * scale
        own_bits = bits[places[own] - (end - len(bits))]
        total += missed_attention(scores, own_bits, seen[own], uses[own], choice.topk, group)
    return total


def missed_attention(scores: Tensor, bits: Tensor, seen: Tensor, uses: Tensor, count: int, group) -> Tensor:
    """The sums of `disagreement` of m queries with scores [m, A, K]."""
    numbers = torch.arange(scores.shape[2], device=scores.device)
    scores.masked_fill_((numbers >= seen.unsqueeze(1)).unsqueeze(1), -torch.inf)
    attention = scores.softmax(-1).mean(1) / dist.get_world_size(group)
    dist.all_reduce(attention, group=group)
    is_chosen = (bits[:, numbers // 8] >> (numbers % 8)) & 1
    best = attention.topk(count).values.double().sum(1)
    missed = 1 - (attention.double() * is_chosen).sum(1) / best
    return torch.stack([(missed * uses).sum(), uses.sum()])
