"""The loss of reward models: the formula in float64, losses of torch that are the same function, gradients, limits."""

import math

import pytest
import torch
from torch.nn import functional

from megarl.algorithms.preference_loss import bradley_terry

PAIRS = 40


def drawn(seed: int, spread: float = 2.0):
    """(chosen, rejected, margin), float64; the margins are not negative."""
    generator = torch.Generator().manual_seed(seed)
    chosen, rejected = (spread * torch.randn(PAIRS, generator=generator, dtype=torch.float64) for _ in range(2))
    return chosen, rejected, torch.rand(PAIRS, generator=generator, dtype=torch.float64)


def formula(chosen: float, rejected: float, margin: float, centring: float) -> float:
    """The term of one pair, written out."""
    sigmoid = 1 / (1 + math.exp(-(chosen - rejected - margin)))
    return -math.log(sigmoid) + centring * (chosen + rejected) ** 2


@pytest.mark.parametrize("centring", [0.0, 0.01, 1.5])
@pytest.mark.parametrize("seed", range(3))
def test_the_formula(seed, centring):
    chosen, rejected, margin = drawn(seed)
    terms = bradley_terry(chosen, rejected, margin, centring)
    pairs = torch.stack([chosen, rejected, margin], 1).tolist()
    expected = torch.tensor([formula(*pair, centring) for pair in pairs], dtype=torch.float64)
    torch.testing.assert_close(terms, expected, rtol=1e-12, atol=1e-14)
    single = bradley_terry(*(x.float() for x in (chosen, rejected, margin)), centring)
    assert single.dtype == torch.float32
    torch.testing.assert_close(single.double(), terms, rtol=1e-5, atol=1e-7)


def test_losses_of_torch_that_are_the_same_function():
    """A choice of two is a logistic regression on the difference of the scores with the label 1."""
    chosen, rejected, margin = drawn(5)
    terms, difference = bradley_terry(chosen, rejected, margin), chosen - rejected - margin
    ones = torch.ones_like(difference)
    for other in (
        -functional.logsigmoid(difference),
        functional.binary_cross_entropy_with_logits(difference, ones, reduction="none"),
        functional.soft_margin_loss(difference, ones, reduction="none"),
        functional.cross_entropy(
            torch.stack([chosen - margin, rejected], 1), torch.zeros(PAIRS).long(), reduction="none"
        ),
    ):
        torch.testing.assert_close(terms, other, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("centring", [0.0, 0.3])
def test_gradients(centring):
    """∂/∂c = −σ(−d) + 2κ(c + r), ∂/∂r = σ(−d) + 2κ(c + r), with d = c − r − m; the margin gets none."""
    chosen, rejected, margin = (x.requires_grad_() for x in drawn(7))
    bradley_terry(chosen, rejected, margin, centring).sum().backward()
    missing = torch.sigmoid(-(chosen - rejected - margin)).detach()
    pull = 2 * centring * (chosen + rejected).detach()
    torch.testing.assert_close(chosen.grad, pull - missing, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(rejected.grad, pull + missing, rtol=1e-12, atol=1e-14)
    assert margin.grad is None
    if not centring:
        assert torch.equal(chosen.grad, -rejected.grad)  # only the difference of the scores counts


def test_equal_scores_cost_exactly_log_2():
    scores = torch.tensor([0.0, 1.5, -700.0, 3e4])
    terms = bradley_terry(scores, scores.clone(), torch.zeros(4))
    assert torch.equal(terms, torch.full((4,), math.log(2)))
    around_zero = scores, -scores, torch.zeros(4)
    assert torch.equal(bradley_terry(*around_zero, 5.0), bradley_terry(*around_zero))


def test_a_margin_asks_for_more_and_centring_for_scores_around_zero():
    chosen, rejected, margin = drawn(3)
    assert (bradley_terry(chosen, rejected, margin + 0.5) > bradley_terry(chosen, rejected, margin)).all()
    centred = bradley_terry(chosen, rejected, margin, 0.25) - bradley_terry(chosen, rejected, margin)
    torch.testing.assert_close(centred, 0.25 * (chosen + rejected) ** 2, rtol=1e-10, atol=1e-12)


def test_large_differences_stay_finite():
    far = torch.tensor([1e4, -1e4, 3e38], requires_grad=True)
    terms = bradley_terry(far, torch.zeros(3), torch.zeros(3))
    terms.sum().backward()
    assert terms.tolist() == [0.0, 1e4, 0.0] and far.grad.tolist() == [0.0, -1.0, 0.0]
    assert bradley_terry(*torch.zeros(3, 0), 0.1).shape == (0,)


@pytest.mark.parametrize("sizes", [(2, 3, 2), (2, 2, 1)])
def test_wrong_shapes_are_rejected(sizes):
    with pytest.raises(ValueError, match="one shape"):
        bradley_terry(*map(torch.zeros, sizes))
