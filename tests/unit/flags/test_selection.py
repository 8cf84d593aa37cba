"""Combinations of flags that the rules of selection.py refuse."""

from megarl.flags import selection
from tests.helpers.flag_rules import check_rules

WRONG = {
    "groups without rewards": ("--distill loss --group-filter reward", "--group-filter reward: no reward counts"),
    "pools of single responses": ("--pool-bounds 0.1,0.9 --samples-per-prompt 1", "--pool-bounds 0.1,0.9: needs --sam"),
    "pools without a reward": ("--distill loss --pool-bounds 0.1,0.9", "--pool-bounds 0.1,0.9: needs a --reward that"),
    "pools of saved responses": ("--pool-bounds 0.1,0.9 --debug-train-only --load-rollouts x",
                                 "--pool-bounds 0.1,0.9: not allowed with --debug-train-only"),
    "filter of single responses": ("--group-filter reward --samples-per-prompt 1", "--group-filter reward: needs --s"),
    "nothing to fill up": ("--dynamic-sampling", "--dynamic-sampling True: needs --group-filter"),
    "parts of nothing": ("--partial-rollouts", "--partial-rollouts True: needs --over-sampling above 1"),
    "parts without correction": ("--partial-rollouts --over-sampling 2", "--partial-rollouts True: needs a --rollout"),
    "older than the lag allows": ("--generation-lag 3 --over-sampling 2 --partial-rollouts --rollout-correction tis"
                                  " --max-staleness 2", "--max-staleness 2: allowed is 0, or at least --generation-l"),
}  # fmt: skip


def test_each_rule_refuses_a_case_in_its_words():
    check_rules([selection], WRONG)
