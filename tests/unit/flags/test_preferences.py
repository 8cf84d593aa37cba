"""Combinations of flags that the rules of preferences.py refuse."""

from megarl.flags import preferences
from tests.helpers.flag_rules import check_rules
from tests.helpers.pages.flag_cases import ONLINE

WRONG = {
    "pairs without labels": (f"{ONLINE} --preference-loss kto", "--preference-loss kto: reads single responses; allowed"
                             " with --advantage preference are dpo, ipo, simpo, orpo, rpo"),
    "pairs and ratios": (f"{ONLINE} --policy-loss ppo-clip", "--policy-loss ppo-clip: --advantage preference needs"),
    "pairs and means": (f"{ONLINE} --loss-aggregation token-mean", "--loss-aggregation token-mean: --advantage prefer"),
    "a second update on pairs": (f"{ONLINE} --minibatch-size 32", "--advantage preference: is the gradient before the"),
    "rewards with a KL": (f"{ONLINE} --kl-in reward", "--advantage preference: compares rewards without a KL; needs"),
    "weighted pairs": (f"{ONLINE} --rollout-correction tis", "--rollout-correction tis: --advantage preference needs"),
    "half a pair": (f"{ONLINE} --mask-truncated-responses", "--mask-truncated-responses True: not allowed with --adva"),
    "preferences without a pass": (f"{ONLINE} --old-logprobs rollout", "--old-logprobs rollout: --advantage"),
    "rejected pairs": (f"{ONLINE} --rollout-rejection mean-abs=0.1", "--rollout-rejection mean-abs=0.1: not allowed"),
}  # fmt: skip


def test_each_rule_refuses_a_case_in_its_words():
    check_rules([preferences], WRONG)
