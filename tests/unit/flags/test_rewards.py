"""Combinations of flags that the rules of rewards.py refuse."""

from megarl.flags import rewards
from tests.helpers.flag_rules import check_rules

WRONG = {
    "no reward model": ("--reward model+format", "--reward model+format: needs --reward-model"),
    "baseline in other units": ("--reward model --reward-model x --reward-clip 2 --advantage remax --greedy-baseline",
                                "--greedy-baseline True: uses raw scores"),
    "two models of one role": ("--reward model+judge --reward-model x --judge-config y --judge-load z",
                               "--reward model+judge: the reward role runs one model"),
    "a judge without a file": ("--reward judge --judge-load x", "--reward judge: needs --judge-config"),
    "a judge without weights": ("--reward judge --judge-config x", "--reward judge: needs --judge-hf-model or "),
    "rewards of no environment": ("--reward 0.5*environment", "--reward 0.5*environment: needs --environment"),
    "rewards that do not count": ("--reward 0*exact-match", "--reward 0*exact-match: every weight is 0; at least one"),
    "nothing to learn from": ("--reward none", "--reward none: needs --distill"),
    "an evaluation of nothing": ("--distill loss --eval-prompts x", "--eval-prompts x: needs a --reward that measures"),
    "no pattern": ("--reward regex", "--reward regex: needs --reward-pattern"),
    "no address": ("--reward 0.5*remote", "--reward 0.5*remote: needs --reward-url"),
    "the mean of one": ("--reward exact-match+adaptive-length --samples-per-prompt 1", "--samples-per-prompt 1: adap"),
    "penalty longer than a response": ("--overlong-buffer 9 --max-response-length 8", "--overlong-buffer 9: allowed is "
                                       "at most --max-response-length 8"),
}  # fmt: skip


def test_each_rule_refuses_a_case_in_its_words():
    check_rules([rewards], WRONG)
