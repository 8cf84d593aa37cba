"""A packed micro-batch as one rank sees it: which tokens it holds, and how attention finds its queries and keys.

Sequences are cut from the stream as context parallelism wants it (`context_parallel`); what a rank holds of a sequence
is a piece: q consecutive queries whose keys are the k tokens from the sequence's start to the last query. Attention
kernels for dense tensors take pieces of similar size together, padded to the longest of them.

Sequences that begin alike, as the responses to a prompt do, need not hold that beginning each: where one does, it is
the others' too (`Shared`). Linear layers then see its tokens once; attention finds them where they are.

All of it follows from the lengths, which the host knows: it plans there and sends the plan in one copy, so that no
micro-batch waits for the device.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megarl.batch import Shared
from megarl.mcore import device
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

    @classmethod
    def of(cls, queries: Tensor, keys: Tensor, real: Tensor, last_seen: Tensor | None = None) -> "Pieces":
        """From what `plan_pieces` planned, sent to the device."""
        if last_seen is None:
            return cls(queries, keys, None, real)
        column = torch.arange(keys.shape[1], device=keys.device)
        return cls(queries, keys, (column <= last_seen.unsqueeze(2)).unsqueeze(1), real)


@dataclass
class Packing(PackedSeqParams):
    """Megatron's description of a packed micro-batch, with what megarl's attention and its model need of it."""

    pieces: list[Pieces] | None = None
    order: Tensor | None = None  # [T] of context_parallel.stream_order; None without context parallelism
    restore: Tensor | None = None  # [T/c] int64: where each of this rank's queries stands in the pieces' results
    places: Tensor | None = None  # [T/c] int64 places in the padded stream of this rank's tokens
    positions: Tensor | None = None  # [T/c] int64 positions of this rank's tokens in their sequences
    first: Tensor | None = None  # [N] int64 places in the stream of the first tokens that the sequences hold
    last: Tensor | None = None  # [N] int64, and of their last ones
    held: Tensor | None = None  # [tokens] int64: which of the sequences' tokens each of the stream's is; None: itself
    source: Tensor | None = None  # [T] int64: where in the stream each of the sequences' tokens is held, or spoken of
    host_held: np.ndarray | None = None  # `held` on the host
    host_places: np.ndarray | None = None  # `places` on the host
    tokens: int = 0  # of the stream without its padding
    padding: int = 0  # tokens behind it, a sequence that counts nowhere
    routing: Routing | None = None  # of the micro-batch, where the model has experts


class Scored(NamedTuple):
    """Which tokens of a rank are scored: those whose next token was asked for, and, to be enough rows, the first few.

    All int64, among the rank's tokens.
    """

    places: Tensor  # [n] of the scored ones, n at least `LEAST_ROWS` where the rank has so many tokens
    inside: Tensor  # [m] where among these n those stand that were asked for
    wanted: Tensor  # [m] places of those that were asked for


def class_widths(longest: int) -> list[int]:
    """Upper limits of classes of piece sizes, so that padding within a class is at most half of the real."""
    widths, width = [], VECTOR
    while width < longest:
        widths.append(width)
        width = max(width + VECTOR, (width * 3 // 2) // VECTOR * VECTOR)
    return [*widths, width]


def plan_pieces(first, queries, keys, is_causal: bool, key_places: Callable) -> list[np.ndarray]:
    """What `Pieces.of` takes, on the host: queries [n, Q], keys [n, K] and real [m] of `Pieces`, and, if not causal,
    the last key [n, Q] that each query sees.

    Args:
        first, queries, keys: [n] place of the first query, numbers of queries and keys.
        key_places: from the numbers [n, K] of keys in their pieces to their places.
    """
    wide_q, wide_k = int(queries.max()), key_width(int(keys.max()), device.device())
    wide_q = wide_k if is_causal else -(-wide_q // LEAST_ROWS) * LEAST_ROWS
    row = np.minimum(np.arange(wide_q), queries[:, None] - 1)
    column = np.minimum(np.arange(wide_k), keys[:, None] - 1)
    real = np.flatnonzero(np.arange(wide_q) < queries[:, None])
    found = [first[:, None] + row, key_places(column), real]
    # Padded queries see what the last real one sees: a row without a key would be NaN.
    return found if is_causal else [*found, (keys - queries)[:, None] + row]


class _Stream(NamedTuple):
    """What each sequence holds of the stream, [start, end), and the beginning that it shares with its owner; all [N].

    Padding is one more sequence, behind the others.
    """

    starts: np.ndarray
    ends: np.ndarray
    owners: np.ndarray
    shared: np.ndarray

    @classmethod
    def of(cls, lengths: np.ndarray, shared: Shared | None, ranks: int, tensor_ranks: int) -> "_Stream":
        """Of sequences of these lengths [N], padded for ranks of context and tensor parallelism."""
        owners, begins = np.arange(len(lengths)), np.zeros(len(lengths), np.int64)
        if shared is not None:
            owners, begins = shared.owners.numpy(), shared.tokens.numpy()
        held = lengths - begins
        padding = _padded_size(int(held.sum()), ranks, tensor_ranks) - int(held.sum())
        if padding:
            held, owners, begins = (np.append(x, more) for x, more in ((held, padding), (owners, 0), (begins, 0)))
        ends = held.cumsum()
        return cls(ends - held, ends, owners, begins)

    def positions(self) -> np.ndarray:
        """[stream] of its tokens in their sequences."""
        return np.arange(self.ends[-1]) - np.repeat(self.starts - self.shared, self.ends - self.starts)


class _Cut(NamedTuple):
    """Pieces, all [n] int64: place of the first query among the rank's tokens, numbers of queries and keys; the keys'
    places in the stream: the first `shared` ones from `owner` on, the others from `start` on."""

    first: np.ndarray
    queries: np.ndarray
    keys: np.ndarray
    start: np.ndarray
    shared: np.ndarray
    owner: np.ndarray

    def key_places(self, column):
        """From the numbers [n, K] of keys in their pieces to their places in the stream."""
        start, shared, owner = (x[:, None] for x in (self.start, self.shared, self.owner))
        return np.where(column < shared, owner, start - shared) + column


def _cut(stream: _Stream, chunks: list[tuple[int, int]]) -> _Cut:
    """Pieces within chunks of what sequences hold."""
    found, held, owner = [], 0, stream.starts[stream.owners]
    for a, b in chunks:
        first, last = stream.starts.clip(min=a), stream.ends.clip(max=b)
        keys, here = stream.shared + last - stream.starts, first < last
        columns = (held + first - a, last - first, keys, stream.starts, stream.shared, owner)
        found.append([column[here] for column in columns])
        held += b - a
    return _Cut(*map(np.concatenate, zip(*found, strict=True)))


def _classes(cut: _Cut, is_whole: bool) -> list[list[np.ndarray]]:
    """Plans of pieces of similar sizes together. `is_whole`: queries stand as keys do, no sequence is cut.

    Where more than half of a sequence is queries, those of a beginning that another one holds are there again, and
    dropped: causal kernels are the faster ones. Where less is, a mask costs less than such queries.
    """
    is_square = is_whole & (2 * cut.queries > cut.keys)
    kinds = [np.searchsorted(class_widths(int(cut.keys.max())), x) for x in (cut.queries * ~is_square, cut.keys)]
    kinds, found = np.stack([is_square, *kinds], axis=1), []
    for kind in np.unique(kinds, axis=0):
        piece = _Cut(*(x[(kinds == kind).all(1)] for x in cut))
        if not kind[0]:
            found.append(plan_pieces(*piece[:3], False, piece.key_places))
            continue
        _, keys, real = plan_pieces(piece.first, piece.keys, piece.keys, True, piece.key_places)
        found.append([keys, keys, real[real % keys.shape[1] >= piece.shared[real // keys.shape[1]]]])
    return found


def _padded_size(tokens: int, context_ranks: int, tensor_ranks: int) -> int:
    """Tokens of a stream that every rank of its role can hold an equal share of."""
    unit = (2 * context_ranks if context_ranks > 1 else 1) * tensor_ranks
    return -(-max(tokens, LEAST_ROWS * context_ranks if context_ranks > 1 else 0) // unit) * unit


def rows_of(lengths: Tensor, shared: Shared | None, collection, sequence_parallel: bool) -> int:
    """Rows of the hidden states of a micro-batch of sequences [N], lengths on the host, on each rank of its role."""
    tokens = int(lengths.sum()) - (0 if shared is None else int(shared.tokens.sum()))
    ranks, tensor_ranks = dist.get_world_size(collection.cp), dist.get_world_size(collection.tp)
    tensor_ranks = tensor_ranks if sequence_parallel else 1
    return _padded_size(tokens, ranks, tensor_ranks) // (ranks * tensor_ranks)


def routed_rows(lengths: Tensor, collection, sequence_parallel: bool) -> Rows:
    """The tokens of a micro-batch of sequences [N], lengths on the host, that this rank's routers see."""
    ranks, tensor_ranks = dist.get_world_size(collection.cp), dist.get_world_size(collection.tp)
    ends = lengths.numpy().cumsum()
    total = _padded_size(int(ends[-1]), ranks, tensor_ranks if sequence_parallel else 1)
    places = places_in(chunks_of(dist.get_rank(collection.cp), ranks, total))
    if sequence_parallel:
        places = places.reshape(tensor_ranks, -1)[dist.get_rank(collection.tp)]
    sequence = np.searchsorted(ends, places, side="right")
    is_last = places + 1 == ends[sequence.clip(max=len(ends) - 1)]
    counted = (places < ends[-1]) & ~is_last
    places, sequence, counted = device.send([places, sequence, counted.astype(np.int64)])
    return Rows(places, counted.bool(), sequence, len(ends))


