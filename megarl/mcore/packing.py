"""A packed micro-batch as one rank sees it: which tokens it holds, and how attention finds its queries and keys.

Sequences are cut from the stream as context parallelism wants it (`context_parallel`); what a rank holds of a sequence
is a piece: q consecutive queries whose keys are the k tokens from the sequence's start to the last query. Attention
kernels for dense tensors take pieces of similar size together, padded to the longest of them.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megarl.mcore.context_parallel import chunks_of, places_in, stream_order
from megarl.mcore.routing import Routing, Rows

# What makes a token's numbers independent of what it is batched with, so that rollout and training agree to the last
# bit on a CPU: matrix products of fewer rows take another BLAS kernel, and a softmax row that does not fill whole
# vectors is summed in another order. Rows and keys beyond the real ones are padding that nobody reads.
LEAST_ROWS = 4
VECTOR = 16


def key_width(longest: int, device: torch.device) -> int:
    """Keys of a padded attention row for sequences of at most `longest` tokens."""
    return -(-longest // VECTOR) * VECTOR if device.type == "cpu" else longest


@dataclass(frozen=True)
class Pieces:
    """Pieces that one call of a dense attention kernel takes: n pieces, at most Q queries and K keys each."""

    queries: Tensor  # [n, Q] int64 places among this rank's tokens; padding repeats the last query
    keys: Tensor  # [n, K] int64 places in the stream; padding repeats the last key
    mask: Tensor | None  # [n, 1, Q, K] bool, True where seen; None: causal, the i-th query sees keys 0 … i
    real: Tensor  # [m] int64 places in [n·Q] of the queries that are no padding


@dataclass
class Packing(PackedSeqParams):
    """Megatron's description of a packed micro-batch, with what megarl's attention and its model need of it."""

    pieces: list[Pieces] | None = None
    order: Tensor | None = None  # [T] of context_parallel.stream_order; None without context parallelism
    restore: Tensor | None = None  # [T/c] int64: where each of this rank's queries stands in the pieces' results
    places: Tensor | None = None  # [T/c] int64 places in the padded stream of this rank's tokens
    positions: Tensor | None = None  # [T/c] int64 positions of this rank's tokens in their sequences
    tokens: int = 0  # of the stream without its padding
    padding: int = 0  # tokens behind it, a sequence that counts nowhere
    routing: Routing | None = None  # of the micro-batch, where the model has experts


def class_widths(longest: int) -> list[int]:
    """Upper limits of classes of piece sizes, so that padding within a class is at most half of the real."""
    widths, width = [], VECTOR
    while width < longest:
        widths.append(width)
        width = max(width + VECTOR, (width * 3 // 2) // VECTOR * VECTOR)
    return [*widths, width]


def _pieces_of(first: Tensor, keys_first: Tensor, queries: Tensor, keys: Tensor, is_causal: bool) -> Pieces:
    """One class of pieces; arguments [n]: place of the first query and key, numbers of queries and keys."""
    device = first.device
    wide_q, wide_k = int(queries.max()), key_width(int(keys.max()), device)
    wide_q = wide_k if is_causal else -(-wide_q // LEAST_ROWS) * LEAST_ROWS
    row, column = torch.arange(wide_q, device=device), torch.arange(wide_k, device=device)
    q_index = first.unsqueeze(1) + row.minimum(queries.unsqueeze(1) - 1)
    k_index = keys_first.unsqueeze(1) + column.minimum(keys.unsqueeze(1) - 1)
    real = (row < queries.unsqueeze(1)).flatten().nonzero().flatten()
    mask = None
    if not is_causal:
        # Padded queries see what the last real one sees: a row without a key would be NaN.
        last_seen = (keys - queries).unsqueeze(1) + row.minimum(queries.unsqueeze(1) - 1)
        mask = (column <= last_seen.unsqueeze(2)).unsqueeze(1)
    return Pieces(q_index, k_index, mask, real)


def _cut(starts: Tensor, ends: Tensor, chunks: list[tuple[int, int]]) -> list[Tensor]:
    """Pieces of sequences [starts, ends) within chunks: [n] first query held, first key, queries, keys."""
    found, held = [], 0
    for a, b in chunks:
        first, last = starts.clamp(min=a), ends.clamp(max=b)
        here = first < last
        first, last, start = first[here], last[here], starts[here]
        found.append((held + first - a, start, last - first, last - start))
        held += b - a
    return [torch.cat(column) for column in zip(*found, strict=True)]


def _classes(cut: list[Tensor], is_causal: bool) -> list[Pieces]:
    keys = cut[3]
    kind = torch.searchsorted(torch.tensor(class_widths(int(keys.max())), device=keys.device), keys)
    return [_pieces_of(*(x[kind == i] for x in cut), is_causal) for i in kind.unique().tolist()]


def _padded_size(tokens: int, context_ranks: int, tensor_ranks: int) -> int:
    """Tokens of a stream that every rank of its role can hold an equal share of."""
    unit = (2 * context_ranks if context_ranks > 1 else 1) * tensor_ranks
    return -(-max(tokens, LEAST_ROWS * context_ranks if context_ranks > 1 else 0) // unit) * unit


def routed_rows(lengths: Tensor, collection, sequence_parallel: bool) -> Rows:
    """The tokens of a micro-batch of sequences [N] that this rank's routers see."""
    ranks, tensor_ranks = dist.get_world_size(collection.cp), dist.get_world_size(collection.tp)
    tokens = int(lengths.sum())
    total = _padded_size(tokens, ranks, tensor_ranks if sequence_parallel else 1)
    places = places_in(chunks_of(dist.get_rank(collection.cp), ranks, total), lengths.device)
    if sequence_parallel:
        places = places.chunk(tensor_ranks)[dist.get_rank(collection.tp)]
    ends = lengths.cumsum(0)
    sequence = torch.searchsorted(ends, places, right=True)
    is_last = places + 1 == ends[sequence.clamp(max=len(lengths) - 1)]
    return Rows(places, (places < tokens) & ~is_last, sequence, len(lengths))


