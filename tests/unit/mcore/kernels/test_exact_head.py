"""The head of exact rollouts, run by Triton's interpreter: the rollout's log-probs, other runs' gradients."""

import pytest
import torch
import torch.distributed as dist

from megarl.mcore.kernels.cuda.row_sampling import sample_rows
from megarl.mcore.kernels.head import HeadOptions, softcap_
from megarl.mcore.kernels.head_scores import head_scores
from megarl.mcore.kernels.linear import exact_product
from tests.helpers import interpreted_kernels
from tests.helpers.worlds import run_world

ROWS, HIDDEN, VOCAB, PADDED = 6, 32, 50, 64


@pytest.fixture(autouse=True)
def rows_alone(monkeypatch):
    interpreted_kernels.multiply_rows_alone(monkeypatch)


def scores(rank, temperature, softcap):
    """(whether log-probs have the bits of sampled tokens', [scores and gradients] of exact and of other runs)."""
    generator = torch.Generator().manual_seed(4)
    hidden, weight = torch.randn(ROWS, HIDDEN, generator=generator), torch.randn(PADDED, HIDDEN, generator=generator)
    logits = exact_product()(hidden, weight)
    capped = logits if softcap is None else softcap_(logits, softcap)
    numbers = torch.rand(ROWS, dtype=torch.float64, generator=generator)
    temperatures, drawn = torch.full((ROWS,), temperature), torch.zeros(ROWS, dtype=torch.int32)
    tokens, logprobs = sample_rows(capped, numbers, temperatures, drawn, VOCAB)
    found = []
    for is_exact in (True, False):
        leaves = [x.clone().requires_grad_() for x in (hidden, weight)]
        options = HeadOptions(temperature, VOCAB, dist.group.WORLD, softcap=softcap, is_exact=is_exact)
        out = head_scores(*leaves, tokens, options)
        grads = torch.autograd.grad((out.logprobs.cos() + out.entropy + out.square_sum).sum(), leaves)
        found.append([x.detach() for x in (*out, *grads)])
    some = torch.tensor([5, 0, 2, 3])
    options = options._replace(is_exact=True)
    part = head_scores(hidden, weight, tokens[some], options, indices=some, squares=False)
    same = torch.equal(found[0][0], logprobs) and torch.equal(part.logprobs, logprobs[some])
    return same, found


@pytest.mark.parametrize("temperature, softcap", [(1.0, None), (0.7, None), (1.3, 3.0)])
def test_log_probs_are_the_rollouts_and_gradients_those_of_the_softmax(temperature, softcap):
    ((same, found),) = run_world(scores, 1, temperature, softcap)
    assert same
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)
