"""Combinations of flags that the rules of algorithm.py refuse."""

import pytest

from megarl.flags import algorithm
from tests.helpers.flag_rules import check_refused, check_rules

WRONG = {
    "turns against whole episodes": ("--environment x:y --advantage grpo --credit turns", "--credit turns: needs --ad"),
    "no advantage": ("--advantage none", "--advantage none: needs --distill"),
    "an estimator of nothing": ("--distill loss --advantage grpo", "--advantage grpo: no reward counts"),
    "a reward that is left out": ("--distill loss --reward format --advantage none", "--advantage none: leaves out what"
                                  " --reward format says"),
    "a KL that is left out": ("--distill loss --kl-coefficient 0.1", "--advantage none: leaves out the KL"),
    "group of one": ("--advantage grpo --samples-per-prompt 1", "--samples-per-prompt 1: --advantage grpo compares"),
    "no baseline": ("--advantage remax", "--advantage remax: needs --greedy-baseline"),
    "gradient of a reward": ("--kl-estimator k3+", "--kl-estimator k3+: needs --kl-in loss"),
    "no target": ("--kl-controller adaptive", "--kl-controller adaptive: needs --kl-target"),
    "short horizon": ("--kl-controller adaptive --kl-target 1 --kl-horizon 12.8", "--kl-horizon 12.8: allowed is more "
                      "than 0.2 × 64 responses"),
    "comparison of one": ("--policy-loss real --samples-per-prompt 1", "--policy-loss real: compares the responses of"),
    "half a group": ("--policy-loss real --minibatch-size 6", "--minibatch-size 6: would split groups, whose response"),
    "classes that move": ("--generation-lag 1 --policy-loss real --old-logprobs interpolate",
                          "--old-logprobs interpolate: changes between the updates"),
    "classes of a teacher": ("--policy-loss real --distill reward", "--distill reward: adds to the advantages, of"),
    "probabilities without a pass": ("--advantage otb --old-logprobs rollout", "--advantage otb: reads Σπ² over the"),
    "parts and a KL": ("--advantage gdpo --reward exact-match+length", "--kl-in reward: --advantage gdpo compares"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_wrong_combinations(case):
    check_refused(*WRONG[case])


def test_each_rule_can_be_broken():
    check_rules([algorithm], WRONG.values())
