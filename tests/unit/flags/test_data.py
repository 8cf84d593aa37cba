"""Combinations of flags that the rules of data.py refuse."""

from megarl.flags import data
from tests.helpers.flag_rules import check_rules

WRONG = {
    "parts of a conversation": (
        "--prompt-column a --messages-column b", "--prompt-column a: not allowed with --messages-column", "sft"),
    "responses of a conversation": (
        "--response-column a --messages-column b", "--response-column a: not allowed with --messages-column", "sft"),
    "the name of the terms": ("--eval-prompts x --evals reward=y", "--evals reward: metrics eval/reward/… are"),
    "a loss that is never known": ("--target-eval-loss 1", "--target-eval-loss 1.0: needs --eval-interval", "sft"),
    "an accuracy that is never known": (
        "--target-eval-accuracy 0.9", "--target-eval-accuracy 0.9: needs --eval-interval", "reward"),
    "equal responses": ("--eval-prompts x --eval-responses 2", "--eval-responses 2: needs --eval-temperature above 0"),
    "large k": ("--eval-prompts x --eval-k 1,2", "--eval-k 1,2: allowed is at most --eval-responses 1"),
}  # fmt: skip


def test_each_rule_refuses_a_case_in_its_words():
    check_rules([data], WRONG)
