"""Latent attention on CUDA by the rows of latents that a query sees: of keys that it chose, or of all.

Heads are multiplied by the expansion's weights before, and results after it (2405.04434 §2.1), so that no latent is
expanded. One kernel (`kernels.cuda.key_choice`) attends in prefill, decode, scoring and training, and a query's bits
depend on it and on the latents that it sees alone. Models whose queries choose keys compute so; with `--exact-rollout`
all with latent attention.
Shapes: T tokens of a rank, T' rows of latents, of the stream or the cache; A heads of attention, L + r numbers of a
latent and its rotated key; K keys of a segment.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from megarl.mcore.attention.backends.sdpa import DecodeReads
from megarl.mcore.attention.cache_attention import CacheReads
from megarl.mcore.attention.chosen_keys import COMPARED_OF, QUERIES, missed_attention, queries_of, uses_of
from megarl.mcore.attention.packing import PackedLayout
from megarl.mcore.kernels import with_gradient

GATHERED = 64  # queries whose latents are in memory together, in backward


# q queries, and the rows of latents that they see: tokens [q] int64; rows [R] of latents; first [q] int64: the keys of
# a query are rows[first], …; seen [q] int64, how many; at least the most of these.
QueryRows = tuple[Tensor, Tensor, Tensor, Tensor, int]
# Of each of the `QueryRows`: bits [q, ⌈K/8⌉] uint8 of the keys that its queries chose; None: they see no more.
RowChoice = list[Tensor | None]


class RowReads:
    """What the queries of a micro-batch, or of a step, see on CUDA; the same for all layers. Reads nothing of the
    device."""

    def __init__(self, pieces: list[tuple[Tensor, Tensor, Tensor, Tensor]], count: int | None):
        """`pieces`: as of `chosen_keys.queries_of`; `count`: keys that a query chooses, None: of a model without."""
        rows, start, groups = torch.cat([keys.flatten() for _, keys, *_ in pieces]), 0, [[]]
        for tokens, keys, segment, seen in pieces:
            fields = (tokens, segment * keys.shape[1] + start, seen)
            start += keys.numel()
            for own in zip(*(field.split(QUERIES) for field in fields), strict=True):
                if sum(len(piece[0]) for piece, _ in groups[-1]) + len(own[0]) > QUERIES:
                    groups.append([])
                groups[-1].append((own, keys.shape[1]))
        self.count = count
        self.parts: list[QueryRows] = []
        for group in groups:
            tokens, first, seen = (torch.cat(fields) for fields in zip(*(own for own, _ in group), strict=True))
            self.parts.append((tokens, rows, first, seen, max(width for _, width in group)))
        self.is_long = count is not None and max(width for *_, width in self.parts) > count  # some may choose
        self.choices: dict[int, RowChoice] = {}  # as of `KeyReads`
        self._compared: list[tuple[Tensor, Tensor, Tensor]] | None = None

    @classmethod
    def of_stream(cls, layout: PackedLayout, kind: int, count: int | None) -> "RowReads":
        """Those of a micro-batch in layers of a kind."""
        return cls([queries_of(batch) for batch in layout.attention[kind].batches], count)

    @classmethod
    def of_step(cls, reads: CacheReads, block: int, count: int | None) -> "RowReads":
        """Those of a step's `CacheReads`; `block`: tokens of a block of the cache."""
        pieces = [_of_pages(each, reads.total, block) for each in reads.decodes]
        return cls(pieces + [queries_of(batch) for batch in reads.prefills], count)

    def choose(self, heads_of: Callable[[Tensor], Tensor], weights: Tensor, keys: Tensor) -> RowChoice:
        """The choice of each query; arguments as of `chosen_keys.choose`, keys of any type."""
        from megarl.mcore.kernels.cuda.key_choice import choose_key_bits  # needs Triton

        found: RowChoice = []
        for tokens, rows, first, seen, width in self.parts:
            bits = None
            if width > self.count:
                heads, own = heads_of(tokens).to(keys.dtype).contiguous(), weights[tokens].contiguous()
                bits = choose_key_bits(heads, own, keys, rows, first, seen, self.count, width)
            found.append(bits)
        return found

    def chosen(self, choice: RowChoice | None) -> Iterator[QueryRows]:
        """Yields the parts with the rows that queries chose; None: with all that they see."""
        from megarl.mcore.kernels.cuda.key_choice import list_key_rows  # needs Triton

        count = self.count
        for number, part in enumerate(self.parts):
            bits = None if choice is None else choice[number]
            if bits is None:
                yield part
                continue
            tokens, rows, first, seen, _ = part
            lists = list_key_rows(bits, rows, first, seen, count)
            starts = torch.arange(len(lists), device=lists.device) * count
            yield tokens, lists.flatten(), starts, seen.clamp(max=count), count

    def compared(self, layout: PackedLayout) -> list[tuple[Tensor, Tensor, Tensor]]:
        """As that of `KeyReads`, of each part: tokens, their places in it, and how many sequences have each."""
        if self._compared is None:
            every, self._compared = min(COMPARED_OF, self.count), []
            for tokens, _, _, seen, _ in self.parts:
                places = ((seen % every == 0) & (seen > self.count)).nonzero().flatten()
                self._compared.append((tokens[places], places, uses_of(layout, tokens[places])))
        return self._compared


