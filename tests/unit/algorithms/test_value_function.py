"""Clipped value loss: against verl, with gradients. Explained variance in closed form."""

import pytest
import torch

from megarl.algorithms.value_function import clipped_value_loss, explained_variance, explained_variance_moments
from tests.references.ragged import ragged_batches
from tests.references.verl_core_algos import load_verl


def test_loss_equals_verl(monkeypatch):
    verl = load_verl()
    monkeypatch.setattr(verl.core_algos, "agg_loss", lambda loss_mat, **_: loss_mat)
    for case, batch in enumerate(ragged_batches()):
        scale, clip_range = 10.0 ** (case % 5 - 2), (0.0, 0.2, 0.5, 5.0)[case % 4]
        old, returns = batch.normal(scale), batch.normal(scale)
        values = (old + batch.normal(scale)).requires_grad_()
        terms = clipped_value_loss(values, old, returns, clip_range)
        padded = [batch.padded(field) for field in (values, returns, old, batch.mask.double())]
        matrix, fraction = verl.core_algos.compute_value_loss(*padded, clip_range)
        torch.testing.assert_close(terms.loss, batch.packed(matrix), rtol=1e-12, atol=1e-12)
        gradients = [torch.autograd.grad(loss.sum(), values)[0] for loss in (terms.loss, batch.packed(matrix))]
        torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-12)
        assert float(terms.clipped[batch.mask].double().mean()) == pytest.approx(float(fraction), abs=1e-7)


def test_known_losses():
    values = torch.tensor([1.0, 3.0, 3.0, -3.0], requires_grad=True)
    terms = clipped_value_loss(values, torch.zeros(4), torch.tensor([0.0, 4.0, 0.0, -4.0]), 1.0)
    assert terms.loss.tolist() == [0.5, 4.5, 4.5, 4.5]
    assert terms.clipped.tolist() == [False, True, False, True]
    terms.loss.sum().backward()
    assert values.grad.tolist() == [1.0, 0.0, 3.0, 0.0]


def test_unchanged_values_give_the_plain_gradient():
    values, returns = torch.randn(50, requires_grad=True), torch.randn(50)
    clipped_value_loss(values, values.detach().clone(), returns, 0.2).loss.sum().backward()
    assert torch.equal(values.grad, (values - returns).detach())


def test_gradcheck():
    generator = torch.Generator().manual_seed(2)
    values, old, returns = (torch.randn(200, generator=generator, dtype=torch.float64) for _ in range(3))
    held = values.clamp(old - 0.5, old + 0.5)
    at_border = (values - old).abs().sub(0.5).abs() < 1e-3
    at_switch = (held != values) & ((held - returns).abs() - (values - returns).abs()).abs().lt(1e-3)
    smooth = ~at_border & ~at_switch
    values, old, returns = values[smooth].requires_grad_(), old[smooth], returns[smooth]
    assert torch.autograd.gradcheck(lambda x: clipped_value_loss(x, old, returns, 0.5).loss, values)


def test_bad_arguments_are_rejected_and_targets_are_constants():
    ones = torch.ones(2)
    with pytest.raises(ValueError, match="one shape"):
        clipped_value_loss(ones, ones, ones[:1], 0.2)
    fields = [torch.randn(8, requires_grad=True) for _ in range(3)]
    clipped_value_loss(*fields, 0.2).loss.sum().backward()
    assert fields[0].grad is not None and fields[1].grad is None and fields[2].grad is None


def test_explained_variance_closed_forms():
    returns = torch.tensor([1.0, 2.0, 4.0, 8.0])
    mask = torch.ones(4, dtype=torch.bool)

    def of(values, targets=returns, valid=mask):
        return explained_variance(explained_variance_moments(values, targets, valid))

    assert of(returns) == 1.0
    assert of(returns + 5) == 1.0
    assert of(torch.full((4,), 3.0)) == pytest.approx(0.0, abs=1e-12)
    assert of(-returns) == pytest.approx(-3.0)
    assert of(torch.randn(4), torch.full((4,), 0.1)) == 0.0
    assert of(torch.randn(4), valid=torch.tensor([True, False, False, False])) == 0.0
    assert of(torch.randn(4), valid=torch.zeros(4, dtype=torch.bool)) == 0.0


def test_rounding_of_equal_returns_explains_nothing():
    draw = torch.Generator().manual_seed(0)
    for constant in (0.1, 0.7, 1e-9, 12345.678):
        returns = torch.full((4999,), constant, dtype=torch.float64)
        values = torch.randn(4999, generator=draw, dtype=torch.float64)
        parts = zip(values.split(97), returns.split(97))
        moments = sum(explained_variance_moments(v, r, torch.ones_like(r, dtype=torch.bool)) for v, r in parts)
        assert explained_variance(moments) == 0.0
