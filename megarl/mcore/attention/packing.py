"""Layout of a packed micro-batch on one rank: which tokens it holds, and the queries and keys of its attention.

A packed micro-batch is a token stream (THD): all sequences one after another, then padding. Context parallelism splits
it into chunks. A shared prefix (`SharedPrefix`), such as the prompt of several responses, is held by one sequence for
others: the stream, and so linear layers, have it once. The layout follows from the sequence lengths; it is planned on
the host and sent in one copy, so that no micro-batch waits for the device.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megarl.batch import SharedPrefix, expand_array_counts
from megarl.mcore import device
from megarl.mcore.attention.segments import HostPlan, Segments, TokenStream, plan_attention, segments_of_stream
from megarl.mcore.kernels.batch_invariance import MIN_ROWS
from megarl.mcore.moe.routes import RoutedTokens, Routing
from megarl.mcore.parallel.context_parallel import chunk_indices, chunks_of, stream_order
from megarl.mcore.recurrence.runs import NONE, Runs


@dataclass
class PackedLayout(PackedSeqParams):
    """Megatron's `PackedSeqParams` with the indices that megarl's attention and model need."""

    attention: tuple | None = None  # the attention backend's plans; by kind of layer, of `attention.segments`
    order: Tensor | None = None  # [T] of context_parallel.stream_order; None without context parallelism
    token_indices: Tensor | None = None  # [T/c] int64 indices in the padded stream of this rank's tokens
    positions: Tensor | None = None  # [T/c] int64 positions of this rank's tokens in their sequences
    first: Tensor | None = None  # [N] int64 stream index of the first token that each sequence holds
    last: Tensor | None = None  # [N] int64 stream index of the last one
    held: Tensor | None = None  # [tokens] int64 index in the unshared sequences of each stream token; None: identity
    source: Tensor | None = None  # [T] int64 stream index with the value of each token of the unshared sequences
    host_held: np.ndarray | None = None  # `held` on the host
    host_token_indices: np.ndarray | None = None  # `token_indices` on the host
    tokens: int = 0  # in the stream, without padding
    padding: int = 0  # tokens after them, one more sequence whose results are dropped
    routing: Routing | None = None  # of the micro-batch, if the model has experts
    runs: Runs | None = None  # of the whole stream, in models with recurrent states
    # Of this rank's tokens, by kind of layer: each `Rotation`'s cosines and sines [T/c, 1, r]. The model sets it for
    # the core attention, which rotates queries and keys; None: no rotary embeddings, or those of a latent attention.
    rotations: tuple | None = field(default=None, init=False)
    key_reads: Any = field(default=None, init=False)  # a `KeyReads` in models whose queries choose keys
    images: Any = field(default=None, init=False)  # `ImageRows` of this rank's tokens, if layers add features
    axis_positions: Tensor | None = field(default=None, init=False)  # [3, T/c] of `ImageStore`; None: `positions`

    @property
    def next_tokens(self) -> Tensor:
        """[T/c] int64 index in the unshared sequences of the token after each of this rank's; any one at their ends."""
        following = ((self.token_indices + 1) % (self.tokens + self.padding)).clamp_(max=self.tokens - 1)
        return following if self.held is None else self.held[following]

    @property
    def host_next_tokens(self) -> np.ndarray:
        """`next_tokens` on the host."""
        following = ((self.host_token_indices + 1) % (self.tokens + self.padding)).clip(max=self.tokens - 1)
        return following if self.host_held is None else self.host_held[following]


class ScoredTokens(NamedTuple):
    """The tokens that a rank scores: those whose next token is requested, and the first `MIN_ROWS` for enough rows.

    All int64 indices.
    """

    rows: Tensor  # [n] scored tokens among the rank's tokens; n is at least `MIN_ROWS` if the rank has that many
    requested_of_scored: Tensor  # [m] requested tokens among the n scored ones
    requested: Tensor  # [m] requested tokens among the rank's tokens
    host_rows: np.ndarray  # `rows` on the host


