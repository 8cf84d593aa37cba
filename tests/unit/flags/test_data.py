"""Combinations of flags that the rules of data.py refuse."""

from megarl.flags import data
from tests.helpers.flag_rules import check_rules

WRONG = {
    "parts of a conversation": (
        "--prompt-column a --messages-column b", "--prompt-column a: not allowed with --messages-column", "sft"),
    "responses of a conversation": (
        "--response-column a --messages-column b", "--response-column a: not allowed with --messages-column", "sft"),
}  # fmt: skip


def test_each_rule_refuses_a_case_in_its_words():
    check_rules([data], WRONG)
