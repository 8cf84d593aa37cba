"""Which keys a query attends to in layers with a lightning indexer (DeepSeek-V3.2, 2512.02556 §2.1), and its attention.

One function chooses them in prefill, decode, scoring and training. It depends on a query and the keys of its sequence
alone, by a compiled kernel (`chosen_keys.h`); of equal scores at the border the first positions win. ReLU makes scores
of exactly 0, so that ties are common with few heads.
A query that sees at most `count` keys attends to all of them, as in dense layers. Any other attends to chosen latents,
without expanding them: its heads are multiplied by the expansion's weights before, and the result after attention.
The kernels of a CPU compute in fp32. In bf16 they read widened numbers, and the result is rounded: a query's bits
follow from its own bits and those of the keys that it sees. Those of CUDA (`kernels.cuda.key_choice`) read bf16.
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

from megarl.mcore.attention.backends.sdpa import DecodeReads
from megarl.mcore.attention.cache_attention import CacheReads
from megarl.mcore.attention.native_attention import LatentDecodes
from megarl.mcore.attention.packing import PackedLayout
from megarl.mcore.attention.segments import SegmentBatch
from megarl.mcore.kernels import native, with_gradient
from megarl.mcore.kernels.batch_invariance import VECTOR

QUERIES = 512  # whose heads, and whose lists, are in memory together
GATHERED = 64  # whose listed latents are in memory together, in backward on CUDA
COMPARED_OF = 64  # one query in so many is compared with its attention; one in `count` if that is less


class LongSegment(NamedTuple):
    """The q queries of a segment that see more keys than they may choose."""

    queries: Tensor  # [q] int64 tokens
    keys: Tensor  # [K] int64 rows of latents; [q, K] of each query's own, of decodes on CUDA
    seen: Tensor  # [q] int64 how many of them each query sees; ascending, if the keys are those of all


# Queries that attend to all keys that they see: rows [m] int64 of latents that are expanded for them, and batches whose
# keys are among these.
DenseReads = tuple[Tensor, list[SegmentBatch]]


class KeyReads:
    """How the queries of a micro-batch, or of a step, attend; the same for all layers."""

    def __init__(self, dense: list[DenseReads], long: list[LongSegment]):
        self.dense, self.long = dense, long
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
            stream = layout.token_indices[reads.of_long[places]]
            uses = stream < layout.tokens
            if layout.source is not None:  # several sequences may have a token of the stream
                uses = torch.bincount(layout.source, minlength=layout.tokens + layout.padding)[stream]
            reads.compared = places, seen[places], uses
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
    def of_step(cls, reads: CacheReads, count: int, block: int) -> "KeyReads":
        """Those of a step's `CacheReads`; `block`: tokens of a block of the cache."""
        dense, long = [], []
        for each in reads.decodes:
            if isinstance(each, LatentDecodes):
                some, others = _of_decodes(each, reads.total, count)
            else:
                some, others = _of_pages(each, reads.total, count, block)
            dense, long = dense + some, long + others
        for batch in reads.prefills:
            short, others = _split([batch], count)
            dense, long = dense + ([_dense(short)] if short else []), long + others
        return cls(dense, long)


def _of_decodes(reads: LatentDecodes, total: int, count: int) -> tuple[list[DenseReads], list[LongSegment]]:
    tokens, dense, long = torch.arange(total)[reads.tokens], [], []
    for rows, segments in reads.parts:
        placed = dataclasses.replace(segments, queries=tokens[segments.queries])
        if placed.keys.shape[1] <= count:
            dense.append((rows, [placed]))
            continue
        short, others = _split([dataclasses.replace(placed, keys=rows[placed.keys])], count)
        dense, long = dense + ([_dense(short)] if short else []), long + others
    return dense, long


def _of_pages(reads: DecodeReads, total: int, count: int, block: int) -> tuple[list[DenseReads], list[LongSegment]]:
    """Decodes on CUDA: those that see many keys are one segment, so that a layer chooses for all of them together."""
    place = reads.mask.device
    seen, tokens = (reads.mask.flatten(1) == 0).sum(1), torch.arange(total, device=place)[reads.tokens]
    rows = reads.pages.view(len(seen), -1, 1) * block + torch.arange(block, device=place)
    rows, is_long = rows.flatten(1)[:, : reads.mask.shape[-1]], seen > count
    few, many = (~is_long).nonzero().flatten(), is_long.nonzero().flatten()
    long = [LongSegment(tokens[many], rows[many], seen[many])] if len(many) else []
    if not len(few):
        return [], long
    numbers, last = torch.arange(len(few), device=place), seen[few] - 1
    batch = SegmentBatch(None, tokens[few, None], rows[few, : int(last.max()) + 1], numbers, last[:, None])
    return [_dense([batch])], long


