"""Gaps to the rollout by staleness: plain arithmetic, and the same sums over replicas."""

import pytest
import torch

from megarl.algorithms.staleness import staleness_maxima, staleness_report, staleness_sums

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
