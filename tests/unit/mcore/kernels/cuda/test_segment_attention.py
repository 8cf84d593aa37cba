"""Paged decode of CUDA devices, run by Triton's interpreter: against float64, and without a look at the neighbours."""

import pytest
import torch

from megarl.mcore.kernels.cuda.segment_attention import SPLIT_KEYS, packed_attention, paged_decode
from tests.helpers.models import interpreted_kernels, reference_kernels
from tests.helpers.tiers import long

SHAPES = {  # (G, R, D, block), keys of each request
    "groups": ((2, 4, 32, 16), (5, 33, SPLIT_KEYS + 70)),
    "odd heads and channels": ((1, 7, 80, 16), (0, 1, SPLIT_KEYS, SPLIT_KEYS + 1)),
    "a head of its own": ((3, 1, 16, 64), (64, 65)),
    "three parts": ((1, 2, 16, 64), (SPLIT_KEYS, 2 * SPLIT_KEYS + 5)),
}
WINDOWS = [None, 100, long(700)]


def nobody(query) -> torch.Tensor:
    """The count of parts that are there, before a call and after it."""
    return torch.zeros(query.shape[0] * query.shape[1], dtype=torch.int32)


def inputs(shape: str, dtype=torch.float32):
    """(query, cache, table, lengths) with pages in no order; unused rows of the cache are NaN."""
    (groups, heads, channels, block), lengths = SHAPES[shape]
    generator = torch.Generator().manual_seed(len(shape))
    pages = max(lengths) // block + 2
    query = torch.randn(len(lengths), groups, heads, channels, generator=generator).to(dtype)
    cache = torch.full((pages * len(lengths) + 1, block, groups, 2, channels), torch.nan, dtype=dtype)
    table = torch.randperm(len(cache) - 1, generator=generator)[: pages * len(lengths)].view(len(lengths), pages).int()
    for row, length in enumerate(lengths):
        for position in range(length):
            place = cache[table[row, position // block], position % block]
            place.copy_(torch.randn(place.shape, generator=generator))
    return query, cache, table, torch.tensor(lengths, dtype=torch.int32)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("shape", SHAPES)
def test_it_attends_as_in_float64_whatever_else_is_in_the_batch(shape, window):
    query, cache, table, lengths = inputs(shape)
    case = {"window": window, "arrived": nobody(query)}
    found = paged_decode(query, cache, table, lengths, 0.3, **case)
    expected = reference_kernels.paged_decode(query.double(), cache.nan_to_num().double(), table, lengths, 0.3, **case)
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-5)
    assert not case["arrived"].any()
    last = slice(len(lengths) - 1, None)
    assert torch.equal(paged_decode(query[last], cache, table[last], lengths[last], 0.3, **case), found[last])


def test_in_16_bits_weights_and_results_are_rounded():
    query, cache, table, lengths = inputs("groups", torch.float16)  # the interpreter multiplies no bf16
    found = paged_decode(query, cache, table, lengths, 0.3, arrived=nobody(query))
    expected = reference_kernels.paged_decode(query.double(), cache.nan_to_num().double(), table, lengths, 0.3)
    assert found.dtype is torch.float16
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=2**-8)


def test_queries_may_be_views():
    query, cache, table, lengths = inputs("groups")
    wide = torch.cat([query, query], dim=2)
    views, own = (paged_decode(x, cache, table, lengths, 0.3, arrived=nobody(x)) for x in (wide[:, :, :4], query))
    assert torch.equal(views, own)


@pytest.fixture
def rows_alone(monkeypatch):
    interpreted_kernels.multiply_rows_alone(monkeypatch)


@pytest.mark.usefixtures("rows_alone")
@pytest.mark.parametrize("window", WINDOWS)
def test_a_decoded_token_has_the_bits_of_the_same_token_in_a_packed_sequence(window):
    """Segments with fewer queries than keys, one of them cut in the middle of its queries; rows in no order."""
    query, cache, table, lengths = inputs("groups")
    case, block = {"window": window}, cache.shape[1]
    rows, segments, queries, first = [], [], [], 0
    for row, length in enumerate(lengths.tolist()):
        positions = torch.arange(length)
        rows.append(table[row, positions // block].long() * block + positions % block)
        count = min(length, 11)
        segments.append((first, count, length, sum(map(len, rows[:-1]))))
        generator = torch.Generator().manual_seed(row)
        own = torch.randn(count, query.shape[1] * query.shape[2], query.shape[3], generator=generator)
        own[-1] = query[row].flatten(0, 1)
        queries.append(own)
        first += count
    key, value = cache.flatten(0, 1).unbind(2)
    columns = torch.tensor(segments, dtype=torch.int32).t().contiguous()
    out, log_sums = packed_attention(
        torch.cat(queries), key, value, torch.cat(rows).int(), columns, 11, 0.3, **case,
    )  # fmt: skip
    decoded = paged_decode(query, cache, table, lengths, 0.3, **case)
    last = [start + count - 1 for start, count, *_ in segments]
    assert torch.equal(out[last].view(query.shape), decoded)
    for (start, count, length, offset), own in zip(segments, queries, strict=True):
        keys = torch.cat(rows)[offset : offset + length]
        grouped = own.unflatten(1, query.shape[1:3])
        for number in range(count):
            seen = torch.tensor([length - count + number + 1], dtype=torch.int32)
            page = cache.flatten(0, 1)[keys].unsqueeze(0).nan_to_num()
            exact = reference_kernels.paged_decode(
                grouped[number : number + 1].double(), page.double(), torch.zeros(1, 1), seen, 0.3, **case
            )
            torch.testing.assert_close(out[start + number].double(), exact[0].flatten(0, 1), rtol=0, atol=1e-5)
    assert log_sums.isfinite().all()
