"""A packed micro-batch as one rank sees it: which tokens it holds, and how attention finds its queries and keys.

Sequences stand behind each other in a stream, which context parallelism cuts (`context_parallel`), and whose attention
goes piece by piece (`pieces`). Sequences that begin alike, as the responses to a prompt do, need not hold that
beginning each (`SharedPrefix`): linear layers then see its tokens once.

All of it follows from the lengths, which the host knows: it plans there and sends the plan in one copy, so that no
micro-batch waits for the device.
"""

import itertools
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megarl.batch import SharedPrefix
from megarl.mcore import device
from megarl.mcore.attention.segments import SegmentBatch, TokenStream, plan_segment_batches, segments_of_stream
from megarl.mcore.kernels.batch_invariance import MIN_ROWS
from megarl.mcore.moe.routing import RoutedTokens, Routing
from megarl.mcore.parallel.context_parallel import chunks_of, places_in, stream_order


@dataclass
class PackedLayout(PackedSeqParams):
    """Megatron's description of a packed micro-batch, with what megarl's attention and its model need of it."""

    pieces: list[SegmentBatch] | None = None
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


class ScoredTokens(NamedTuple):
    """Which tokens of a rank are scored: those whose next token was asked for, and, to be enough rows, the first few.

    All int64, among the rank's tokens.
    """

    places: Tensor  # [n] of the scored ones, n at least `LEAST_ROWS` where the rank has so many tokens
    inside: Tensor  # [m] where among these n those stand that were asked for
    wanted: Tensor  # [m] places of those that were asked for


def _padded_size(tokens: int, context_ranks: int, tensor_ranks: int) -> int:
    """Tokens of a stream that every rank of its role can hold an equal share of."""
    unit = (2 * context_ranks if context_ranks > 1 else 1) * tensor_ranks
    return -(-max(tokens, MIN_ROWS * context_ranks if context_ranks > 1 else 0) // unit) * unit


def hidden_rows(lengths: Tensor, shared: SharedPrefix | None, pg_collection, sequence_parallel: bool) -> int:
    """Rows of the hidden states of a micro-batch of sequences [N], lengths on the host, on each rank of its role."""
    tokens = int(lengths.sum()) - (0 if shared is None else int(shared.tokens.sum()))
    ranks, tensor_ranks = dist.get_world_size(pg_collection.cp), dist.get_world_size(pg_collection.tp)
    tensor_ranks = tensor_ranks if sequence_parallel else 1
    return _padded_size(tokens, ranks, tensor_ranks) // (ranks * tensor_ranks)


def routed_tokens(lengths: Tensor, pg_collection, sequence_parallel: bool) -> RoutedTokens:
    """The tokens of a micro-batch of sequences [N], lengths on the host, that this rank's routers see."""
    ranks, tensor_ranks = dist.get_world_size(pg_collection.cp), dist.get_world_size(pg_collection.tp)
    ends = lengths.numpy().cumsum()
    total = _padded_size(int(ends[-1]), ranks, tensor_ranks if sequence_parallel else 1)
    places = places_in(chunks_of(dist.get_rank(pg_collection.cp), ranks, total))
    if sequence_parallel:
        places = places.reshape(tensor_ranks, -1)[dist.get_rank(pg_collection.tp)]
    sequence = np.searchsorted(ends, places, side="right")
    is_last = places + 1 == ends[sequence.clip(max=len(ends) - 1)]
    counted = (places < ends[-1]) & ~is_last
    places, sequence, counted = device.send([places, sequence, counted.astype(np.int64)])
    return RoutedTokens(places, counted.bool(), sequence, len(ends))


def scored_tokens(mask: Tensor, packing: PackedLayout) -> ScoredTokens:
    """Which of this rank's tokens are scored where those in a mask [T] of the host are asked for.

    What sequences share is scored where it is asked for of its owner.
    """
    asked = mask.numpy() if packing.host_held is None else mask.numpy()[packing.host_held]
    following = np.roll(np.append(asked, np.zeros(packing.padding, bool)), -1)[packing.host_places]
    places = following.copy()
    places[:MIN_ROWS] = True
    inside, wanted = np.flatnonzero(following[places]), np.flatnonzero(following)
    return ScoredTokens(*device.send([np.flatnonzero(places), inside, wanted]))


def _holders_of_tokens(lengths: np.ndarray, stream: TokenStream) -> tuple[np.ndarray, np.ndarray]:
    """`held` and `source` of a `PackedLayout`.

    What is said of a token comes from the one before it, which the first that a sequence holds has not beside it: of
    that one, too, the owner's tell.
    """
    sequence = np.repeat(np.arange(len(lengths)), lengths)
    position = np.arange(len(sequence)) - np.repeat(lengths.cumsum() - lengths, lengths)
    shared = stream.shared[sequence]
    own, holders = stream.starts[sequence] - shared, stream.starts[stream.holders[sequence]]
    return np.flatnonzero(position >= shared), np.where(position > shared, own, holders) + position


def pack_sequences(
    lengths: Tensor, context=None, tensor_ranks: int = 1, routing: Routing | None = None,
    shared: SharedPrefix | None = None,
) -> PackedLayout:  # fmt: skip
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
    stream, count = (
        TokenStream.of(lengths, shared, lambda tokens: _padded_size(tokens, ranks, tensor_ranks)),
        len(lengths),
    )
    total, tokens = int(stream.ends[-1]), int(stream.ends[count - 1])
    longest = max(int(lengths.max()), total - tokens)
    chunks = chunks_of(dist.get_rank(context) if ranks > 1 else 0, ranks, total)
    classes, places = plan_segment_batches(segments_of_stream(stream, chunks), ranks == 1), places_in(chunks)
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
        arrays["held"], arrays["source"] = _holders_of_tokens(lengths, stream)
    sent = device.send([*arrays.values(), *itertools.chain(*classes)])
    pieces = iter(sent[len(arrays) :])
    return PackedLayout(
        qkv_format="thd",  # cumulative lengths stay None: rotary embeddings come by position, see `ModelChunk`
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        cp_group=context,
        pieces=[SegmentBatch.of(*itertools.islice(pieces, len(planned))) for planned in classes],
        **dict(zip(arrays, sent, strict=False)),
        host_places=places,
        host_held=arrays.get("held"),
        tokens=tokens,
        padding=total - tokens,
        routing=routing,
    )
