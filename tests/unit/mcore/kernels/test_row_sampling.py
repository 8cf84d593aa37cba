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


@pytest.mark.parametrize("greedy", [False, True])
@pytest.mark.parametrize("columns, padded, temperature", [(50, 64, 1.0), (3 * TILE - 7, 3 * TILE, 0.7), (1, 4, 1.3)])
def test_it_draws_by_inverse_cdf_whatever_other_rows_are(columns, padded, temperature, greedy):
    logits, numbers = inputs(columns, padded)
    tokens, logprobs = sample_rows(logits, numbers, temperature, columns, greedy)
    exact = torch.log_softmax(logits[:, :columns].double() / temperature, -1)
    if greedy:
        assert torch.equal(tokens, logits[:, :columns].argmax(-1))
    else:
        shares = exact.exp()
        above = shares.cumsum(-1).gather(1, tokens.unsqueeze(1)).squeeze(1)
        below = above - shares.gather(1, tokens.unsqueeze(1)).squeeze(1)
        assert ((below - ROUNDING < numbers) & (numbers < above + ROUNDING)).all()
        assert (shares.gather(1, tokens.unsqueeze(1)) > 0).all()
    chosen = exact.gather(1, tokens.unsqueeze(1)).squeeze(1).float()
    torch.testing.assert_close(logprobs, chosen, rtol=1e-6, atol=1e-5)
    alone = sample_rows(logits[-1:], numbers[-1:], temperature, columns, greedy)
    assert torch.equal(alone[0], tokens[-1:]) and torch.equal(alone[1], logprobs[-1:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("temperature, greedy", [(1.0, False), (0.7, False), (1.3, True)])
def test_a_known_token_has_the_log_probability_that_it_was_drawn_with(temperature, greedy, dtype):
    """To the last bit, among other rows and with other columns of padding."""
    logits, numbers = inputs(TILE + 9, TILE + 16)
    logits = logits.clamp(-6e4, 6e4).to(dtype)
    tokens, logprobs = sample_rows(logits, numbers, temperature, TILE + 9, greedy)
    some = torch.tensor([7, 2, 3, 7])
    found = row_logprobs(logits[some], tokens[some], temperature, TILE + 9)
    assert torch.equal(found, logprobs[some]) and found.dtype is torch.float32
    assert row_logprobs(logits[:0], tokens[:0], temperature, TILE + 9).shape == (0,)
    others = (tokens[some] + 1) % (TILE + 9)
    exact = torch.log_softmax(logits[some, : TILE + 9].double() / temperature, -1).gather(1, others.unsqueeze(1))
    found = row_logprobs(logits[some], others, temperature, TILE + 9)
    torch.testing.assert_close(found.double(), exact.squeeze(1), rtol=1e-6, atol=1e-5)
