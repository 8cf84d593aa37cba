"""Combinations of flags that the rules of run.py refuse."""

from megarl.flags import run
from tests.helpers.flag_rules import check_rules

WRONG = {
    "export of factors to nowhere": ("--export-peft", "--export-peft True: needs --save"),
    "export to nowhere": ("--export-hf", "--export-hf True: needs --save"),
    "nothing to train on": ("--debug-train-only", "--debug-train-only True: needs --load-rollouts"),
    "responses twice": ("--load-rollouts x", "--load-rollouts x: needs --debug-train-only"),
    "neither half": ("--debug-train-only --load-rollouts x --debug-rollout-only",
                     "--debug-rollout-only True: not allowed with --debug-train-only"),
    "rollouts nowhere": ("--save-rollouts", "--save-rollouts True: needs --save"),
    "rollouts copied": ("--debug-train-only --load-rollouts x --save-rollouts --save y",
                        "--save-rollouts True: not allowed with --debug-train-only"),
    "memory of a run without a folder": ("--save-memory", "--save-memory True: needs --save"),
    "memory of half a run": ("--debug-train-only --load-rollouts x --save-memory --save y",
                             "--save-memory True: not allowed with --debug-train-only and --debug-rollout-only"),
    "profile nowhere": ("--profile-steps 2", "--profile-steps 2: needs --save"),
}  # fmt: skip


def test_each_rule_refuses_a_case_in_its_words():
    check_rules([run], WRONG, 5)  # flags that need another one