def scored(mask: Tensor, packing: Packing) -> Scored:
    """Which of this rank's tokens are scored where those in a mask [T] of the host are asked for.

    What sequences share is scored where it is asked for of its owner.
    """
    asked = mask.numpy() if packing.host_held is None else mask.numpy()[packing.host_held]
    following = np.roll(np.append(asked, np.zeros(packing.padding, bool)), -1)[packing.host_places]
    places = following.copy()
    places[:LEAST_ROWS] = True
    inside, wanted = np.flatnonzero(following[places]), np.flatnonzero(following)
    return Scored(*device.send([np.flatnonzero(places), inside, wanted]))


def _holding(lengths: np.ndarray, stream: _Stream) -> tuple[np.ndarray, np.ndarray]:
    """`held` and `source` of a `Packing`.

    What is said of a token comes from the one before it, which the first that a sequence holds has not beside it: of
    that one, too, the owner's tell.
    """
    sequence = np.repeat(np.arange(len(lengths)), lengths)
    position = np.arange(len(sequence)) - np.repeat(lengths.cumsum() - lengths, lengths)
    shared = stream.shared[sequence]
    own, owners = stream.starts[sequence] - shared, stream.starts[stream.owners[sequence]]
    return np.flatnonzero(position >= shared), np.where(position > shared, own, owners) + position


