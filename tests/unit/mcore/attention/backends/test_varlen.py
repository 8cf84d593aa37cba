"""The attention backend of CUDA devices: its plans are those of the CPU's, and its decode kernel runs interpreted."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.batch import SharedPrefix
from megarl.mcore.attention import segments
from megarl.mcore.attention.backends import varlen
from megarl.mcore.attention.segments import TokenStream, segments_of_stream
from megarl.mcore.parallel.context_parallel import chunks_of
from tests.helpers.models import reference_kernels
from tests.helpers.models.attention_inputs import PagedRequests
from tests.helpers.worlds import run_world


@st.composite
def layouts(draw):
    """(segments of a rank, whether it holds the whole stream): ragged sequences, shared prefixes, context ranks."""
    lengths = np.array(draw(st.lists(st.integers(1, 70), min_size=1, max_size=8)))
    holders, shared = np.arange(len(lengths)), np.zeros(len(lengths), np.int64)
    for i in range(1, len(lengths)):
        if draw(st.booleans()):
            holders[i] = holders[i - 1]
            shared[i] = draw(st.integers(0, min(lengths[i], lengths[holders[i]]) - 1))
    prefix = SharedPrefix(torch.from_numpy(holders), torch.from_numpy(shared)) if shared.any() else None
    ranks = draw(st.integers(1, 3))
    unit = 2 * ranks if ranks > 1 else 1
    stream = TokenStream.of(lengths, prefix, lambda tokens: -(-max(tokens, 4 * ranks) // unit) * unit)
    chunks = chunks_of(draw(st.integers(0, ranks - 1)), ranks, int(stream.ends[-1]))
    return segments_of_stream(stream, chunks), ranks == 1


def seen_by_pieces(plan, window) -> dict[int, list[int]]:
    """Query -> its keys, of the plan for the CPU."""
    found = {}
    for piece in plan.batches:
        width = piece.queries.shape[1]
        for place in piece.real_queries.tolist():
            row, column = divmod(place, width)
            mask = torch.ones(width, piece.keys.shape[1], dtype=torch.bool).tril()[column]
            mask = mask if piece.mask is None else piece.mask[row, 0, column]
            found[int(piece.queries[row, column])] = piece.keys[row][mask].tolist()
    return found


def seen_by_cumulative(plan, tokens: int) -> dict[int, list[int]]:
    found = {}
    for i in range(len(plan.cu_queries) - 1):
        queries, keys = range(*plan.cu_queries[i : i + 2].tolist()), range(*plan.cu_keys[i : i + 2].tolist())
        assert len(queries) <= plan.max_queries and len(keys) <= plan.max_keys
        for number, query in enumerate(queries):
            last = len(keys) - len(queries) + number + 1
            first = 0 if plan.window is None else max(0, last - plan.window)
            rows = keys[first:last]
            found[query] = [row if plan.rows is None else int(plan.rows[row]) for row in rows]
    return found


@settings(max_examples=80)
@given(layouts(), st.none() | st.integers(1, 40))
def test_each_query_sees_the_keys_of_the_plan_for_a_cpu(layout, window):
    parts, is_whole = layout
    sent = [
        build([torch.from_numpy(x) for x in arrays])
        for arrays, build in (module.plan_attention(parts, is_whole, window) for module in (segments, varlen))
    ]
    tokens = int(parts.queries.sum())
    assert seen_by_cumulative(sent[1], tokens) == seen_by_pieces(sent[0], window)


def paged(rank, requests, window, padding):
    varlen.flash_kernel = lambda: reference_kernels.flash
    cases = PagedRequests(requests, 16, 4, 2, seed=len(requests))
    found = cases.attend(padding, 0.3, window, backend=varlen)
    tokens = sum(new for new, _ in requests)
    assert not found[tokens:].any()
    return float((found[:tokens] - cases.expected(scale=0.3, window=window)).abs().max())


@pytest.mark.parametrize("window", [None, 5, 40])
@pytest.mark.parametrize(
    "requests, padding",
    [([(1, 1), (1, 16), (1, 17), (1, 90)], 0), ([(1, 33), (7, 7), (1, 5), (20, 61)], 3), ([(9, 9)], 1)],
    ids=["decodes", "both", "a prompt"],
)
def test_requests_attend_to_their_pages(requests, padding, window):
    (apart,) = run_world(paged, 1, requests, window, padding)
    assert apart < 1e-5
