"""Combinations of flags that the rules of run.py refuse."""

import pytest

from megarl.flags import run
from tests.helpers.flag_rules import check_refused, check_rules

WRONG = {
    "export of factors to nowhere": ("--export-peft", "--export-peft True: needs --save"),
    "export to nowhere": ("--export-hf", "--export-hf True: needs --save"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_wrong_combinations(case):
    check_refused(*WRONG[case])


def test_each_rule_can_be_broken():
    check_rules([run], WRONG.values(), len(WRONG))  # flags that need another one
