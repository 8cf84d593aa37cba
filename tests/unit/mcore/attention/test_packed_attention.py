"""Packed and paged attention against a softmax written out for each sequence alone."""

import random

import pytest
import torch

from megarl.mcore.attention.backends import sdpa
from megarl.mcore.attention.packing import pack_sequences
from tests.helpers.attention_inputs import D, packed_attention, random_heads


def naive(query, key, value, scale=None):
    """One sequence: query [Q, H, D], key and value [K, G, D]; query i sees keys 0 … K − Q + i. In float64."""
    heads, groups = query.shape[1], key.shape[1]
    query, key, value = query.double(), key.double(), value.double()
    out = torch.zeros_like(query)
    for head in range(heads):
        group = head * groups // heads
        for i in range(len(query)):
            seen = len(key) - len(query) + i + 1
            scores = key[:seen, group] @ query[i, head] * (D**-0.5 if scale is None else scale)
            out[i, head] = torch.exp(scores - scores.logsumexp(0)) @ value[:seen, group]
    return out


LENGTHS = [[1], [7], [1, 1, 1], [5, 1, 9, 2], [3, 12, 1, 12], [33, 2]]
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("heads, groups", [(4, 4), (4, 2), (4, 1)])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_packed_attention_equals_each_sequence_alone(lengths, heads, groups, dtype):
    total = sum(lengths)
    inputs = [random_heads(total, h, dtype, i).requires_grad_() for i, h in enumerate((heads, groups, groups))]
    weight = random_heads(total, heads, dtype, 3)
    packed = packed_attention()(*inputs, None, packed_seq_params=pack_sequences(torch.tensor(lengths)))
    assert packed.shape == (total, heads * D) and packed.dtype == dtype
    gradients = torch.autograd.grad((packed.view_as(weight) * weight).sum(), inputs)

    exact = [x.detach().double().requires_grad_() for x in inputs]
    parts = zip(*(x.split(lengths) for x in exact), strict=True)
    expected = torch.cat([naive(*part) for part in parts])
    wanted = torch.autograd.grad((expected * weight.double()).sum(), exact)
    assert (packed.view_as(expected) - expected).abs().max() <= TOLERANCE[dtype]
    for gradient, want in zip(gradients, wanted, strict=True):
        assert (gradient - want).abs().max() <= TOLERANCE[dtype] * max(1.0, float(want.abs().max()))


def test_packed_scale_is_the_one_given():
    lengths = [4, 2]
    inputs = [random_heads(6, h, torch.float64, i) for i, h in enumerate((4, 2, 2))]
    packed = packed_attention(scale=0.7)(*inputs, None, packed_seq_params=pack_sequences(torch.tensor(lengths)))
    parts = zip(*(x.split(lengths) for x in inputs), strict=True)
    expected = torch.cat([naive(*part, scale=0.7) for part in parts])
    assert (packed.view_as(expected) - expected).abs().max() <= 1e-12


def test_a_sequence_does_not_see_its_neighbours():
    inputs = [random_heads(9, h, torch.float32, i) for i, h in enumerate((4, 2, 2))]
    params = pack_sequences(torch.tensor([4, 5]))
    first = packed_attention()(*inputs, None, packed_seq_params=params)
    for x in inputs:
        x[4:] = float("nan")
    second = packed_attention()(*inputs, None, packed_seq_params=params)
    assert torch.equal(first[:4], second[:4])


