"""Gaps to the rollout by staleness: plain arithmetic, and the same sums over replicas."""

import pytest
import torch

from megarl.algorithms.staleness import proximal_logprobs, staleness_maxima, staleness_report, staleness_sums

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
