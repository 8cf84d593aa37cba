"""Rollout correction: weights, masks and diagnostics against verl and plain arithmetic; sums over micro-batches;
rejection against verl and the definitions, and what is not a bound."""

import itertools
import math
from unittest import mock

import pytest
import torch

from megarl.algorithms.aggregation import aggregate, local_counts
from megarl.algorithms.rollout_correction import (
    CORRECTIONS,
    LEVELS,
    QUANTITIES,
    SCOPES,
    CorrectionOptions,
    correction_report,
    correction_sums,
    correction_weights,
    kept_tokens,
    off_policy_kept,
    parse_bounds,
    proximal_logprobs,
    rejection_report,
    rejection_sums,
    staleness_maxima,
    staleness_report,
    staleness_sums,
)
from tests.references.ragged import ragged_batches
from tests.references.verl_correction import load_verl_correction
from tests.references.verl_policy_losses import policy_tokens

KINDS = [("none", None), ("tis", None), ("mis", None), ("icepop", 0.4)]
EVERY_OPTION = [CorrectionOptions(kind, level, 1.5, floor) for (kind, floor), level in itertools.product(KINDS, LEVELS)]
VERL_LEVELS = {"token": "token_k1", "sequence": "seq_sum_k1", "geometric": "seq_mean_k1"}


def cases(scales=(0.01, 0.3, 1.0, 5.0, 300.0)):
    """Batches with old log-probs and rollout log-probs: gaps from rounding size to beyond what exp can hold."""
    for case, batch in enumerate(ragged_batches()):
        old = -batch.normal().abs()
        yield batch, old, old + batch.normal(scales[case % len(scales)])


def log_weights_by_hand(batch, old, rollout, level):
    """log w of each response token, in lists, one for each response that is not empty."""
    for start, stop in itertools.pairwise(batch.cu_seqlens.tolist()):
        kept = batch.mask[start:stop]
        tokens = (old[start:stop][kept] - rollout[start:stop][kept]).tolist()
        if tokens:
            whole = math.fsum(tokens) / (len(tokens) if level == "geometric" else 1)
            yield tokens if level == "token" else [whole] * len(tokens)


def units_by_hand(batch, old, rollout, level):
    """log w of each token that has one, or of each response."""
    logs = list(log_weights_by_hand(batch, old, rollout, level))
    return list(itertools.chain(*logs)) if level == "token" else [each[0] for each in logs]


def applied_by_hand(log_weight, options):
    weight = math.exp(min(max(log_weight, -20.0), 20.0))
    if options.kind == "none":
        return 1.0
    if options.kind == "tis":
        return min(weight, options.cap)
    return weight if (options.floor or 0.0) <= weight <= options.cap else 0.0


@pytest.mark.parametrize("level", LEVELS)
def test_weights_equal_the_definitions(level):
    for batch, old, rollout in cases():
        logs = list(itertools.chain(*log_weights_by_hand(batch, old, rollout, level)))
        for options in (CorrectionOptions(kind, level, 1.5, floor) for kind, floor in KINDS):
            weights = correction_weights(old, rollout, batch.mask, batch.cu_seqlens, options)
            expected = torch.tensor([applied_by_hand(each, options) for each in logs], dtype=torch.float64)
            torch.testing.assert_close(weights[batch.mask], expected, rtol=1e-11, atol=1e-12)
            assert bool((weights[~batch.mask] == 1).all())


def verl_weights(log_ratio, mask, level, cap, floor):
    """verl's truncated weights, or IcePop's if a floor is given; without its metrics, which divide by zero where
    all weights are 0."""
    verl, threshold = load_verl_correction(), cap if floor is None else f"{floor}_{cap}"
    with mock.patch.object(verl, "compute_is_metrics", return_value={}):
        return verl.compute_rollout_correction_weights(log_ratio, mask, level, threshold)[0]


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize(("kind", "floor"), [("tis", None), ("icepop", 0.4)])
def test_weights_equal_verl(kind, floor, level):
    for batch, old, rollout in cases():
        weights = correction_weights(
            old, rollout, batch.mask, batch.cu_seqlens, CorrectionOptions(kind, level, 2.5, floor)
        )
        theirs = verl_weights(batch.padded(old - rollout), batch.padded(batch.mask).double(), level, 2.5, floor)
        torch.testing.assert_close(weights[batch.mask], batch.packed(theirs)[batch.mask], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("kind", "floor"), [("mis", None), ("icepop", 0.4)])
def test_masked_tokens_equal_verls_rejections(kind, floor, level):
    """verl rejects by k1 = −log w, so its bounds are the reciprocals of ours; and it removes rejected tokens from the
    response mask, while megarl keeps them in the denominators."""
    verl = load_verl_correction()
    bounds = f"{1 / 2.5}_{1e30 if floor is None else 1 / floor}"
    for batch, old, rollout in cases((0.01, 0.3, 1.0, 3.0)):  # verl holds the log-ratio of each token to ±20, not Σ
        weights = correction_weights(
            old, rollout, batch.mask, batch.cu_seqlens, CorrectionOptions(kind, level, 2.5, floor)
        )
        mask, _ = verl.compute_rollout_rejection_mask(
            batch.padded(old - rollout), batch.padded(batch.mask).double(), VERL_LEVELS[level], bounds
        )
        kept = batch.packed(mask)[batch.mask] > 0
        assert torch.equal(weights[batch.mask] > 0, kept)


