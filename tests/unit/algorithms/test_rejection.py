"""Rejection: against verl and the definitions, and what is not a bound."""

import itertools
import math

import pytest
import torch

from megarl.algorithms.rejection import QUANTITIES, SCOPES, kept_tokens, parse_bounds, rejection_report, rejection_sums
from tests.references.ragged import ragged_batches
from tests.references.verl_correction import load_verl_correction

NAMES = [f"{scope}-{kind}" for scope, kind in itertools.product(SCOPES, QUANTITIES) if (scope, kind) != ("max", "k1")]
LIMITS = {"k1": "0.7:1.6", "k2": "0.05", "k3": "0.04", "abs": "0.3"}


def cases(scales=(0.01, 0.3, 1.0, 5.0, 300.0)):
    for case, batch in enumerate(ragged_batches()):
        old = -batch.normal().abs()
        yield batch, old, old + batch.normal(scales[case % len(scales)])


def kept_by_hand(batch, old, rollout, name):
    """[True if kept] of each response token."""
    scope, quantity = name.split("-")
    low, high = (*map(float, LIMITS[quantity].split(":")), None)[:2]
    found = []
    for start, stop in itertools.pairwise(batch.cu_seqlens.tolist()):
        mask = batch.mask[start:stop]
        logs = [min(max(log, -20.0), 20.0) for log in (old - rollout)[start:stop][mask].tolist()]
        values = {
            "k1": logs, "k2": [log**2 / 2 for log in logs], "k3": [math.expm1(log) - log for log in logs],
            "abs": [abs(log) for log in logs],
        }[quantity]  # fmt: skip
        if scope != "token" and logs:
            whole = {"sum": math.fsum(values), "mean": math.fsum(values) / len(logs), "max": max(values)}[scope]
            values = [whole] * len(logs)
        found += [math.log(low) <= v <= math.log(high) if quantity == "k1" else v <= low for v in values]
    return found


@pytest.mark.parametrize("name", NAMES)
def test_kept_tokens_are_those_of_the_definition(name):
    (bound,) = parse_bounds(f"{name}={LIMITS[name.split('-')[1]]}")
    assert bound.name == name
    fractions = set()
    for batch, old, rollout in cases():
        noisy = [torch.where(batch.mask, field, math.nan) for field in (old, rollout)]
        kept = kept_tokens(*noisy, batch.mask, batch.cu_seqlens, bound)
        assert kept[batch.mask].tolist() == kept_by_hand(batch, old, rollout, name) and not kept[~batch.mask].any()
        fractions.add(float(kept[batch.mask].double().mean()))
    assert {0.0, 1.0} < fractions


@pytest.mark.parametrize("name", [name for name in NAMES if not name.endswith("abs")])
def test_kept_tokens_are_verls(name):
    """verl's k1 is −log w, so its bounds are the reciprocals of ours."""
    verl, quantity = load_verl_correction(), name.split("-")[1]
    (bound,) = parse_bounds(f"{name}={LIMITS[quantity]}")
    low, *high = map(float, LIMITS[quantity].split(":"))
    theirs = f"{1 / high[0]}_{1 / low}" if high else str(low)
    option = name.replace("-", "_") if name.startswith("token") else "seq_" + name.replace("-", "_")
    for batch, old, rollout in cases():
        mask = batch.padded(batch.mask).double()
        expected, _ = verl.compute_rollout_rejection_mask(batch.padded(old - rollout), mask, option, theirs)
        kept = kept_tokens(old, rollout, batch.mask, batch.cu_seqlens, bound)
        assert torch.equal(kept, batch.packed(expected) > 0)


def test_the_report_counts_tokens_and_responses_that_are_left_out():
    """Of three responses one loses a token, one, which is correct, all of them, and one has none."""
    mask, borders = torch.tensor([0, 1, 1, 0, 1, 1, 1, 0], dtype=torch.bool), torch.tensor([0, 3, 7, 8])
    rollout = torch.zeros(8)
    old = torch.tensor([9.0, 0.0, 0.5, 9.0, 0.4, 0.4, 0.1, 9.0])
    bounds = parse_bounds("token-abs=0.45 mean-abs=0.27")
    kept = [kept_tokens(old, rollout, mask, borders, bound) for bound in bounds]
    sums = rejection_sums(kept, mask, torch.tensor([False, True, True]), borders)
    assert rejection_report(sums, bounds) == {
        "rejection/fraction": pytest.approx(0.8), "rejection/responses": 1.0, "rejection/correct_responses": 1.0,
        "rejection/token_abs": pytest.approx(0.2), "rejection/mean_abs": pytest.approx(0.6),
    }  # fmt: skip
    parts = [
        rejection_sums([each[a:b] for each in kept], mask[a:b], torch.tensor(correct), torch.tensor(its) - a)
        for a, b, correct, its in ((0, 3, [False], [0, 3]), (3, 8, [True, True], [3, 7, 8]))
    ]
    assert torch.equal(sum(parts), sums)
    assert set(rejection_report(torch.zeros(6), bounds).values()) == {0.0}


@pytest.mark.parametrize("text", [
    "", " ", "token-k1", "token-k1=", "token-k1=1", "token-k1=2:1", "token-k1=0:1", "token-k1=1:inf", "token-k2=1:2",
    "mean-abs=0", "mean-abs=-1", "mean-abs=nan", "mean-abs=x", "max-k1=0.5:2", "word-k2=1", "mean-k4=1", "mean=1",
    "token-k2=1 token-k2=2", "token-k1=1:2:3", "token-k2=1,mean-k2=2",
])  # fmt: skip
def test_what_is_no_bound(text):
    with pytest.raises(ValueError):
        parse_bounds(text)
