"""Whitening and explained variance from global moments: against direct formulas and verl, whole and split."""

import pytest
import torch

from megarl.algorithms.value_function import explained_variance, explained_variance_moments
from megarl.algorithms.whitening import local_moments, mean_and_variance, whiten
from tests.references.ragged import ragged_batches
from tests.references.verl_core_algos import load_verl


def test_whiten_equals_verl_and_direct_formula():
    masked_whiten = load_verl().torch_functional.masked_whiten
    for case, batch in enumerate(ragged_batches()):
        values = 10.0 ** (case % 5 - 2) * (batch.normal() + case % 7)
        valid = values[batch.mask]
        moments = local_moments(values, batch.mask)
        result = whiten(values, batch.mask, moments)
        # verl adds 1e-8 to the count, a bias of 1e-8 / count: the looser tolerance is its error.
        expected = masked_whiten(values, batch.mask)[batch.mask]
        torch.testing.assert_close(result[batch.mask], expected, rtol=1e-6, atol=1e-6)
        expected = (valid - valid.mean()) / (valid.var() + 1e-8).sqrt()
        torch.testing.assert_close(result[batch.mask], expected, rtol=1e-10, atol=1e-10)
        assert torch.equal(result[~batch.mask], torch.zeros_like(result[~batch.mask]))


def test_split_whitening_and_explained_variance_equal_the_whole():
    for case, batch in enumerate(ragged_batches()):
        values, returns = batch.normal().float(), batch.normal().float()
        total = values.numel()
        cuts = sorted(torch.randint(0, total + 1, (case % 4,), generator=batch.generator).tolist())
        spans = [slice(a, b) for a, b in zip([0, *cuts], [*cuts, total])]
        moments = sum(local_moments(values[span], batch.mask[span]) for span in spans)
        parts = torch.cat([whiten(values[span], batch.mask[span], moments) for span in spans])
        whole = whiten(values, batch.mask, local_moments(values, batch.mask))
        assert parts.dtype == torch.float32
        torch.testing.assert_close(parts, whole, rtol=1e-6, atol=1e-7)

        whole = explained_variance_moments(values, returns, batch.mask)
        parts = sum(explained_variance_moments(values[s], returns[s], batch.mask[s]) for s in spans)
        assert explained_variance(parts) == pytest.approx(explained_variance(whole), abs=1e-10)
        predicted, target = values[batch.mask].double(), returns[batch.mask].double()
        expected = 1 - (target - predicted).var() / target.var()
        assert explained_variance(whole) == pytest.approx(float(expected), rel=1e-9, abs=1e-9)


def test_mean_and_variance_of_known_numbers():
    moments = local_moments(torch.tensor([1.0, 2.0, 3.0, 99.0]), torch.tensor([True, True, True, False]))
    assert moments.tolist() == [3.0, 6.0, 14.0] and moments.dtype == torch.float64
    assert [float(x) for x in mean_and_variance(moments)] == [2.0, 1.0]


def test_float32_values_far_from_zero_keep_their_variance():
    noise = torch.randn(5000, generator=torch.Generator().manual_seed(0))
    values, mask = noise + 10_000, torch.ones(5000, dtype=torch.bool)
    _, variance = mean_and_variance(local_moments(values, mask))
    assert float(variance) == pytest.approx(float(values.double().var()), rel=1e-7)


def test_equal_values_come_out_finite():
    values, mask = torch.full((1000,), 0.1), torch.ones(1000, dtype=torch.bool)
    moments = sum(local_moments(part, torch.ones_like(part, dtype=torch.bool)) for part in values.split(7))
    torch.testing.assert_close(whiten(values, mask, moments), torch.zeros(1000), rtol=1e-7, atol=1e-7)


def test_one_and_no_valid_token():
    values = torch.tensor([0.3, float("inf"), float("nan")])
    one, none = torch.tensor([True, False, False]), torch.zeros(3, dtype=torch.bool)
    assert torch.equal(whiten(values, one, local_moments(values, one)), torch.zeros(3))
    assert torch.equal(whiten(values, none, local_moments(values, none)), torch.zeros(3))


def test_shapes_must_agree():
    with pytest.raises(ValueError, match=r"values \[3\], mask \[1\]"):
        local_moments(torch.ones(3), torch.ones(1, dtype=torch.bool))
    with pytest.raises(ValueError, match="one shape"):
        whiten(torch.ones(3), torch.ones(1, dtype=torch.bool), torch.ones(3))
    with pytest.raises(ValueError, match="one shape"):
        explained_variance_moments(torch.ones(1), torch.ones(3), torch.ones(3, dtype=torch.bool))