def report_of(batch, old, rollout, options):
    return correction_report(*correction_sums(old, rollout, batch.mask, batch.cu_seqlens, options))


@pytest.mark.parametrize("level", LEVELS)
def test_the_report_equals_the_definitions(level):
    for batch, old, rollout in cases():
        logs, gaps = units_by_hand(batch, old, rollout, level), (rollout - old)[batch.mask].tolist()
        held = [min(max(gap, -20.0), 20.0) for gap in gaps]
        weights = [math.exp(min(max(each, -20.0), 20.0)) for each in logs]
        number, total = len(weights), math.fsum(weights)
        for options in (CorrectionOptions(kind, level, 1.5, floor) for kind, floor in KINDS):
            applied = [applied_by_hand(each, options) for each in logs]
            truncated = sum(weight > options.cap for weight in weights) if options.kind == "tis" else 0
            expected = {
                "correction/weight_mean": total / number,
                "correction/weight_max": max(weights),
                "correction/effective_sample_size": total**2 / number / math.fsum(weight**2 for weight in weights),
                "correction/applied_mean": math.fsum(applied) / number,
                "correction/truncated_fraction": truncated / number,
                "correction/masked_fraction": applied.count(0.0) / number,
                "correction/kl": math.fsum(gaps) / len(gaps),
                "correction/kl_k3": math.fsum(math.exp(-gap) - 1 + gap for gap in held) / len(gaps),
            }
            assert report_of(batch, old, rollout, options) == pytest.approx(expected, rel=1e-10, abs=1e-10)


@pytest.mark.parametrize("options", EVERY_OPTION, ids=str)
def test_microbatch_sums_add_up_to_the_whole(options):
    """A weight does not depend on its micro-batch, to the last bit; sums over micro-batches add up to the batch's."""
    for batch, old, rollout in itertools.islice(cases(), 50):
        whole = correction_sums(old, rollout, batch.mask, batch.cu_seqlens, options)
        weights, parts = correction_weights(old, rollout, batch.mask, batch.cu_seqlens, options), []
        for start, stop in itertools.pairwise(batch.cu_seqlens.tolist()):
            part = (old[start:stop], rollout[start:stop], batch.mask[start:stop], torch.tensor([0, stop - start]))
            assert torch.equal(correction_weights(*part, options), weights[start:stop])
            parts.append(correction_sums(*part, options))
        sums, maxima = sum(part[0] for part in parts), torch.stack([part[1] for part in parts]).amax(0)
        torch.testing.assert_close(sums, whole[0], rtol=1e-11, atol=1e-11)
        assert torch.equal(maxima, whole[1])


@pytest.mark.parametrize("options", EVERY_OPTION, ids=str)
def test_equal_logprobs_need_no_correction(options):
    old, mask, borders = -30 * torch.rand(100), torch.rand(100) < 0.5, torch.tensor([0, 40, 100])
    weights = correction_weights(old, old.clone(), mask, borders, options)
    assert torch.equal(weights, torch.ones(100)) and weights.dtype == torch.float32
    report = correction_report(*correction_sums(old, old.clone(), mask, borders, options))
    ones = ("correction/weight_mean", "correction/weight_max", "correction/applied_mean")
    assert all(value == float(key in (*ones, "correction/effective_sample_size")) for key, value in report.items())


@pytest.mark.parametrize("options", EVERY_OPTION, ids=str)
def test_values_outside_the_mask_are_ignored_and_nothing_carries_a_gradient(options):
    mask, borders = torch.tensor([False, True, True, False, True]), torch.tensor([0, 3, 3, 5])
    old, rollout = torch.randn(5, requires_grad=True), torch.randn(5, requires_grad=True)
    noisy = [torch.where(mask, field, math.nan) for field in (old, rollout)]
    clean = correction_weights(old, rollout, mask, borders, options)
    assert torch.equal(correction_weights(*noisy, mask, borders, options), clean) and not clean.requires_grad
    sums = [correction_sums(*pair, mask, borders, options) for pair in ((old, rollout), noisy)]
    assert torch.equal(sums[0][0], sums[1][0]) and not sums[0][0].requires_grad


def test_a_batch_without_response_tokens_reports_zeros():
    for options in EVERY_OPTION:
        empty, mask, borders = torch.randn(3), torch.zeros(3, dtype=torch.bool), torch.tensor([0, 3])
        report = correction_report(*correction_sums(empty, empty, mask, borders, options))
        assert set(report.values()) == {0.0}
        assert torch.equal(correction_weights(empty, empty, mask, borders, options), torch.ones(3))