def _of_pages(reads: DecodeReads, total: int, block: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As `chosen_keys.queries_of`, of decodes."""
    place = reads.mask.device
    seen, tokens = (reads.mask.flatten(1) == 0).sum(1), torch.arange(total, device=place)[reads.tokens]
    rows = reads.pages.view(len(seen), -1, 1) * block + torch.arange(block, device=place)
    return tokens, rows.flatten(1)[:, : reads.mask.shape[-1]], torch.arange(len(seen), device=place), seen


def _row_attention_gradient(ctx, grad):
    query, latents, out, sums = ctx.saved_tensors
    of_query, of_latents = torch.zeros_like(query), latents.new_zeros(latents.shape, dtype=torch.float32)
    from_sums, width = (grad.float() * out.float()).sum(-1), out.shape[2]
    for tokens, rows, is_seen in _gathered(ctx.reads.chosen(ctx.choice)):
        q, g, listed = query[tokens], grad[tokens], latents[rows]  # [q, A, L + r], [q, A, L], [q, k, L + r]
        weights = (torch.matmul(q, listed.transpose(1, 2)).float() * ctx.scale - sums[tokens].unsqueeze(2)).exp()
        weights = weights.masked_fill(~is_seen.unsqueeze(1), 0)
        of_weights = torch.matmul(g, listed[..., :width].transpose(1, 2)).float() - from_sums[tokens].unsqueeze(2)
        of_scores = (weights * of_weights * ctx.scale).to(q.dtype)
        of_query[tokens] = torch.matmul(of_scores, listed)
        of_rows = torch.matmul(of_scores.transpose(1, 2), q).float()
        of_rows[..., :width] += torch.matmul(weights.to(g.dtype).transpose(1, 2), g)
        # Several queries may list a row: this adds in a fixed order, as `index_add_` does not on CUDA.
        of_latents.index_put_((rows.flatten(),), of_rows.flatten(0, 1), accumulate=True)
    return of_query, of_latents.to(latents.dtype), None, None, None, None


def _gathered(parts: Iterator[QueryRows]) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yields (tokens [q], rows [q, k], which of them each sees [q, k]) of at most `GATHERED` queries."""
    for part in parts:
        for start in range(0, len(part[0]), GATHERED):
            own = slice(start, start + GATHERED)
            yield part[0][own], *_rows_of(part, own)


def _rows_of(part: QueryRows, own: slice | Tensor) -> tuple[Tensor, Tensor]:
    """(rows [q, K] of the keys that some queries of a part see, then any; which are seen)."""
    _, rows, first, seen, width = part
    place = torch.arange(width, device=rows.device)
    is_seen = place < seen[own].unsqueeze(1)
    return rows[first[own].unsqueeze(1) + place * is_seen].long(), is_seen


@with_gradient(_row_attention_gradient)
def row_attention(ctx, query, latents, width: int, reads: RowReads, choice: RowChoice | None, scale: float):
    """Attention of absorbed queries [T, A, L + r] to the latents [T', L + r] that each chose, of which the first
    `width` numbers are values -> [T, A, width]; of tokens that are no queries it is 0."""
    from megarl.mcore.kernels.cuda.key_choice import attend_rows  # needs Triton

    out, sums = query.new_zeros(*query.shape[:2], width), query.new_zeros(query.shape[:2], dtype=torch.float32)
    for tokens, rows, first, seen, _ in reads.chosen(choice):
        out[tokens], sums[tokens] = attend_rows(query[tokens], latents, rows, first, seen, width, scale)
    ctx.save_for_backward(query, latents, out, sums)
    ctx.reads, ctx.choice, ctx.scale = reads, choice, scale
    return out


@torch.no_grad()
def row_disagreement(
    queries: list[Tensor], latents: Tensor, reads: RowReads, choice: RowChoice, scale: float, group
) -> Tensor:
    """As `chosen_keys.disagreement`, of the absorbed queries [m, A, L + r] of `RowReads.compared`."""
    total = torch.zeros(2, dtype=torch.float64, device=latents.device)
    for query, part, bits, (_, own, uses) in zip(queries, reads.parts, choice, reads._compared, strict=True):
        if bits is None or not len(own):
            continue
        rows, is_seen = _rows_of(part, own)
        scores = torch.einsum("maw,mkw->mak", query, latents[rows]).float() * scale
        total += missed_attention(scores, bits[own], is_seen.sum(1), uses, reads.count, group)
    return total