def pack(
    lengths: Tensor, context=None, tensor_ranks: int = 1, routing: Routing | None = None, shared: Shared | None = None
) -> Packing:
    """Describes sequences of these lengths [N] int64, each at least 1, for this rank of its role.

    Args:
        lengths: on the host, which plans with them: nothing is read from the device.
        context: the context-parallel group, c ranks; None: one rank.
        tensor_ranks: the t ranks over which sequence parallelism cuts the stream; 1 without it.
        routing: what the model's routers do with this micro-batch.
        shared: which sequences begin alike.

    The stream is padded to a multiple of 2·c·t tokens: fewer than that for a whole micro-batch, none for c = t = 1.
    """
    ranks, lengths = 1 if context is None else dist.get_world_size(context), lengths.numpy()
    stream, count = _Stream.of(lengths, shared, ranks, tensor_ranks), len(lengths)
    total, tokens = int(stream.ends[-1]), int(stream.ends[count - 1])
    chunks = chunks_of(dist.get_rank(context) if ranks > 1 else 0, ranks, total)
    classes, places = _classes(_cut(stream, chunks), ranks == 1), places_in(chunks)
    arrays = {
        "restore": np.concatenate([queries.ravel()[real] for queries, _, real, *_ in classes]).argsort(),
        "places": places,
        "positions": stream.positions()[places],
        "first": stream.starts[:count],
        "last": stream.ends[:count] - 1,
    }
    if ranks > 1:
        arrays["order"] = stream_order(ranks, total)
    if shared is not None:
        arrays["held"], arrays["source"] = _holding(lengths, stream)
    sent = device.send([*arrays.values(), *itertools.chain(*classes)])
    pieces = iter(sent[len(arrays) :])
    return Packing(
        qkv_format="thd",  # cumulative lengths stay None: rotary embeddings come by position, see `Stage`
        max_seqlen_q=max(int(lengths.max()), total - tokens),
        max_seqlen_kv=max(int(lengths.max()), total - tokens),
        cp_group=context,
        pieces=[Pieces.of(*itertools.islice(pieces, len(planned))) for planned in classes],
        **dict(zip(arrays, sent, strict=False)),
        host_places=places,
        host_held=arrays.get("held"),
        tokens=tokens,
        padding=total - tokens,
        routing=routing,
    )