def pack(lengths: Tensor, context=None, tensor_ranks: int = 1, routing: Routing | None = None) -> Packing:
    """Describes sequences of these lengths [N] int64, each at least 1, for this rank of its role.

    Args:
        context: the context-parallel group, c ranks; None: one rank.
        tensor_ranks: the t ranks over which sequence parallelism cuts the stream; 1 without it.
        routing: what the model's routers do with this micro-batch.

    The stream is padded to a multiple of 2·c·t tokens: fewer than that for a whole micro-batch, none for c = t = 1.
    """
    device, ranks = lengths.device, 1 if context is None else dist.get_world_size(context)
    tokens = int(lengths.sum())
    total = _padded_size(tokens, ranks, tensor_ranks)
    if total > tokens:
        lengths = torch.cat([lengths, lengths.new_tensor([total - tokens])])
    ends = lengths.cumsum(0)
    starts = ends - lengths
    chunks = chunks_of(dist.get_rank(context) if ranks > 1 else 0, ranks, total)
    pieces = _classes(_cut(starts, ends, chunks), ranks == 1)
    held = torch.cat([p.queries.flatten()[p.real] for p in pieces])
    places = places_in(chunks, device)
    positions = torch.arange(total, device=device) - torch.repeat_interleave(starts, lengths)
    return Packing(
        qkv_format="thd",  # cumulative lengths stay None: rotary embeddings come by position, see `Stage`
        max_seqlen_q=int(lengths.max()),
        max_seqlen_kv=int(lengths.max()),
        cp_group=context,
        pieces=pieces,
        order=stream_order(ranks, total, device) if ranks > 1 else None,
        restore=held.argsort(),
        places=places,
        positions=positions[places],
        tokens=tokens,
        padding=total - tokens,
        routing=routing,
    )