def _padded_size(tokens: int, context_ranks: int, tensor_ranks: int) -> int:
    """Returns the padded number of stream tokens, of which all ranks hold equal shares."""
    unit = (2 * context_ranks if context_ranks > 1 else 1) * tensor_ranks
    return -(-max(tokens, MIN_ROWS * context_ranks if context_ranks > 1 else 0) // unit) * unit


def hidden_rows(lengths: Tensor, shared: SharedPrefix | None, pg_collection, sequence_parallel: bool) -> int:
    """Returns the hidden-state rows per rank of a micro-batch of sequences with these lengths [N], on the host."""
    tokens = int(lengths.sum()) - (0 if shared is None else int(shared.tokens.sum()))
    ranks, tensor_ranks = dist.get_world_size(pg_collection.cp), dist.get_world_size(pg_collection.tp)
    tensor_ranks = tensor_ranks if sequence_parallel else 1
    return _padded_size(tokens, ranks, tensor_ranks) // (ranks * tensor_ranks)


def routed_tokens(
    lengths: Tensor, pg_collection, sequence_parallel: bool, shared: SharedPrefix | None = None
) -> RoutedTokens:
    """Returns the tokens that this rank routes of a micro-batch of sequences with these lengths [N], on the host.

    Example on one rank: sequences A = a b c and B = a b d e share the prefix a b, which A holds. The stream is
    a b c d e, whose tokens have the indices 0 1 2 5 6 among the tokens of A and B, and B's a b occur in rows 0 and 1:

        rows       0 1 2 | 0 1 3 4
        sequence   0 0 0 | 1 1 1 1
        counted    1 1 0 | 1 1 1 0     the last token of a sequence does not count
        uses       2 2 0 1 0           of the five rows
    """
    ranks, tensor_ranks = dist.get_world_size(pg_collection.cp), dist.get_world_size(pg_collection.tp)
    lengths, unit = lengths.numpy(), tensor_ranks if sequence_parallel else 1
    stream = TokenStream.of(lengths, shared, lambda tokens: _padded_size(tokens, ranks, unit))
    token, at, sequence, counted = _stream_occurrences(lengths, stream)
    own = chunk_indices(chunks_of(dist.get_rank(pg_collection.cp), ranks, len(token)))  # stream indices of this rank
    if sequence_parallel:
        own = own.reshape(tensor_ranks, -1)[dist.get_rank(pg_collection.tp)]
    row_of = np.full(len(token), -1)
    row_of[own] = np.arange(len(own))
    rows = row_of[at]
    rows, sequence, counted = (x[rows >= 0] for x in (rows, sequence, counted))
    uses = np.bincount(rows[counted], minlength=len(own))
    token, uses, rows, sequence, counted = device.to_device(
        [token[own], uses, rows, sequence, counted.astype(np.int64)]
    )
    return RoutedTokens(token, uses, (rows, sequence, counted.bool()), sequences=len(lengths))


def _stream_occurrences(lengths: np.ndarray, stream: TokenStream) -> tuple[np.ndarray, ...]:
    """Returns (token [stream], at, sequence, counted [all tokens]): the index among the unshared sequences' tokens of
    each stream token, and where, in which sequence and whether counted each token of these occurs in the stream.

    Padding is one more sequence, in which no token counts and whose tokens follow those of the others.
    """
    sequence, position, is_held, at = _places(lengths, stream)
    total, tokens = int(stream.ends[-1]), int(stream.ends[len(lengths) - 1])
    padding = total - tokens
    token = np.concatenate([np.flatnonzero(is_held), len(position) + np.arange(padding)])
    at = np.concatenate([at, np.arange(tokens, total)])
    sequence = np.concatenate([sequence, np.full(padding, len(lengths))])
    counted = np.concatenate([position + 1 < lengths.repeat(lengths), np.zeros(padding, bool)])
    return token, at, sequence, counted


def scored_tokens(mask: Tensor, packing: PackedLayout) -> ScoredTokens:
    """Returns which of this rank's tokens to score, from the mask [T] of requested tokens, on the host.

    A token of a shared prefix is scored if it is requested for the holder.
    """
    requested = mask.numpy() if packing.host_held is None else mask.numpy()[packing.host_held]
    next_requested = np.roll(np.append(requested, np.zeros(packing.padding, bool)), -1)[packing.host_token_indices]
    is_scored = next_requested.copy()
    is_scored[:MIN_ROWS] = True
    indices = [np.flatnonzero(is_scored), np.flatnonzero(next_requested[is_scored]), np.flatnonzero(next_requested)]
    at, of_scored, of_all = device.to_device(indices)
    return ScoredTokens(at, of_scored, of_all, host_rows=indices[0])


def _shared_token_indices(lengths: np.ndarray, stream: TokenStream) -> tuple[np.ndarray, np.ndarray]:
    """Returns `held` and `source` of a `PackedLayout`.

    A token's value comes from the token before it. For the first token that a sequence holds after a shared prefix, the
    holder has that one, so its value is also read at the holder.
    """
    sequence, position, is_held, at = _places(lengths, stream)
    holders = stream.starts[stream.holders[sequence]]
    is_first = position == stream.prefix_lengths[sequence]
    return np.flatnonzero(is_held), np.where(is_first, holders + position, at)


def _places(lengths: np.ndarray, stream: TokenStream) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Returns for each token of the unshared sequences: its sequence, its position there, whether that sequence holds
    it, and its stream index. Sequences with lengths [N]; all [tokens]."""
    sequence, position = expand_array_counts(lengths)
    prefix = stream.prefix_lengths[sequence]
    own, holders = stream.starts[sequence] - prefix, stream.starts[stream.holders[sequence]]
    return sequence, position, position >= prefix, np.where(position >= prefix, own, holders) + position


def pack_sequences(
    lengths: Tensor,
    context=None,
    tensor_ranks: int = 1,
    routing: Routing | None = None,
    shared: SharedPrefix | None = None,
    window: int | None = None,
    plan: Callable[[Segments, bool, int | None], HostPlan] = plan_attention,
    taps: int | None = None,
) -> PackedLayout:
    """Returns this rank's layout of sequences of these lengths [N] int64, each at least 1.

    Args:
        lengths: on the host, so that planning reads nothing from the device.
        context: the context-parallel group of c ranks; None: one rank.
        tensor_ranks: the t ranks over which sequence parallelism splits the stream; 1 without it.
        routing: routes of this micro-batch.
        shared: which sequences share a prefix.
        window: tokens that a token sees in layers with a window; None: no layer has one.
        plan: the attention backend's `plan_attention`.
        taps: rows that the convolutions of a model with recurrent states read; None: a model without.

    The stream is padded to a multiple of 2·c·t tokens (t for c = 1), and for c > 1 to at least `MIN_ROWS` per rank.
    """
    ranks, lengths = 1 if context is None else dist.get_world_size(context), lengths.numpy()
    stream = TokenStream.of(lengths, shared, lambda tokens: _padded_size(tokens, ranks, tensor_ranks))
    count = len(lengths)
    total, tokens = int(stream.ends[-1]), int(stream.ends[count - 1])
    longest = max(int(lengths.max()), total - tokens)
    chunks = chunks_of(dist.get_rank(context) if ranks > 1 else 0, ranks, total)
    segments, indices = segments_of_stream(stream, chunks), chunk_indices(chunks)
    window = None if window is None or segments.keys.max() <= window else window  # a longer one hides nothing
    plans = [plan(segments, ranks == 1, w) for w in ([None] if window is None else [None, window])]
    arrays = {
        "token_indices": indices,
        "positions": stream.positions()[indices],
        "first": stream.starts[:count],
        "last": stream.ends[:count] - 1,
    }
    if ranks > 1:
        arrays["order"] = stream_order(ranks, total)
    if shared is not None:
        arrays["held"], arrays["source"] = _shared_token_indices(lengths, stream)
    sent = iter(device.to_device([*arrays.values(), *itertools.chain(*(planned for planned, _ in plans))]))
    named = dict(zip(arrays, sent, strict=False))
    attention = [build(list(itertools.islice(sent, len(planned)))) for planned, build in plans]
    return PackedLayout(
        qkv_format="thd",  # cumulative lengths stay None: rotary embeddings are applied by position
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        cp_group=context,
        attention=(attention[0], attention[-1]),
        **named,
        host_token_indices=indices,
        host_held=arrays.get("held"),
        tokens=tokens,
        padding=total - tokens,
        routing=routing,
        runs=runs_of_stream(stream, taps) if taps else None,
    )


def runs_of_stream(stream: TokenStream, taps: int) -> Runs:
    """The runs of a packed stream: one of each sequence, and several of one that holds a prefix for others, whose state
    has a number of its own. `taps`: rows that a convolution reads."""
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
