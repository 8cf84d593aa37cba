"""The head: chunks within a budget; that of exact rollouts has the rollout's log-probs and other runs' gradients."""

import itertools

import pytest
import torch
import torch.distributed as dist

from megarl.mcore.kernels import head
from megarl.mcore.kernels.batch_invariance import MIN_ROWS
from megarl.mcore.kernels.cuda.head_rows import sample_rows
from megarl.mcore.kernels.head import HeadOptions, row_chunks, softcap_
from megarl.mcore.kernels.head_scores import head_scores
from megarl.mcore.kernels.linear import exact_product
from tests.helpers.models import interpreted_kernels
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


@pytest.mark.parametrize("rows", [4, 5, 7, 8, 9, 1000, 8192, 100_003])
@pytest.mark.parametrize("columns", [16, 8000, 32_000, 128_000, 2**27])
def test_chunks_are_even_and_within_the_budget(rows, columns):
    chunks = row_chunks(rows, columns)
    sizes = [part.stop - part.start for part in chunks]
    assert chunks[0].start == 0 and chunks[-1].stop == rows
    assert all(a.stop == b.start for a, b in itertools.pairwise(chunks))
    assert min(sizes) >= MIN_ROWS and max(sizes) - min(sizes) <= 1
    assert max(sizes) < 2 * MIN_ROWS or max(sizes) * columns <= head.MAX_CHUNK
    assert len(sizes) == 1 or max(sizes) * columns <= max(
        head.MIN_CHUNK, rows * columns / head.CHUNKS, 2 * MIN_ROWS * columns
    )
