"""Preferences from groups in train_rl: against train_preference on the same pairs, ties, layouts, resume."""

import math
from pathlib import Path

import pytest

from tests.helpers.programs import (
    GRADED,
    assert_close,
    metrics,
    preference_argv,
    rl_argv,
    rows_of,
    train,
    write_lines,
)
from tests.helpers.tiers import by_default

FLAGS = (
    "--advantage preference --policy-loss reinforce --loss-aggregation seq-mean-token-sum --kl-coefficient 0"
    " --minibatch-size 24 --ppo-epochs 1 --samples-per-prompt 4 --entropy-coefficient 0 --lr 1e-4"
)
NAMES = ["preference/loss", "preference/margin", "preference/chosen_logprob", "preference/rejected_logprob",
         "actor/grad_norm", "reward/mean"]  # fmt: skip


def pairs_of(save: Path, step: int) -> list[dict]:
    """The pairs of a step as lines of a file, from its samples: the first best and the first worst of each group."""
    rows = rows_of(save, step)
    groups = [rows[i : i + 4] for i in range(0, len(rows), 4)]
    best = [(max(g, key=lambda row: row["reward"]), min(g, key=lambda row: row["reward"])) for g in groups]
    pairs = [(chosen, rejected) for chosen, rejected in best if chosen["reward"] > rejected["reward"]]
    # A character is a token: the texts become the tokens that were sampled, with the end token.
    assert all(row["finished"] and row["length"] == len(row["response"]) + 1 for pair in pairs for row in pair)
    return [
        {"prompt": chosen["prompt"], "chosen": chosen["response"], "rejected": rejected["response"]}
        for chosen, rejected in pairs
    ]


@pytest.mark.parametrize("loss", by_default(["dpo", "ipo", "rpo", "simpo", "orpo"], ["dpo"]))
def test_a_step_is_one_of_train_preference_on_the_same_pairs(loss, tmp_path):
    flags = f"--preference-loss {loss}"
    long_enough = "--max-response-length 24 --max-tokens-per-microbatch 80 --temperature 1 --top-k 6"
    train("rl", rl_argv(tmp_path / "rl", f"{FLAGS} {GRADED} {flags} {long_enough} --train-iters 1"))
    pairs = pairs_of(tmp_path / "rl", 1)
    file = write_lines(tmp_path / "pairs.jsonl", pairs)
    flags += f" --prompts {file} --global-batch-size {len(pairs)} --max-response-length 24 --train-iters 1"
    train("preference", preference_argv(tmp_path / "preference", flags))
    online, offline = metrics(tmp_path / "rl")[1], metrics(tmp_path / "preference")[1]
    assert online["preference/pairs"] == len(pairs) > 3
    assert loss != "dpo" or online["preference/loss"] == math.log(2)
    assert ("kl/reference" in online) == (loss not in ("simpo", "orpo"))
    assert_close(online, offline, NAMES[:4], 1e-6)
    assert online["actor/grad_norm"] == pytest.approx(offline["preference/grad_norm"], rel=1e-5)


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Path:
    """A run with ties, in which the policy has left the reference after the first step."""
    save = tmp_path_factory.mktemp("online") / "run"
    reward = "--reward tests.helpers.programs:coarse_reward --save-interval 2"
    train("rl", rl_argv(save, f"{FLAGS} {reward} --train-iters 3"))
    return save


def test_groups_of_equal_rewards_have_no_pair_and_are_counted(alone):
    for step, row in metrics(alone).items():
        rows = rows_of(alone, step)
        equal = [len({row["reward"] for row in rows[i : i + 4]}) == 1 for i in range(0, 24, 4)]
        assert row["preference/ties"] == sum(equal) and row["preference/pairs"] == 6 - sum(equal)
    assert sum(row["preference/ties"] for row in metrics(alone).values()) > 0
    assert metrics(alone)[3]["preference/loss"] != math.log(2)
