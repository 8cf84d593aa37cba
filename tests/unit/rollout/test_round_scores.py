"""What the scores of a round decide: which groups the filters keep, and what the baselines are."""

import math
from types import SimpleNamespace

import pytest
import torch

from megarl.rollout.round_scores import GenerationRound, RoundScorer, between, differ, means_of

NAN = math.nan
VALID = torch.tensor([[True, True, True], [True, True, False], [False, False, False]])


def test_means_are_of_what_counts():
    found = means_of(torch.tensor([[1.0, 0.0, 2.0], [1.0, 2.0, 9.0], [1.0, 1.0, 1.0]]), VALID)
    assert found[:2].tolist() == [1.0, 1.5] and found[2].isnan()


def test_a_group_differs_by_what_counts():
    values = torch.tensor([[1.0, 1.0, 0.0], [1.0, 1.0, 0.0], [1.0, 0.0, 1.0]])
    assert differ(values, VALID).tolist() == [True, False, False]


@pytest.mark.parametrize("means, kept", [((0.0, 0.1, 0.9, 1.0), (0, 1, 1, 0)), ((NAN, -0.5, 1.5, 0.5), (0, 0, 0, 1))])
def test_the_bounds_of_the_range_are_outside(means, kept):
    """DAPO keeps 0 < correct < group size (arXiv 2503.14476, eq. 11)."""
    assert between(torch.tensor(means), (0.0, 1.0)).tolist() == [bool(each) for each in kept]


def test_greedy_responses_are_scored_as_in_an_evaluation():
    """So that they move no running moment and count in no statistic of the training responses."""
    scorer, asked = RoundScorer.__new__(RoundScorer), []
    scorer._score = lambda batch, groups, step, for_training=True: asked.append(for_training) or (None, [])
    scorer.settings = SimpleNamespace(greedy_baseline=True, samples_per_prompt=2)
    scorer._set_baselines(GenerationRound(lines=[3, 5]), step=1)
    assert asked == [False]
