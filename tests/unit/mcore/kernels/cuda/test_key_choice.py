"""Triton's kernels of chosen keys, interpreted: the sets of the compiled kernels, and attention against float64."""

import pytest
import torch

from megarl.mcore.kernels import native
from megarl.mcore.kernels.cuda.key_choice import attend_rows, choose_key_bits, list_key_rows
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
    """The last query sees no more keys than it may choose, and takes all."""
    heads, weights, cache, rows, seen, count = inputs(*SHAPES[case])
    wanted = native.ops.choose_keys(heads, weights, cache, rows, seen, count)
    lists = native.ops.chosen_rows(wanted, rows, count)
    few = count - 3
    heads, weights, seen = (torch.cat([x, x[:1]]) for x in (heads, weights, seen))
    seen[4] = few
    moved, first = torch.cat([rows[:5], rows]), torch.full((5,), 5)
    bits = choose_key_bits(heads, weights, cache, moved, first, seen, count, len(rows))
    found = list_key_rows(bits, moved, first, seen, count).long()
    assert torch.equal(found[:4], lists)
    assert torch.equal(found[4], torch.cat([rows[:few], torch.zeros(count - few, dtype=torch.int64)]))
    for row in range(len(heads)):
        own, keys = slice(row, row + 1), int(seen[row])
        alone = choose_key_bits(heads[own], weights[own], cache, rows, first[own] - 5, seen[own], count, keys)
        assert torch.equal(alone[0], bits[row, : alone.shape[1]]) and not bits[row, alone.shape[1] :].any()


def test_scores_that_are_no_numbers_choose_the_same_number_of_keys():
    heads, weights, cache, rows, seen, count = inputs(3, 16, 20, 8)
    weights[0], weights[1, 0], weights[2, 1] = torch.nan, torch.inf, -torch.inf
    of_all = rows, torch.zeros(4, dtype=torch.int64), seen, count
    for listed in list_key_rows(choose_key_bits(heads, weights, cache, *of_all, 20), *of_all).tolist():
        assert len(set(listed)) == count and set(listed) <= set(rows.tolist())


@pytest.mark.parametrize("shape", [(3, 20, 6, 8), (20, 32, 16, 70)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_attention_to_rows_is_that_of_float64(shape, dtype):
    """Of queries that share rows and see fewer or more of them, of one with rows of its own, and of one without."""
    heads, width, turned, count = shape
    generator = torch.Generator().manual_seed(heads)
    query = torch.randn(5, heads, width + turned, generator=generator).to(dtype)
    cache = torch.randn(100, width + turned + 3, generator=generator).to(dtype)
    latents = cache[:, : width + turned]  # index keys are further columns
    rows = torch.cat([torch.randperm(100, generator=generator)[:count] for _ in range(2)])
    first, seen = torch.tensor([0, 0, 0, count, 7]), torch.tensor([count, 1, count - 3, count, 0])
    out, log_sums = attend_rows(query, latents, rows, first, seen, width, 0.2)
    limit = 1e-5 if dtype is torch.float32 else 2**-8
    for i in range(4):
        own = latents.double()[rows[first[i] :][: seen[i]]]
        scores = torch.einsum("ad,kd->ak", query[i].double(), own) * 0.2
        wanted = scores.softmax(-1) @ own[:, :width]
        torch.testing.assert_close(out[i].double(), wanted, rtol=0, atol=limit)
        torch.testing.assert_close(log_sums[i].double(), scores.logsumexp(-1), rtol=0, atol=1e-5)
        one = slice(i, i + 1)
        alone = attend_rows(query[one], latents, rows.int(), first[one], seen[one], width, 0.2)
        assert out.dtype is dtype and torch.equal(alone[0], out[one])
    assert not out[4].any()
