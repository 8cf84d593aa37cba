"""Combinations of flags that the rules of correction.py refuse."""

import pytest

from megarl.flags import correction
from tests.helpers.flag_rules import check_refused, check_rules

WRONG = {
    "icepop without floor": ("--rollout-correction icepop", "--rollout-correction icepop: needs --rollout-correc"),
    "icepop of responses": ("--rollout-correction icepop --rollout-correction-floor 0.5 --rollout-correction-level "
                            "sequence", "--rollout-correction icepop: masks single tokens"),
    "truncated means": ("--rollout-correction tis --rollout-correction-level geometric", "--rollout-correction tis: "),
    "floor above cap": ("--rollout-correction icepop --rollout-correction-floor 3", "--rollout-correction-floor 3.0: al"
                        "lowed is at most --rollout-correction-cap 2.0"),
    "weights of a loss with weights": ("--policy-loss rollout-is --rollout-correction tis",
                                       "--rollout-correction tis: would weigh twice: --policy-loss rollout-is"),
    "weights of 1": ("--old-logprobs rollout --rollout-correction mis", "--rollout-correction mis: weighs by π_old/μ"),
    "interpolation of fresh tokens": ("--old-logprobs interpolate", "--old-logprobs interpolate: moves tokens of"),
    "routes of no pass": ("--old-logprobs rollout --router-replay old-logprob", "--old-logprobs rollout: has no pass"),
    "nothing to mask": ("--policy-loss m2po --old-logprobs rollout", "--old-logprobs rollout: leaves nothing to mask"),
    "rejection without a pass": ("--old-logprobs rollout --rollout-rejection mean-abs=0.1",
                                 "--rollout-rejection mean-abs=0.1: compares the rollout with the policy before"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_wrong_combinations(case):
    check_refused(*WRONG[case])


def test_each_rule_can_be_broken():
    check_rules([correction], WRONG.values())
