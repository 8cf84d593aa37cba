"""The attention backend of exact rollouts, run by Triton's interpreter: one kernel everywhere, and its gradient."""

import pytest
import torch

from megarl.batch import SharedPrefix
from megarl.mcore.attention.backends import invariant
from megarl.mcore.attention.packing import pack_sequences
from tests.helpers.models import interpreted_kernels
from tests.helpers.models.attention_inputs import PagedRequests, exact_attention, random_heads
from tests.helpers.tiers import long

HEADS, GROUPS, BLOCK, SCALE = 4, 2, 16, 0.3
REQUESTS = [(1, 33), (7, 7), (1, 5), (5, 70)]  # new tokens, keys in all
WINDOWS = [None, 5, long(40)]


@pytest.fixture(autouse=True)
def rows_alone(monkeypatch):
    interpreted_kernels.multiply_rows_alone(monkeypatch)


def packed(query, key, value, lengths: list[int], window=None, shared=None):
    """Attention [T, H, D] of a packed stream, as a training forward computes it."""
    layout = pack_sequences(torch.tensor(lengths), shared=shared, window=window, plan=invariant.plan_attention)
    return invariant.packed_attention(query, key, value, layout.attention[-1], SCALE)


@pytest.mark.parametrize("window", WINDOWS)
def test_a_token_has_the_same_bits_decoded_prefilled_and_packed(window):
    cases = PagedRequests(REQUESTS, BLOCK, HEADS, GROUPS, seed=3)
    found = cases.attend(3, SCALE, window, backend=invariant)
    tokens = sum(new for new, _ in REQUESTS)
    torch.testing.assert_close(found[:tokens].double(), cases.expected(scale=SCALE, window=window), rtol=0, atol=1e-5)
    earlier = [random_heads(keys - new, HEADS, torch.float32, 7) for new, keys in REQUESTS]
    stream = torch.cat([torch.cat(pair) for pair in zip(earlier, cases.query, strict=True)])
    whole = packed(stream, torch.cat(cases.keys), torch.cat(cases.values), [keys for _, keys in REQUESTS], window)
    ends = torch.tensor([keys for _, keys in REQUESTS]).cumsum(0).tolist()
    rows = torch.cat([whole[end - new : end] for (new, _), end in zip(REQUESTS, ends, strict=True)])
    assert torch.equal(rows, found[:tokens])
    alone = PagedRequests(REQUESTS[:1], BLOCK, HEADS, GROUPS, seed=3).attend(0, SCALE, window, backend=invariant)
    assert torch.equal(alone, found[:1])


def of_cuda(
    grad, query, key, value, out, log_sums, cu_queries, cu_keys, max_queries, max_keys, dropout, is_causal,
    random, unused, *, scale=None, window_size_left=None, window_size_right=None,
):  # fmt: skip
    """Stands in for flash attention's backward (2307.08691 algorithm 2) in float64, from outputs and log-sums."""
    assert is_causal and not dropout and not window_size_right and out.shape == query.shape
    grads = [torch.zeros_like(x, dtype=torch.float64) for x in (query, key, value)]
    each = query.shape[1] // key.shape[1]
    for a, b, c, d in zip(cu_queries[:-1], cu_queries[1:], cu_keys[:-1], cu_keys[1:], strict=True):
        q, o, do = (x[a:b].double() for x in (query, out, grad))
        k, v = (x[c:d].double().repeat_interleave(each, 1) for x in (key, value))
        distance = torch.arange(len(q)).unsqueeze(1) + len(k) - len(q) - torch.arange(len(k))
        seen = (distance >= 0) & ((distance <= window_size_left) | (window_size_left < 0))
        assert len(q) <= max_queries and len(k) <= max_keys
        scores = torch.einsum("qhd,khd->hqk", q, k) * scale
        weights = (scores - log_sums[:, a:b, None].double()).exp().masked_fill(~seen, 0.0)
        inner = torch.einsum("qhd,khd->hqk", do, v) - (do * o).sum(-1).t().unsqueeze(-1)
        of_scores = weights * inner * scale
        grads[0][a:b] += torch.einsum("hqk,khd->qhd", of_scores, k)
        grads[1][c:d] += torch.einsum("hqk,qhd->khd", of_scores, q).unflatten(1, (-1, each)).sum(2)
        grads[2][c:d] += torch.einsum("hqk,qhd->khd", weights, do).unflatten(1, (-1, each)).sum(2)
    return tuple(g.to(x.dtype) for g, x in zip(grads, (query, key, value), strict=True))


@pytest.fixture
def flash_backward():
    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_backward", of_cuda, "CPU")
    yield
    library._destroy()


@pytest.mark.usefixtures("flash_backward")
@pytest.mark.parametrize("window", WINDOWS)
def test_gradients_are_those_of_each_sequence_alone(window):
    """Keys of a prefix that two sequences share get the gradients of both."""
    lengths, prefix = [70, 9, 12], 8  # the last sequence begins like the first one
    shared = SharedPrefix(torch.tensor([0, 1, 0]), torch.tensor([0, 0, prefix]))
    total = sum(lengths) - prefix
    leaves = [random_heads(total, heads, torch.float32, i).requires_grad_() for i, heads in enumerate((4, 2, 2))]
    held = [torch.arange(0, 70), torch.arange(70, 79), torch.cat([torch.arange(prefix), torch.arange(79, 83)])]
    out = packed(*leaves, lengths, window, shared)
    parts = [exact_attention(*(x[rows] for x in leaves), SCALE, window) for rows in held]
    expected = torch.cat([parts[0], parts[1], parts[2][prefix:]])
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-5)
    grads = [torch.autograd.grad((x * x.detach().cos()).sum(), leaves) for x in (out, expected)]
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-5)
