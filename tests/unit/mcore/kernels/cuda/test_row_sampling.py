"""Sampling of CUDA devices, run by Triton's interpreter: the token whose share of the mass holds the row's number."""

import pytest
import torch

from megarl.mcore.kernels.cuda.row_sampling import TILE, row_logprobs, sample_rows

ROWS = 12
ROUNDING = 1e-6  # of sums of fp32 numbers, as a share of all mass


def inputs(columns: int, padded: int):
    """(logits [n, padded], uniform numbers), with numbers near 0 and 1, ties, and columns without mass."""
    generator = torch.Generator().manual_seed(columns)
    logits = 3 * torch.randn(ROWS, padded, generator=generator)
    logits[:, columns:] = 1e9  # padding must not be seen
    logits[2] = 0.0
    logits[3, : columns // 2] = -1e4
    logits[4, columns // 2 :] = -1e4
    numbers = torch.rand(ROWS, dtype=torch.float64, generator=generator)
    numbers[:5] = torch.tensor([1e-17, 1 - 1e-16, 0.5, 1e-17, 1 - 1e-16], dtype=torch.float64)
    return logits, numbers


def settings(temperature: float, odd: int):
    """(temperatures [n], greedy [n]): every other row is greedy, from row `odd` on, and has another temperature."""
    is_greedy = torch.arange(ROWS) % 2 == odd
    return torch.tensor([temperature, 1.1 * temperature])[is_greedy.long()], is_greedy.int()


@pytest.mark.parametrize("odd", [0, 1])
@pytest.mark.parametrize("columns, padded, temperature", [(50, 64, 1.0), (3 * TILE - 7, 3 * TILE, 0.7), (1, 4, 1.3)])
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
    for row in (ROWS - 2, ROWS - 1):
        own = slice(row, row + 1)
        alone = sample_rows(logits[own], numbers[own], temperatures[own], greedy[own], columns)
        assert torch.equal(alone[0], tokens[own]) and torch.equal(alone[1], logprobs[own])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("temperature, greedy", [(1.0, False), (0.7, False), (1.3, True)])
def test_a_known_token_has_the_log_probability_that_it_was_drawn_with(temperature, greedy, dtype):
    """To the last bit, among other rows and with other columns of padding."""
    logits, numbers = inputs(TILE + 9, TILE + 16)
    logits = logits.clamp(-6e4, 6e4).to(dtype)
    same = torch.full((ROWS,), temperature), torch.full((ROWS,), greedy, dtype=torch.int32)
    tokens, logprobs = sample_rows(logits, numbers, *same, TILE + 9)
    some = torch.tensor([7, 2, 3, 7])
    found = row_logprobs(logits[some], tokens[some], temperature, TILE + 9)
    assert torch.equal(found, logprobs[some]) and found.dtype is torch.float32
    assert row_logprobs(logits[:0], tokens[:0], temperature, TILE + 9).shape == (0,)
    others = (tokens[some] + 1) % (TILE + 9)
    exact = torch.log_softmax(logits[some, : TILE + 9].double() / temperature, -1).gather(1, others.unsqueeze(1))
    found = row_logprobs(logits[some], others, temperature, TILE + 9)
    torch.testing.assert_close(found.double(), exact.squeeze(1), rtol=1e-6, atol=1e-5)
