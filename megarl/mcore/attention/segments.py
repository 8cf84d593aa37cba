"""Pieces of sequences that attention kernels for dense tensors take: which queries meet which keys, from lengths.

What a rank holds of a sequence is a piece: q consecutive queries whose keys are the k tokens from the sequence's start
to the last query. A kernel takes pieces of similar size together, padded to the longest of them. Where sequences begin
alike and one holds that beginning for the others (`megarl.batch.SharedPrefix`), their keys are found there.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from megarl.batch import SharedPrefix
from megarl.mcore import device
from megarl.mcore.kernels.batch_invariance import MIN_ROWS, VECTOR


def padded_key_count(longest: int, device: torch.device) -> int:
    """Keys of a padded attention row for sequences of at most `longest` tokens."""
    return -(-longest // VECTOR) * VECTOR if device.type == "cpu" else longest


@dataclass(frozen=True)
class SegmentBatch:
    """Pieces that one call of a dense attention kernel takes: n pieces, at most Q queries and K keys each."""

    queries: Tensor  # [n, Q] int64 places among this rank's tokens; padding repeats the last query
    keys: Tensor  # [n, K] int64 places in the stream; padding repeats the last key
    mask: Tensor | None  # [n, 1, Q, K] bool, True where seen; None: causal, the i-th query sees keys 0 … i
    real: Tensor  # [m] int64 places in [n·Q] of the queries that are no padding

    @classmethod
    def of(cls, queries: Tensor, keys: Tensor, real: Tensor, last_seen: Tensor | None = None) -> "SegmentBatch":
        """From what `plan_pieces` planned, sent to the device."""
        if last_seen is None:
            return cls(queries, keys, None, real)
        column = torch.arange(keys.shape[1], device=keys.device)
        return cls(queries, keys, (column <= last_seen.unsqueeze(2)).unsqueeze(1), real)


def size_buckets(longest: int) -> list[int]:
    """Upper limits of classes of piece sizes, so that padding within a class is at most half of the real."""
    widths, width = [], VECTOR
    while width < longest:
        widths.append(width)
        width = max(width + VECTOR, (width * 3 // 2) // VECTOR * VECTOR)
    return [*widths, width]


def group_by_size(is_causal: np.ndarray, queries: np.ndarray, keys: np.ndarray) -> Iterator[tuple[bool, np.ndarray]]:
    """(Whether they are causal, which of the n pieces) of those that one call of a kernel takes: of similar sizes.

    `is_causal` [n]: pieces with as many queries as keys, once padded; others go by numbers of queries [n], too.
    """
    widths = size_buckets(int(keys.max()))
    kinds = np.stack([is_causal, *(np.searchsorted(widths, x) for x in (queries * ~is_causal, keys))], axis=1)
    for kind in np.unique(kinds, axis=0):
        yield bool(kind[0]), np.flatnonzero((kinds == kind).all(1))


def plan_segments(first, queries, keys, is_causal: bool, key_places: Callable) -> list[np.ndarray]:
    """What `SegmentBatch.of` takes, on the host: queries [n, Q], keys [n, K] and real [m] of `SegmentBatch`, and, if not causal,
    the last key [n, Q] that each query sees.

    Args:
        first, queries, keys: [n] place of the first query, numbers of queries and keys.
        key_places: from the numbers [n, K] of keys in their pieces to their places.
    """
    wide_q, wide_k = int(queries.max()), padded_key_count(int(keys.max()), device.device())
    wide_q = wide_k if is_causal else -(-wide_q // MIN_ROWS) * MIN_ROWS
    row = np.minimum(np.arange(wide_q), queries[:, None] - 1)
    column = np.minimum(np.arange(wide_k), keys[:, None] - 1)
    real = np.flatnonzero(np.arange(wide_q) < queries[:, None])
    found = [first[:, None] + row, key_places(column), real]
    # Padded queries see what the last real one sees: a row without a key would be NaN.
    return found if is_causal else [*found, (keys - queries)[:, None] + row]


class TokenStream(NamedTuple):
    """What each sequence holds of the stream, [start, end), and the beginning that it shares with its owner; all [N].

    Padding is one more sequence, behind the others.
    """

    starts: np.ndarray
    ends: np.ndarray
    holders: np.ndarray
    shared: np.ndarray

    @classmethod
    def of(cls, lengths: np.ndarray, shared: SharedPrefix | None, padded: Callable[[int], int]) -> "TokenStream":
        """Of sequences of these lengths [N]; `padded`: from tokens to those of the stream with its padding."""
        holders, begins = np.arange(len(lengths)), np.zeros(len(lengths), np.int64)
        if shared is not None:
            holders, begins = shared.holders.numpy(), shared.tokens.numpy()
        held = lengths - begins
        padding = padded(int(held.sum())) - int(held.sum())
        if padding:
            held, holders, begins = (np.append(x, more) for x, more in ((held, padding), (holders, 0), (begins, 0)))
        ends = held.cumsum()
        return cls(ends - held, ends, holders, begins)

    def positions(self) -> np.ndarray:
        """[stream] of its tokens in their sequences."""
        return np.arange(self.ends[-1]) - np.repeat(self.starts - self.shared, self.ends - self.starts)


class Segments(NamedTuple):
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


def segments_of_stream(stream: TokenStream, chunks: list[tuple[int, int]]) -> Segments:
    """Pieces within chunks of what sequences hold."""
    found, held, owner = [], 0, stream.starts[stream.holders]
    for a, b in chunks:
        first, last = stream.starts.clip(min=a), stream.ends.clip(max=b)
        keys, here = stream.shared + last - stream.starts, first < last
        columns = (held + first - a, last - first, keys, stream.starts, stream.shared, owner)
        found.append([column[here] for column in columns])
        held += b - a
    return Segments(*map(np.concatenate, zip(*found, strict=True)))


def plan_segment_batches(cut: Segments, is_whole: bool) -> list[list[np.ndarray]]:
    """Plans of pieces of similar sizes together. `is_whole`: queries stand as keys do, no sequence is cut.

    Where more than half of a sequence is queries, those of a beginning that another one holds are there again, and
    dropped: causal kernels are the faster ones. Where less is, a mask costs less than such queries.
    """
    is_square, found = is_whole & (2 * cut.queries > cut.keys), []
    for is_causal, members in group_by_size(is_square, cut.queries, cut.keys):
        piece = Segments(*(x[members] for x in cut))
        if not is_causal:
            found.append(plan_segments(*piece[:3], False, piece.key_places))
            continue
        _, keys, real = plan_segments(piece.first, piece.keys, piece.keys, True, piece.key_places)
        found.append([keys, keys, real[real % keys.shape[1] >= piece.shared[real // keys.shape[1]]]])
    return found