def test_a_masked_token_stays_in_the_denominator():
    old, rollout = torch.tensor([3.0, 2.0, 0.5, 0.25]).log(), torch.zeros(4)
    mask, borders = torch.ones(4, dtype=torch.bool), torch.tensor([0, 2, 4])
    weights = correction_weights(old, rollout, mask, borders, CorrectionOptions("mis", "token", cap=2.5))
    torch.testing.assert_close(weights, torch.tensor([0.0, 2.0, 0.5, 0.25]))
    loss = aggregate(weights * torch.ones(4), mask, borders, "token-mean", local_counts(mask, borders))
    assert float(loss) == pytest.approx(2.75 / 4)


def test_wrong_shapes_are_rejected():
    with pytest.raises(ValueError, match=r"old_logprobs \[2\], rollout_logprobs \[1\]"):
        mask = torch.ones(2, dtype=torch.bool)
        correction_weights(torch.ones(2), torch.ones(1), mask, torch.tensor([0, 2]), CorrectionOptions())


def test_the_kinds_are_all_covered():
    assert {options.kind for options in EVERY_OPTION} == set(CORRECTIONS) == {kind for kind, _ in KINDS}


# -- off-policy sequence masking ----------------------------------------------------------------------------------


def test_tokens_with_a_negative_advantage_of_far_responses_are_dropped():
    dropped = 0
    for case, batch in enumerate(ragged_batches()):
        rollout, old, advantages = -batch.normal().abs(), -batch.normal().abs(), batch.normal()
        logprobs = rollout + batch.normal((0.01, 0.3, 3.0)[case % 3])
        noisy = [torch.where(batch.mask, field, math.nan) for field in (logprobs, old, advantages, rollout)]
        kept, threshold = off_policy_kept(policy_tokens(batch, *noisy), 0.1), 0.1
        for start, stop in itertools.pairwise(batch.cu_seqlens.tolist()):
            mask = batch.mask[start:stop]
            gaps = (rollout - logprobs)[start:stop][mask].tolist()
            is_far = bool(gaps) and math.fsum(gaps) / len(gaps) > threshold
            expected = [not (is_far and a < 0) for a in advantages[start:stop][mask].tolist()]
            assert kept[start:stop][mask].tolist() == expected
            dropped += expected.count(False)
        assert kept[~batch.mask].all()
    assert dropped > 200


# -- by staleness -------------------------------------------------------------------------------------------------

OLD = torch.tensor([-1.0, -2.0, -0.5, -1.5, -3.0])
GAPS = torch.tensor([0.0, 0.25, 0.5, -1.0, 9.0])  # log μ − log π_old
MASK = torch.tensor([True, True, True, True, False])
STALENESS = torch.tensor([0, 0, 2, 2, 0], dtype=torch.int32)


def report(shares: list[list[int]]) -> dict[str, float]:
    """The report of replicas that hold these tokens."""
    columns = [[x[share] for x in (OLD, OLD + GAPS, MASK, STALENESS)] for share in shares]
    maxima = torch.stack([staleness_maxima(*column) for column in columns]).amax(0)
    sums = sum(staleness_sums(*column, largest=int(maxima[1])) for column in columns)
    return staleness_report(maxima, sums)


def test_each_staleness_has_its_divergence_and_fresh_tokens_their_gap():
    whole = report([[0, 1, 2, 3, 4]])
    k3 = [(torch.exp(-gap) - 1 + gap).item() for gap in GAPS]
    assert whole == pytest.approx({
        "rollout/logprob_gap_max_fresh": 0.25, "correction/kl_k3_age_0": (k3[0] + k3[1]) / 2,
        "correction/kl_k3_age_2": (k3[2] + k3[3]) / 2,
    })  # fmt: skip
    assert report([[0, 4], [], [3, 1, 2]]) == pytest.approx(whole)


def test_tokens_that_do_not_occur_have_no_metric():
    assert report([[2], [4]]).keys() == {"correction/kl_k3_age_2"} and report([[4], []]) == {}


def test_proximal_log_probs_are_on_the_way_from_the_rollout_to_the_trained_policy():
    rollout, trained = -torch.rand(4), -torch.rand(4)
    staleness = torch.tensor([0, 1, 3, 0], dtype=torch.int32)
    before = proximal_logprobs(rollout, trained, staleness, 0.0)
    assert torch.equal(before, torch.where(staleness > 0, trained, rollout))  # π_θ still is π_old
    after = proximal_logprobs(rollout, trained, staleness, 1.0)
    shares = torch.tensor([0.0, 1 / 2, 3 / 4, 0.0])  # AReaL's, whose versions count whole steps
    torch.testing.assert_close(after, rollout + shares * (trained - rollout))
    half = proximal_logprobs(rollout, trained, staleness, 0.5)
    torch.testing.assert_close(half, rollout + torch.tensor([0.0, 2 / 3, 6 / 7, 0.0]) * (trained - rollout))
    assert torch.equal(half[[0, 3]], rollout[[0, 3]])


# -- rejection -----------------------------------------------------------------------------------------------------


NAMES = [f"{scope}-{kind}" for scope, kind in itertools.product(SCOPES, QUANTITIES) if (scope, kind) != ("max", "k1")]
LIMITS = {"k1": "0.7:1.6", "k2": "0.05", "k3": "0.04", "abs": "0.3"}


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
