"""Old log-probs of the rollout, rejection and normalized weights, in whole runs."""

import math

import pytest

from tests.helpers.programs import GRADED, metrics, rl_argv, samples, train
from tests.helpers.tiers import by_default

ALONE = f"{GRADED} --advantage grpo --kl-coefficient 0 --train-iters 2 --prompts-per-step 4 --samples-per-prompt 4"
AHEAD = f"{ALONE} --role-map actor=0;reward=1;rollout=1 --generation-lag 1 --train-iters 3 --lr 1e-3"
MEASURED = ("actor/loss", "actor/grad_norm", "actor/ppo_kl", "actor/ppo_kl_first", "actor/clip_fraction",
            "rollout/logprob_gap_max", "correction/weight_mean")  # fmt: skip


def rows_of(save, flags: str, size: int = 1) -> dict:
    train("rl", rl_argv(save, flags), size)
    return metrics(save)


UPDATES = {"one": "--ppo-epochs 1 --minibatch-size 16", "six": "--ppo-epochs 3 --minibatch-size 8"}


@pytest.mark.parametrize("updates", by_default(UPDATES, ("six",)))
def test_log_probs_of_the_rollout_change_no_bit_where_it_has_those_of_training(updates, tmp_path):
    flags = f"{ALONE} {UPDATES[updates]}"
    plain = rows_of(tmp_path / "plain", f"{flags} --save-interval 1")
    without = rows_of(tmp_path / "without", f"{flags} --old-logprobs rollout --save-interval 1")
    for step in (1, 2):
        assert all(plain[step][name] == without[step][name] for name in MEASURED)
        assert plain[step]["actor/ppo_kl_first"] == 0 and plain[step]["actor/grad_norm"] > 0
        assert samples(tmp_path / "plain", step) == samples(tmp_path / "without", step)
        assert "time/actor/logprobs_s" not in without[step] and "rollout/entropy" not in without[step]
        assert ("time/actor/logprobs_s" in plain[step]) == (updates == "six")


RUNS = {
    "interpolated": "--old-logprobs interpolate --ppo-epochs 2 --minibatch-size 8",
    "rejected, normalized": "--rollout-rejection token-k1=0.9:1.1 mean-abs=0.5 --rollout-correction tis"
    " --rollout-correction-normalize",
    "all rejected": "--rollout-rejection mean-abs=1e-9 --policy-loss vespo",
}


@pytest.mark.parametrize("name", by_default(RUNS, ("rejected, normalized",)))
def test_stale_responses(name, tmp_path):
    rows = rows_of(tmp_path, f"{AHEAD} {RUNS[name]}", 2)
    first, last = rows[1], rows[2 if name == "all rejected" else 3]  # without an update the third batch is not stale
    assert all(math.isfinite(value) for row in rows.values() for value in row.values())
    if name == "interpolated":
        assert last["actor/ppo_kl_first"] == 0 and last["actor/ppo_kl"] != 0 and last["rollout/logprob_gap_max"] > 0
        return
    assert first["rejection/fraction"] == 0 == first["rejection/responses"]  # the first batch is not stale
    assert last["rejection/fraction"] > 0
    if name == "all rejected":
        assert last["rejection/responses"] > 0 and last["rejection/fraction"] > 0.5
    else:
        assert last["rejection/fraction"] < 1 and last["rejection/token_k1"] > 0 and last["actor/grad_norm"] > 0
        assert last["correction/applied_mean"] != 1
