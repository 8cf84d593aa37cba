"""Combinations of flags that the rules of environment.py refuse."""

from megarl.flags import environment
from tests.helpers.flag_rules import check_rules

WRONG = {
    "thoughts": ("--environment x:y --advantage rloo --credit turns --thinking-budget 9", "--thinking-budget 9"),
    "the clock and turns": ("--environment x:y --over-sampling 2 --generation-lag 1 --rollout-correction tis --save w"
                            " --generation-schedule recorded", "--environment x:y: not allowed with --over-sampling"),
    "a long turn": ("--environment x:y --max-turn-length 65 --max-response-length 64", "--max-turn-length 65: allow"),
    "sessions of an environment": ("--agent-sessions --environment x:y", "--agent-sessions True: drivers outside of "),
    "no turn of its own": ("--environment x:y --branch-turns 3 --max-turns 3", "--branch-turns 3: leaves an episode"),
    "a single branch": ("--environment x:y --branch-turns 1 --branch-samples 4", "--branch-samples 4: allowed is less"),
    "two servers": ("--agent-sessions --serve-policy --branch-turns 1", "--agent-sessions True: not allowed with --se"),
}  # fmt: skip


def test_each_rule_refuses_a_case_in_its_words():
    check_rules([environment], WRONG)