def _split(batches: list[SegmentBatch], count: int) -> tuple[list[SegmentBatch], list[LongSegment]]:
    """(the segments of queries that see at most `count` keys, those of the others)."""
    short, long = [], []
    for batch in batches:
        width, real = batch.queries.shape[1], batch.real_queries
        if batch.keys.shape[1] <= count:
            short.append(batch)
            continue
        seen = 1 + (real % width if batch.last_keys is None else batch.last_keys.flatten()[real])
        is_long, tokens = seen > count, batch.queries.flatten()[real]
        if not is_long.all():
            few = real[~is_long]
            short.append(dataclasses.replace(batch, keys=batch.keys[:, :count].contiguous(), real_queries=few))
        for number in (real[is_long] // width).unique().tolist():
            own = is_long & (real // width == number)
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
            if bits.is_cuda:
                from megarl.mcore.kernels.cuda.key_choice import list_key_rows  # needs Triton

                yield list_key_rows(bits, rows, self.topk)
            else:
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
        keys: index keys [T', C], fp32; on CUDA of any type.
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
                seen, rows = segment.seen[own], segment.keys if segment.keys.dim() == 1 else segment.keys[own]
                rows = rows[..., : int(seen.max())]
                found.tiles.append((rows, _bits(heads[here], own_weights[here], keys, rows, seen, count)))
    return found


def _bits(heads: Tensor, weights: Tensor, keys: Tensor, rows: Tensor, seen: Tensor, count: int) -> Tensor:
    """Bits [q, ⌈K/8⌉] of the keys that q queries choose."""
    if keys.is_cuda:
        from megarl.mcore.kernels.cuda.key_choice import choose_key_bits  # needs Triton

        return choose_key_bits(heads, weights, keys, rows, seen, count)
    return native.ops.choose_keys(heads, weights, keys, rows, seen, count)


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
    if query.is_cuda:
        return _listed_attention(query, latents, width, choice, scale)
    if not query.shape[-1] % VECTOR and not width % VECTOR:
        return _chosen_attention(query, latents, width, choice, scale)
    whole, padded = -(-width // VECTOR) * VECTOR, (0, -query.shape[-1] % VECTOR)  # zeros at the end change no bit
    return _chosen_attention(pad(query, padded), pad(latents, padded), whole, choice, scale)[..., :width]


def _listed_attention_gradient(ctx, grad):
    query, latents, out, sums = ctx.saved_tensors
    of_query, of_latents = torch.empty_like(query), latents.new_zeros(latents.shape, dtype=torch.float32)
    from_sums, width = (grad.float() * out.float()).sum(-1), out.shape[2]
    for part, lists in _parts_of_lists(ctx.choice, GATHERED):
        q, g, rows = query[part], grad[part], latents[lists.long()]  # [q, A, L + r], [q, A, L], [q, k, L + r]
        weights = (torch.matmul(q, rows.transpose(1, 2)).float() * ctx.scale - sums[part].unsqueeze(2)).exp()
        of_weights = torch.matmul(g, rows[..., :width].transpose(1, 2)).float() - from_sums[part].unsqueeze(2)
        of_scores = (weights * of_weights * ctx.scale).to(q.dtype)
        of_query[part] = torch.matmul(of_scores, rows)
        of_rows = torch.matmul(of_scores.transpose(1, 2), q).float()
        of_rows[..., :width] += torch.matmul(weights.to(g.dtype).transpose(1, 2), g)
        # Several queries may list a row: this adds in a fixed order, as `index_add_` does not on CUDA.
        of_latents.index_put_((lists.flatten().long(),), of_rows.flatten(0, 1), accumulate=True)
    return of_query, of_latents.to(latents.dtype), None, None, None


@with_gradient(_listed_attention_gradient)
def _listed_attention(ctx, query, latents, width: int, choice: Choice, scale: float):
    """As `_chosen_attention`, on CUDA."""
    from megarl.mcore.kernels.cuda.key_choice import attend_lists  # needs Triton

    out, sums = query.new_empty(*query.shape[:2], width), query.new_empty(query.shape[:2], dtype=torch.float32)
    for part, lists in _parts_of_lists(choice, QUERIES):
        out[part], sums[part] = attend_lists(query[part], latents, lists, width, scale)
    ctx.save_for_backward(query, latents, out, sums)
    ctx.choice, ctx.scale = choice, scale
    return out


def _parts_of_lists(choice: Choice, size: int) -> Iterator[tuple[slice, Tensor]]:
    """Yields (which of the n queries, their lists), at most `size` at a time."""
    first = 0
    for lists in choice.lists():
        for part in lists.split(size):
            yield slice(first, first + len(part)), part
            first += len(part)


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
        numbers = torch.arange(len(rows), device=query.device)
        scores = torch.einsum("maw,kw->mak", query[own], latents[rows]).float() * scale
        scores.masked_fill_((numbers >= seen[own, None]).unsqueeze(1), -torch.inf)
        attention = scores.softmax(-1).mean(1) / dist.get_world_size(group)
        dist.all_reduce(attention, group=group)
        is_chosen = (bits[places[own] - (end - len(bits))][:, numbers // 8] >> (numbers % 8)) & 1
        best = attention.topk(choice.topk).values.double().sum(1)
        missed = 1 - (attention.double() * is_chosen).sum(1) / best
        total += torch.stack([(missed * uses[own]).sum(), uses[own].sum()])
    return total
