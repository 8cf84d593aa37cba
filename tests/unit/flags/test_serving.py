"""Combinations of flags that the rules of serving.py refuse."""

from megarl.flags import serving
from tests.helpers.flag_rules import check_rules

WRONG = {
    "server without engine": ("--debug-train-only --load-rollouts x --serve-policy",
                              "--serve-policy True: not allowed with --debug-train-only"),
}  # fmt: skip


def test_each_rule_refuses_a_case_in_its_words():
    check_rules([serving], WRONG)
