"""Triton's kernels of chosen keys, interpreted: the sets of the compiled kernels, and attention against float64."""

import pytest
import torch

from megarl.mcore.kernels import native
from megarl.mcore.kernels.cuda.key_choice import attend_lists, choose_key_bits, list_key_rows
from tests.helpers.models.attention_inputs import needs_kernels
from tests.helpers.tiers import by_default

SHAPES = {  # heads, channels (whose roots are powers of 2), keys, count
    "many ties": (3, 16, 300, 8), "heads to fill up": (5, 64, 41, 8), "one key left out": (16, 64, 9, 8),
    "several tiles": (4, 16, 2500, 600),
}  # fmt: skip


def whole_numbers(*shape, generator, largest: int) -> torch.Tensor:
    return torch.randint(-largest, largest + 1, shape, generator=generator).float()


def inputs(heads: int, channels: int, keys: int, count: int):
    """Small whole numbers, of which sums are exact; keys are rows of a wider cache, in any order."""
    generator = torch.Generator().manual_seed(keys)
    cache = whole_numbers(2 * keys, channels + 5, generator=generator, largest=1)[:, 5:]
    rows = torch.randperm(2 * keys, generator=generator)[:keys]
    seen = torch.tensor([keys, count + 1, max(count + 1, keys // 2), keys])
    queries = whole_numbers(4, heads, channels, generator=generator, largest=1)
    weights = whole_numbers(4, heads, generator=generator, largest=2)
    weights[3] = -weights[3].abs()  # whose scores are 0, or −0
    return queries, weights, cache, rows, seen, count


@needs_kernels
@pytest.mark.parametrize("case", by_default(SHAPES, ["many ties", "heads to fill up"]))
def test_the_choice_is_that_of_the_compiled_kernels_in_any_batch(case):
    heads, weights, cache, rows, seen, count = inputs(*SHAPES[case])
    bits = choose_key_bits(heads, weights, cache, rows, seen, count)
    wanted = native.ops.choose_keys(heads, weights, cache, rows, seen, count)
    found, lists = list_key_rows(bits, rows, count), native.ops.chosen_rows(wanted, rows, count)
    assert torch.equal(found.long(), lists)
    for row in range(len(heads)):
        own, keys = slice(row, row + 1), int(seen[row])
        alone = choose_key_bits(heads[own], weights[own], cache, rows[:keys], seen[own], count)
        assert torch.equal(alone[0], bits[row, : alone.shape[1]]) and not bits[row, alone.shape[1] :].any()


def test_scores_that_are_no_numbers_choose_the_same_number_of_keys():
    heads, weights, cache, rows, seen, count = inputs(3, 16, 20, 8)
    weights[0], weights[1, 0], weights[2, 1] = torch.nan, torch.inf, -torch.inf
    for listed in list_key_rows(choose_key_bits(heads, weights, cache, rows, seen, count), rows, count).tolist():
        assert len(set(listed)) == count and set(listed) <= set(rows.tolist())


@pytest.mark.parametrize("shape", [(3, 20, 6, 8), (20, 32, 16, 70)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_attention_over_lists_is_that_of_float64(shape, dtype):
    heads, width, turned, count = shape
    generator = torch.Generator().manual_seed(heads)
    query = torch.randn(5, heads, width + turned, generator=generator).to(dtype)
    cache = torch.randn(100, width + turned + 3, generator=generator).to(dtype)
    latents = cache[:, : width + turned]  # index keys are further columns
    lists = torch.rand(5, 100, generator=generator).topk(count).indices.sort().values.int()
    out, log_sums = attend_lists(query, latents, lists, width, 0.2)
    scores = torch.einsum("nad,nkd->nak", query.double(), latents.double()[lists.long()]) * 0.2
    wanted = torch.einsum("nak,nkd->nad", scores.softmax(-1), latents.double()[lists.long()][..., :width])
    limit = 1e-5 if dtype is torch.float32 else 2**-8
    torch.testing.assert_close(out.double(), wanted, rtol=0, atol=limit)
    torch.testing.assert_close(log_sums.double(), scores.logsumexp(-1), rtol=0, atol=1e-5)
    assert out.dtype is dtype and torch.equal(attend_lists(query[2:3], latents, lists[2:3], width, 0.2)[0], out[2:3])