class _Cache:
    """Requests in a block cache with randomly chosen blocks. Unused rows of their blocks hold other numbers,
    and unused blocks NaN, as reused memory may."""

    def __init__(self, requests, block, heads, groups, seed, dtype=torch.float32):
        """requests: (new tokens, keys in all) of each; new ones are the last of the keys."""
        draw = random.Random(seed)
        counts = [-(-keys // block) for _, keys in requests]
        total = sum(counts) + 4
        free = draw.sample(range(total), total)
        spare = free.pop()
        self.query = [random_heads(new, heads, dtype, seed + 10 * i) for i, (new, _) in enumerate(requests)]
        self.keys = [random_heads(keys, groups, dtype, seed + 10 * i + 1) for i, (_, keys) in enumerate(requests)]
        self.values = [random_heads(keys, groups, dtype, seed + 10 * i + 2) for i, (_, keys) in enumerate(requests)]
        self.pages = torch.full((len(requests), max(counts) + 2), spare)
        self.cache = torch.full((total, block, groups, 2, D), float("nan"), dtype=dtype)
        self.cache[spare] = 7.0
        for i, (_, keys) in enumerate(requests):
            for page in range(counts[i]):
                place = free.pop()
                self.pages[i, page] = place
                rows = slice(page * block, min(keys, (page + 1) * block))
                self.cache[place] = 9.0
                both = torch.stack([self.keys[i][rows], self.values[i][rows]], dim=2)
                self.cache[place, : rows.stop - rows.start] = both
        self.queries, self.lengths = torch.tensor(requests).unbind(1)

    def attend(self, padding=0, scale=None):
        query = torch.cat([*self.query, self.query[0].new_full((padding, *self.query[0].shape[1:]), 5.0)])
        reads = sdpa.plan_cache_reads(self.queries, self.lengths, self.pages, len(query), self.cache)
        grouped = query.unflatten(1, (self.cache.shape[2], -1))
        return sdpa.PagedAttention()(grouped, self.cache, reads, scale).view_as(query)

    def expected(self, scale=None):
        parts = zip(self.query, self.keys, self.values, strict=True)
        return torch.cat([naive(*part, scale=scale) for part in parts])

    def packed(self):
        """The new tokens' rows of the training forward, over whole sequences."""
        parts = []
        for query, key, value in zip(self.query, self.keys, self.values, strict=True):
            whole = torch.cat([query.new_zeros(len(key) - len(query), *query.shape[1:]), query])
            out = packed_attention()(
                whole, key, value, None, packed_seq_params=pack_sequences(torch.tensor([len(key)]))
            )
            parts.append(out[len(key) - len(query) :].view_as(query))
        return torch.cat(parts)


MIXES = {
    "decode": [(1, 9), (1, 1), (1, 16), (1, 17)],
    "prefill": [(5, 5), (1, 1), (16, 16), (17, 17)],
    "mixed": [(1, 12), (7, 7), (1, 33), (4, 4)],
    "chunked prefill": [(3, 11), (8, 16), (1, 2)],
    "one": [(1, 1)],
    "far apart": [(1, 400), (1, 3), (40, 40), (1, 170), (2, 390), (3, 3), (1, 5)],
}


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("heads, groups", [(4, 4), (4, 2), (2, 1)])
@pytest.mark.parametrize("block, seed", [(4, 1), (16, 2), (1, 3)])
def test_paged_attention_equals_each_request_alone(mix, heads, groups, block, seed):
    cache = _Cache(MIXES[mix], block, heads, groups, seed)
    out = cache.attend(padding=3)
    expected = cache.expected()
    assert (out[: len(expected)] - expected).abs().max() <= TOLERANCE[torch.float32]
    assert torch.equal(out[len(expected) :], torch.zeros(3, heads, D))


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("heads, groups", [(4, 4), (4, 2), (4, 1), (6, 2), (6, 1), (8, 1)])
@pytest.mark.parametrize("scratch", [1, 2**15, sdpa.SCRATCH_BYTES])
def test_paged_has_the_bits_of_the_training_forward(mix, heads, groups, scratch, monkeypatch):
    """For any number of query heads a group, and wherever requests are cut into calls."""
    monkeypatch.setattr(sdpa, "SCRATCH_BYTES", scratch)
    cache = _Cache(MIXES[mix], 16, heads, groups, 4)
    assert torch.equal(cache.attend(), cache.packed())


def test_scratch_bounds_what_is_gathered(monkeypatch):
    monkeypatch.setattr(sdpa, "SCRATCH_BYTES", 200 * 2 * 2 * D * 4)  # bytes of 200 keys and values of 2 groups
    cache = _Cache(MIXES["far apart"], 16, 4, 2, 6)
    reads = sdpa.plan_cache_reads(cache.queries, cache.lengths, cache.pages, 48, cache.cache)
    widths = [(len(part.mask), part.mask.shape[-1]) for part in reads.decodes]
    assert widths == [(2, 16), (1, 176), (1, 400)]  # the short ones together, the longest alone
    assert sorted(tuple(pieces.keys.shape) for pieces in reads.prefills) == [(1, 16), (1, 48), (1, 400)]


def test_paged_in_float64_and_with_a_scale():
    cache = _Cache(MIXES["mixed"], 4, 4, 2, 7, torch.float64)
    assert (cache.attend(scale=0.3) - cache.expected(scale=0.3)).abs().max() <= 1e-12
