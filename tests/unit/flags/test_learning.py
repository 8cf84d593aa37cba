"""Combinations of flags that the rules of learning.py refuse."""

import pytest

from megarl.flags import learning
from tests.helpers.flag_rules import check_refused, check_rules

WRONG = {
    "large mini-batch": ("--minibatch-size 65", "--minibatch-size 65: allowed is at most --prompts-per-step × --sam"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_wrong_combinations(case):
    check_refused(*WRONG[case])


def test_each_rule_can_be_broken():
    check_rules([learning], WRONG.values())
