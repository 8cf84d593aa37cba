"""Paged attention by PyTorch's SDPA: each request alone, the bits of training, bounded memory."""

import pytest
import torch

from megarl.mcore.attention.backends import sdpa
from tests.helpers.models.attention_inputs import D, PagedRequests

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}


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
    cache = PagedRequests(MIXES[mix], block, heads, groups, seed)
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
    cache = PagedRequests(MIXES[mix], 16, heads, groups, 4)
    assert torch.equal(cache.attend(), cache.packed())


def test_scratch_bounds_what_is_gathered(monkeypatch):
    monkeypatch.setattr(sdpa, "SCRATCH_BYTES", 200 * 2 * 2 * D * 4)  # bytes of 200 keys and values of 2 groups
    cache = PagedRequests(MIXES["far apart"], 16, 4, 2, 6)
    reads = sdpa.plan_cache_reads(cache.requests())
    widths = [(len(part.mask), part.mask.shape[-1]) for part in reads.decodes]
    assert widths == [(2, 16), (1, 176), (1, 400)]  # the short ones together, the longest alone
    assert sorted(tuple(pieces.keys.shape) for pieces in reads.prefills) == [(1, 16), (1, 48), (1, 400)]


def test_paged_in_float64_and_with_a_scale():
    cache = PagedRequests(MIXES["mixed"], 4, 4, 2, 7, torch.float64)
    assert (cache.attend(scale=0.3) - cache.expected(scale=0.3)).abs().max() <= 1e-12
