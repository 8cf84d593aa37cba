"""Combinations of flags that the rules of distillation.py refuse."""

import pytest

from megarl.flags import distillation
from tests.helpers.flag_rules import check_refused, check_rules
from tests.helpers.pages.flag_cases import CONTEXT

WRONG = {
    "advantages of examples": ("--distill reward --teacher-hf-model x", "--distill reward: adds to advantages", "sft"),
    "an average of examples": ("--distill loss --teacher ema", "--teacher ema: only in train_rl", "sft"),
    "an average of nothing": ("--distill loss --teacher ema", "--teacher ema: needs --ema-decay"),
    "an average ahead of itself": ("--distill loss --teacher ema --ema-decay 0.9 --generation-lag 1"
                                   " --rollout-correction tis", "--teacher ema: needs --generation-lag 0"),
    "folders of a start": ("--distill loss --teacher self --teachers a=b", "--teachers a=b: names the teachers' folde"),
    "a response alone": (CONTEXT.replace("grpo --samples-per-prompt 4", "reinforce++ --samples-per-prompt 1"),
                         "--teacher-context sibling: needs --samples-per-prompt 2 or more"),
    "siblings without rewards": (CONTEXT.replace("--reward exact-match --advantage grpo", ""),
                                 "--teacher-context sibling: needs a --reward that says which responses are correct"),
    "no room for a sibling": (CONTEXT.replace("9000", "512"), "--teacher-context sibling: needs --teacher-max-prompt"),
    "siblings of an environment": (f"{CONTEXT.replace('exact-match', 'environment')} --environment x:y",
                                   "--teacher-context sibling: not allowed with --environment"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_wrong_combinations(case):
    check_refused(*WRONG[case])


def test_each_rule_can_be_broken():
    check_rules([distillation], WRONG.values())
