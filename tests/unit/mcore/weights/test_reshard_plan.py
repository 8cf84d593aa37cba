"""The plan of a weight transfer: pieces of a copy that is too large for one message."""

import itertools
import math

import pytest

from megarl.mcore.weights.reshard_plan import ShardCopy, split_copy


@pytest.mark.parametrize("limit", [1, 5, 7, 12, 30, 1000])
@pytest.mark.parametrize("offset, shape", [((3,), (11,)), ((2, 5), (4, 6)), ((0, 7), (1, 20)), ((4, 0, 2), (3, 1, 5))])
def test_pieces_cover_a_copy_once_and_stay_below_the_limit(offset, shape, limit):
    whole = ShardCopy(0, 1, None, None, offset, shape)
    pieces = split_copy(whole, limit)
    places = [
        place
        for piece in pieces
        for place in itertools.product(*(range(o, o + n) for o, n in zip(piece.offset, piece.shape, strict=True)))
    ]
    assert sorted(places) == list(itertools.product(*(range(o, o + n) for o, n in zip(offset, shape, strict=True))))
    assert all(math.prod(piece.shape) <= limit for piece in pieces)
    assert all(piece._replace(offset=offset, shape=shape) == whole for piece in pieces)
