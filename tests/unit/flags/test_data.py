"""Combinations of flags that the rules of data.py refuse."""

import pytest

from megarl.flags import data
from tests.helpers.flag_rules import check_refused, check_rules

WRONG = {
    "parts of a conversation": (
        "--prompt-column a --messages-column b", "--prompt-column a: not allowed with --messages-column", "sft"),
    "responses of a conversation": (
        "--response-column a --messages-column b", "--response-column a: not allowed with --messages-column", "sft"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_wrong_combinations(case):
    check_refused(*WRONG[case])


def test_each_rule_can_be_broken():
    check_rules([data], WRONG.values())
