"""Combinations of flags that the rules of algorithm.py refuse."""

from megarl.flags import algorithm
from tests.helpers.flag_rules import check_rules

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
    "icepop without floor": ("--rollout-correction icepop", "--rollout-correction icepop: needs --rollout-correc"),
    "icepop of responses": ("--rollout-correction icepop --rollout-correction-floor 0.5 --rollout-correction-level "
                            "sequence", "--rollout-correction icepop: masks single tokens"),
    "truncated means": ("--rollout-correction tis --rollout-correction-level geometric", "--rollout-correction tis: "),
    "floor above cap": ("--rollout-correction icepop --rollout-correction-floor 3", "--rollout-correction-floor 3.0: al"
                        "lowed is at most --rollout-correction-cap 2.0"),
    "weights of a loss with weights": ("--policy-loss rollout-is --rollout-correction tis",
                                       "--rollout-correction tis: would weigh twice: --policy-loss rollout-is"),
    "weights of 1": ("--old-logprobs rollout --rollout-correction mis", "--rollout-correction mis: weighs by π_old/μ"),
    "interpolation of fresh tokens": ("--old-logprobs interpolate", "--old-logprobs interpolate: moves tokens of"),
    "routes of no pass": ("--old-logprobs rollout --router-replay old-logprob", "--old-logprobs rollout: has no pass"),
    "nothing to mask": ("--policy-loss m2po --old-logprobs rollout", "--old-logprobs rollout: leaves nothing to mask"),
    "rejection without a pass": ("--old-logprobs rollout --rollout-rejection mean-abs=0.1",
                                 "--rollout-rejection mean-abs=0.1: compares the rollout with the policy before"),
}  # fmt: skip


def test_each_rule_refuses_a_case_in_its_words():
    check_rules([algorithm], WRONG)
