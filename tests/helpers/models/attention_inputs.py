"""Packed attention of one layer, and random queries, keys and values for it, packed or in a block cache."""

import importlib
import math
import random
from types import SimpleNamespace

import pytest
import torch
from megatron.core.transformer import TransformerConfig

from megarl.mcore.attention.backends import PackedAttention, sdpa
from megarl.mcore.attention.cache_attention import StepRequests
from megarl.mcore.attention.packing import pack_sequences
from megarl.mcore.kernels import native

D = 8  # channels of a head
needs_kernels = pytest.mark.skipif(not native.is_built(), reason="no compiled kernels: no C++ compiler, or CUDA")


def module_of(backend: str):
    """The module of a backend, or the compiled kernels ("native")."""
    name = "native_attention" if backend == "native" else f"backends.{backend}"
    return importlib.import_module(f"megarl.mcore.attention.{name}")


def packed_attention(scale=None, backend="sdpa", window=None, softcap=None, sinks=None):
    """The attention of one layer with 4 heads, by that backend; a token sees `window` tokens; sinks [H]."""
    size = None if window is None else (window - 1, 0)
    config = TransformerConfig(num_layers=1, hidden_size=32, num_attention_heads=4, window_size=size)
    config.attention_kernel = "sdpa"
    groups = SimpleNamespace(tp=None, cp=None)
    attention = PackedAttention(config, 1, None, "self", softmax_scale=scale, pg_collection=groups)
    attention.backend = module_of(backend)
    attention.options = score_options(softcap, sinks)
    return attention


def score_options(softcap=None, sinks=None) -> dict:
    """Those of `ScoredAttention`; none without softcap and sinks."""
    return {} if softcap is None and sinks is None else {"softcap": softcap, "sinks": sinks}


def random_heads(total, heads, dtype, seed):
    """[total, heads, D] random numbers."""
    generator = torch.Generator().manual_seed(seed)
    return 0.5 * torch.randn(total, heads, D, generator=generator, dtype=torch.float64).to(dtype)


def exact_attention(query, key, value, scale=None, window=None, softcap=None, sinks=None):
    """One sequence in float64: query [Q, H, D], key and value [K, G, D]; query i sees keys 0 … K − Q + i, the last
    `window` of them; scores are capped; sinks [H] are scores of one more key without a value."""
    heads, groups = query.shape[1], key.shape[1]
    query, key, value = query.double(), key.double(), value.double()
    key, value = (x.repeat_interleave(heads // groups, dim=1) for x in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) * (D**-0.5 if scale is None else scale)
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    distance = torch.arange(len(query)).unsqueeze(1) + len(key) - len(query) - torch.arange(len(key))
    seen = (distance >= 0) & (distance < (math.inf if window is None else window))
    scores = scores.masked_fill(~seen, -math.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()[:, None, None].expand(-1, len(query), 1)], dim=-1)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., : len(key)], value)


def assert_as_each_sequence_alone(
    lengths, heads=4, groups=2, dtype=torch.float64, tolerance=1e-12, scale=None, backend="sdpa", window=None,
    softcap=None, sinks=None,
):  # fmt: skip
    """Output and gradients of a packed micro-batch are those of its sequences alone, in float64, which it returns."""
    total = sum(lengths)
    trained = [random_heads(total, n, dtype, i).requires_grad_() for i, n in enumerate((heads, groups, groups))]
    trained += [] if sinks is None else [sinks.to(dtype, copy=True).requires_grad_()]
    weight, layout = random_heads(total, heads, dtype, 3), pack_sequences(torch.tensor(lengths), window=window)
    attend = packed_attention(scale, backend, window, softcap, *trained[3:])
    packed = attend(*trained[:3], None, packed_seq_params=layout)
    assert packed.shape == (total, heads * D) and packed.dtype == dtype
    gradients = torch.autograd.grad((packed.view_as(weight) * weight).sum(), trained)
    exact = [x.detach().double().requires_grad_() for x in trained]
    parts = zip(*(x.split(lengths) for x in exact[:3]), strict=True)
    expected = torch.cat([exact_attention(*part, scale, window, softcap, *exact[3:]) for part in parts])
    wanted = torch.autograd.grad((expected * weight.double()).sum(), exact)
    assert (packed.view_as(expected) - expected).abs().max() <= tolerance
    for gradient, want in zip(gradients, wanted, strict=True):
        assert (gradient - want).abs().max() <= tolerance * max(1.0, float(want.abs().max()))
    return wanted


class PagedRequests:
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

    def requests(self, window=None, padding=0) -> StepRequests:
        total = sum(map(len, self.query)) + padding
        return StepRequests(self.queries, self.lengths, self.pages, total, self.cache, window)

    def attend(self, padding=0, scale=None, window=None, backend=sdpa, **options):
        """The new tokens' attention over the cache, and zeros for padding."""
        query = torch.cat([*self.query, self.query[0].new_full((padding, *self.query[0].shape[1:]), 5.0)])
        reads = backend.plan_cache_reads(self.requests(window, padding))
        grouped = query.unflatten(1, (self.cache.shape[2], -1))
        return backend.PagedAttention()(grouped, self.cache, reads, scale, **options).view_as(query)

    def expected(self, **options):
        """The same, each request alone."""
        parts = zip(self.query, self.keys, self.values, strict=True)
        return torch.cat([exact_attention(*part, **options) for part in parts])

    def packed(self, window=None, **options):
        """The new tokens' rows of the training forward, over whole sequences."""
        parts = []
        for query, key, value in zip(self.query, self.keys, self.values, strict=True):
            whole = torch.cat([query.new_zeros(len(key) - len(query), *query.shape[1:]), query])
            layout = pack_sequences(torch.tensor([len(key)]), window=window)
            out = packed_attention(window=window, **options)(whole, key, value, None, packed_seq_params=layout)
            parts.append(out[len(key) - len(query) :].view_as(query))
        return torch.cat(parts)
