"""Combinations of flags that the rules of generation_flags.py refuse."""

from megarl.flags import generation_flags
from tests.helpers.flag_rules import check_rules

WRONG = {
    "weights beside a server": ("--rollout-server http://a:1 --load x", "--load x: the server of", "evaluate"),
    "a choice of one": ("--generation-schedule recorded --save x", "--generation-schedule recorded: needs --generati"),
    "a schedule nowhere": ("--generation-schedule recorded --generation-lag 1", "--generation-schedule recorded: need"),
    "a schedule and the clock": ("--generation-schedule recorded --generation-lag 1 --save x --replay-schedule y",
                                 "--generation-schedule recorded: not allowed with --replay-schedule"),
    "a schedule without a choice": ("--replay-schedule x", "--replay-schedule x: needs the --generation-lag of the"),
    "replicas that join and a server": ("--replica-port 9 --serve-policy",
                                        "--replica-port 9: not allowed with --serve-policy: replicas that join have"),
    "routes without reference": ("--router-replay rollout --router-replay-reference --kl-coefficient 0",
                                 "--router-replay-reference True: the run has no reference"),
}  # fmt: skip


def test_each_rule_refuses_a_case_in_its_words():
    check_rules([generation_flags], WRONG)
