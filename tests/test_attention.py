"""Packed and paged attention against a softmax written out for each sequence alone."""

import random
from types import SimpleNamespace

import pytest
import torch
from megatron.core.transformer import TransformerConfig

from megarl.mcore.attention import PackedAttention, PagedSelfAttention, paged_attention
from megarl.mcore.packing import pack

D = 8  # channels of a head


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


def packed_attention(scale=None):
    config = TransformerConfig(num_layers=1, hidden_size=32, num_attention_heads=4)
    groups = SimpleNamespace(tp=None, cp=None)
    return PackedAttention(config, 1, None, "self", softmax_scale=scale, pg_collection=groups)


def random_heads(total, heads, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    return 0.5 * torch.randn(total, heads, D, generator=generator, dtype=torch.float64).to(dtype)


LENGTHS = [[1], [7], [1, 1, 1], [5, 1, 9, 2], [3, 12, 1, 12], [33, 2]]
TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-12}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("heads, groups", [(4, 4), (4, 2), (4, 1)])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_packed_is_each_sequence_alone(lengths, heads, groups, dtype):
    total = sum(lengths)
    inputs = [random_heads(total, h, dtype, i).requires_grad_() for i, h in enumerate((heads, groups, groups))]
    weight = random_heads(total, heads, dtype, 3)
    packed = packed_attention()(*inputs, None, packed_seq_params=pack(torch.tensor(lengths)))
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
    packed = packed_attention(scale=0.7)(*inputs, None, packed_seq_params=pack(torch.tensor(lengths)))
    parts = zip(*(x.split(lengths) for x in inputs), strict=True)
    expected = torch.cat([naive(*part, scale=0.7) for part in parts])
    assert (packed.view_as(expected) - expected).abs().max() <= 1e-12


def test_a_sequence_does_not_see_its_neighbours():
    inputs = [random_heads(9, h, torch.float32, i) for i, h in enumerate((4, 2, 2))]
    params = pack(torch.tensor([4, 5]))
    first = packed_attention()(*inputs, None, packed_seq_params=params)
    for x in inputs:
        x[4:] = float("nan")
    second = packed_attention()(*inputs, None, packed_seq_params=params)
    assert torch.equal(first[:4], second[:4])


class _Cache:
    """Requests in a block cache with randomly chosen blocks; rows that hold no key are NaN, as stale memory may be."""

    def __init__(self, requests, block, heads, groups, seed, dtype=torch.float32):
        """requests: (new tokens, keys in all) of each; new ones are the last of the keys."""
        draw = random.Random(seed)
        pages = [-(-keys // block) for _, keys in requests]
        total = sum(pages) + 3
        free = draw.sample(range(total), total)
        self.query = [random_heads(new, heads, dtype, seed + 10 * i) for i, (new, _) in enumerate(requests)]
        self.keys = [random_heads(keys, groups, dtype, seed + 10 * i + 1) for i, (_, keys) in enumerate(requests)]
        self.values = [random_heads(keys, groups, dtype, seed + 10 * i + 2) for i, (_, keys) in enumerate(requests)]
        self.table = torch.full((len(requests), max(pages) + 2), -1, dtype=torch.int32)
        self.key_cache = torch.full((total, block, groups, D), float("nan"), dtype=dtype)
        self.value_cache = self.key_cache.clone()
        for i, (_, keys) in enumerate(requests):
            for page in range(pages[i]):
                place = free.pop()
                self.table[i, page] = place
                rows = slice(page * block, min(keys, (page + 1) * block))
                self.key_cache[place, : rows.stop - rows.start] = self.keys[i][rows]
                self.value_cache[place, : rows.stop - rows.start] = self.values[i][rows]
        lengths = torch.tensor([[new, keys] for new, keys in requests], dtype=torch.int32)
        self.cu_query = torch.cat([lengths.new_zeros(1), lengths[:, 0].cumsum(0)]).int()
        self.lengths = lengths[:, 1]
        self.widest, self.longest = int(lengths[:, 0].max()), int(lengths[:, 1].max())

    def attend(self, padding=0, scale=None):
        query = torch.cat([*self.query, self.query[0].new_full((padding, *self.query[0].shape[1:]), 5.0)])
        return paged_attention(query, self.key_cache, self.value_cache, self.cu_query, self.lengths, self.table,
                               self.widest, self.longest, scale)  # fmt: skip

    def expected(self, scale=None):
        parts = zip(self.query, self.keys, self.values, strict=True)
        return torch.cat([naive(*part, scale=scale) for part in parts])


MIXES = {
    "decode": [(1, 9), (1, 1), (1, 16), (1, 17)],
    "prefill": [(5, 5), (1, 1), (16, 16), (17, 17)],
    "mixed": [(1, 12), (7, 7), (1, 33), (4, 4)],
    "chunked prefill": [(3, 11), (8, 16), (1, 2)],
    "one": [(1, 1)],
}


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("heads, groups", [(4, 4), (4, 2), (2, 1)])
@pytest.mark.parametrize("block, seed", [(4, 1), (16, 2), (1, 3)])
def test_paged_is_each_request_alone(mix, heads, groups, block, seed):
    cache = _Cache(MIXES[mix], block, heads, groups, seed)
    out = cache.attend(padding=3)
    expected = cache.expected()
    assert (out[: len(expected)] - expected).abs().max() <= 1e-6
    assert torch.equal(out[len(expected) :], torch.zeros(3, heads, D))


def test_paged_in_float64_and_with_a_scale():
    cache = _Cache(MIXES["mixed"], 4, 4, 2, 7, torch.float64)
    assert (cache.attend(scale=0.3) - cache.expected(scale=0.3)).abs().max() <= 1e-12


def test_paged_kernel_stands_in_megatrons_place():
    cache = _Cache(MIXES["mixed"], 4, 4, 2, 5)
    query = torch.cat(cache.query).unsqueeze(1)
    attention = SimpleNamespace(softmax_scale=None, config=SimpleNamespace(softmax_scale=None))
    out = PagedSelfAttention.flash_decode_and_prefill(
        attention, query, cache.key_cache, cache.value_cache, cache.widest, cache.longest, cache.cu_query, None,
        cache.lengths, cache.table, True,
    )  # fmt: skip
    assert out.shape == query.shape
    assert (out.squeeze(1) - cache.expected()).abs().max() <= 1e-6


def test_megatron_hands_the_kernel_what_it_takes():
    import inspect

    from megatron.core.transformer.attention import Attention

    theirs = list(inspect.signature(Attention.flash_decode_and_prefill).parameters)
    ours = [n for n in inspect.signature(PagedSelfAttention.flash_decode_and_prefill).parameters if n not in "__"]
    assert theirs[: len(ours)] == ours
