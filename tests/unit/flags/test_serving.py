"""Combinations of flags that the rules of serving.py refuse."""

import pytest

from megarl.flags import serving
from tests.helpers.flag_rules import check_refused, check_rules

WRONG = {
    "server without engine": ("--debug-train-only --load-rollouts x --serve-policy",
                              "--serve-policy True: not allowed with --debug-train-only"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_wrong_combinations(case):
    check_refused(*WRONG[case])


def test_each_rule_can_be_broken():
    check_rules([serving], WRONG.values())
