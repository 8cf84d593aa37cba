"""Kernels of rows of logits, by Triton's interpreter: sums and gradients against fp64 and single operators; sampling of
the token whose share of the mass holds the row's number."""

import pytest
import torch
import torch.distributed as dist
from torch.testing import assert_close

from megarl.algorithms.token_sampling import uniforms
from megarl.mcore.kernels import head_scores as kernel
from megarl.mcore.kernels.cuda.head_rows import (
    SAMPLED_TILE,
    SUMS,
    TILE,
    head_gradient,
    head_sums,
    row_logprobs,
    sample_rows,
    uniform_rows,
)
from megarl.mcore.kernels.head import HeadOptions
from megarl.mcore.kernels.head_scores import head_scores
from tests.helpers.models import reference_kernels
from tests.helpers.models.output_heads import PADDED, PER_TOKEN, T, V, cut_chunks, problem, use_row_kernels, weighted
from tests.helpers.worlds import on_each_rank

ROWS = 5


@pytest.mark.parametrize("columns, count", [(TILE + 40, TILE + 9), (64, 64), (16, 1), (16, 0)])
@pytest.mark.parametrize("own_temperatures", [False, True])
def test_sums_and_gradients_are_those_of_fp64(columns, count, own_temperatures):
    generator = torch.Generator().manual_seed(columns)
    logits = 4 * torch.randn(ROWS, columns, generator=generator)
    logits[:, count:] = 1e9  # padding must not be seen
    logits[1] = 0.0
    targets = torch.tensor([0, count - 1, -3, columns + 7, count // 2])  # some are on other ranks
    temperatures = torch.linspace(0.5, 1.5, ROWS) if own_temperatures else None
    arguments = temperatures, 0.7, targets, count
    sums, wanted = (torch.full((SUMS, ROWS + 3), 7.0)[:, 1:-2] for _ in range(2))  # among those of other rows
    head_sums(sums, logits, *arguments)
    reference_kernels.head_sums(wanted, logits, *arguments)
    assert_close(sums, wanted, rtol=1e-5, atol=1e-5)
    top, total, weighted, square, _ = wanted
    if count == 0:  # then the sums are those of other ranks
        top, total = torch.zeros(ROWS), torch.ones(ROWS)
    statistics = torch.stack([top, total, total.log() - weighted / total, square / total.square()])
    grads = torch.randn(3, ROWS, generator=generator)
    found, right = (torch.full((ROWS, columns), 7.0) for _ in range(2))
    head_gradient(found, logits, *arguments, statistics, grads)
    reference_kernels.head_gradient(right, logits, *arguments, statistics, grads)
    assert_close(found, right, rtol=1e-4, atol=1e-5)
    assert not found[:, count:].any() and (count <= 1 or found[0, 0] != 0)


@on_each_rank()
def test_kernels_of_rows_give_the_gradients_of_single_operators(rank):
    """Gradients of some outputs with kernels of rows, a chunk or all chunks at a time, against single operators."""
    hidden, weight, targets = problem()
    inputs = hidden.requires_grad_(), weight.requires_grad_()
    cut_chunks(4, PADDED)
    multiplied = []
    gradient_class = kernel.HeadGradients
    add = gradient_class.add_products
    gradient_class.add_products = lambda *args: multiplied.append(len(args[-1])) or add(*args)

    def gradients(used):
        scores = head_scores(*inputs, targets, HeadOptions(PER_TOKEN, V, dist.group.WORLD))
        return torch.autograd.grad(weighted(scores, used), inputs)

    choices = [(1, None, None), (1, -2, None), (None, 1, 2)]
    wanted = [gradients(used) for used in choices]
    use_row_kernels()
    for together, sizes in ((1, [4] * 5), (2**28, [T])):
        kernel.MAX_TOGETHER = together
        for used, right in zip(choices, wanted, strict=True):
            multiplied.clear()
            for x, y in zip(gradients(used), right, strict=True):
                assert_close(x, y, rtol=1e-4, atol=1e-5)
            assert multiplied == sizes


# -- sampling --------------------------------------------------------------------------------------------------------


SAMPLED = 12
ROUNDING = 1e-6  # of sums of fp32 numbers, as a share of all mass


def inputs(columns: int, padded: int):
    """(logits [n, padded], uniform numbers), with numbers near 0 and 1, ties, and columns without mass."""
    generator = torch.Generator().manual_seed(columns)
    logits = 3 * torch.randn(SAMPLED, padded, generator=generator)
    logits[:, columns:] = 1e9  # padding must not be seen
    logits[2] = 0.0
    logits[3, : columns // 2] = -1e4
    logits[4, columns // 2 :] = -1e4
    numbers = torch.rand(SAMPLED, dtype=torch.float64, generator=generator)
    numbers[:5] = torch.tensor([1e-17, 1 - 1e-16, 0.5, 1e-17, 1 - 1e-16], dtype=torch.float64)
    return logits, numbers


def settings(temperature: float, odd: int):
    """(temperatures [n], greedy [n]): every other row is greedy, from row `odd` on, and has another temperature."""
    is_greedy = torch.arange(SAMPLED) % 2 == odd
    return torch.tensor([temperature, 1.1 * temperature])[is_greedy.long()], is_greedy.int()


@pytest.mark.filterwarnings("ignore:overflow encountered")
def test_random_numbers_are_those_of_a_cpu_to_the_bit():
    keys = torch.tensor([0, -1, 2**63 - 1, -(2**63), 12345]).repeat(60)
    positions = torch.arange(300) % 7 * 1001
    found = uniform_rows(keys, positions)
    assert torch.equal(found, uniforms(keys, positions)) and len(found.unique()) > 30
    assert uniform_rows(keys[:0], positions[:0]).shape == (0,)


@pytest.mark.parametrize("odd", [0, 1])
@pytest.mark.parametrize(
    "columns, padded, temperature", [(50, 64, 1.0), (3 * SAMPLED_TILE - 7, 3 * SAMPLED_TILE, 0.7), (1, 4, 1.3)]
)
def test_it_draws_by_inverse_cdf_whatever_other_rows_are(columns, padded, temperature, odd):
    (logits, numbers), (temperatures, greedy) = inputs(columns, padded), settings(temperature, odd)
    tokens, logprobs = sample_rows(logits, numbers, temperatures, greedy, columns)
    exact = torch.log_softmax(logits[:, :columns].double() / temperatures.unsqueeze(1), -1)
    largest, drawn = greedy.bool(), ~greedy.bool()
    assert torch.equal(tokens[largest], logits[largest, :columns].argmax(-1))
    shares = exact.exp()
    above = shares.cumsum(-1).gather(1, tokens.unsqueeze(1)).squeeze(1)
    below = above - shares.gather(1, tokens.unsqueeze(1)).squeeze(1)
    assert ((below - ROUNDING < numbers) & (numbers < above + ROUNDING))[drawn].all()
    assert (shares.gather(1, tokens.unsqueeze(1)) > 0).all()
    chosen = exact.gather(1, tokens.unsqueeze(1)).squeeze(1).float()
    torch.testing.assert_close(logprobs, chosen, rtol=1e-6, atol=1e-5)
    for row in (SAMPLED - 2, SAMPLED - 1):
        own = slice(row, row + 1)
        alone = sample_rows(logits[own], numbers[own], temperatures[own], greedy[own], columns)
        assert torch.equal(alone[0], tokens[own]) and torch.equal(alone[1], logprobs[own])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("temperature, greedy", [(1.0, False), (0.7, False), (1.3, True)])
def test_a_known_token_has_the_log_probability_that_it_was_drawn_with(temperature, greedy, dtype):
    """To the last bit, among other rows and with other columns of padding."""
    logits, numbers = inputs(SAMPLED_TILE + 9, SAMPLED_TILE + 16)
    logits = logits.clamp(-6e4, 6e4).to(dtype)
    same = torch.full((SAMPLED,), temperature), torch.full((SAMPLED,), greedy, dtype=torch.int32)
    tokens, logprobs = sample_rows(logits, numbers, *same, SAMPLED_TILE + 9)
    some = torch.tensor([7, 2, 3, 7])
    found = row_logprobs(logits[some], tokens[some], temperature, SAMPLED_TILE + 9)
    assert torch.equal(found, logprobs[some]) and found.dtype is torch.float32
    assert row_logprobs(logits[:0], tokens[:0], temperature, SAMPLED_TILE + 9).shape == (0,)
    others = (tokens[some] + 1) % (SAMPLED_TILE + 9)
    exact = torch.log_softmax(logits[some, : SAMPLED_TILE + 9].double() / temperature, -1).gather(
        1, others.unsqueeze(1)
    )
    found = row_logprobs(logits[some], others, temperature, SAMPLED_TILE + 9)
    torch.testing.assert_close(found.double(), exact.squeeze(1), rtol=1e-6, atol=1e-5)
