"""Generation ahead of training: how old each response is, what meets, and that no speed changes a byte."""

import functools
import json
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from megarl.errors import UsageError
from megarl.rollout.waiting_groups import BATCH, kept_records
from megarl.trainers import step_reports
from tests.helpers import faults
from tests.helpers.forked_programs import accepted, refusal
from tests.helpers.programs import GRADED, in_world, inputs, metrics, program, rl_argv, samples, timeless, train
from tests.helpers.tiers import long
from tests.helpers.worlds import run_world

STEPS = 5
LAG = f"--rollout-correction tis --generation-lag 2 --train-iters {STEPS} --lr-decay-iters 9"
APART = "--role-map actor=0;critic=0;reward=1;reference=1;rollout=1"
GRPO = "--advantage grpo --kl-coefficient 0 --lr 1e-4 --reward tests.helpers.programs:coarse_reward"
FILTER = "--group-filter reward --dynamic-sampling"
RUNS = {  # ranks, flags; others are in tests/laws
    "ppo": (2, f"{GRADED} {APART}"),
    "partial rollouts of two replicas": (3, f"{GRPO} {FILTER} --over-sampling 1.5 --partial-rollouts"
                                         " --role-map actor=0;reward=1-2;rollout=1-2"),
    "replicas": (4, f"{GRADED} --role-map actor=0-1;critic=0-1;reward=2;reference=3;rollout=2-3"),
    "critic warm-up": (2, f"{GRADED} {APART} --critic-warmup-steps 2"),
}  # fmt: skip


def argv(save: Path, flags: str) -> list[str]:
    evaluation = f"--eval-prompts {inputs() / 'heldout.jsonl'} --eval-interval 2 --eval-samples 4"
    return rl_argv(save, f"{LAG} --save-interval 3 {evaluation} {flags}")


@functools.cache
def run_of(folder: Path, name: str) -> Path:
    size, flags = RUNS[name]
    save = folder / name.replace(" ", "-")
    train("rl", argv(save, flags), size)
    return save


def assert_same_steps(found: Path, expected: Path, steps):
    rows, wanted = metrics(found), metrics(expected)
    for step in steps:
        one, other = (
            {name: value for name, value in timeless(row[step]).items() if "waiting_share" not in name}
            for row in (rows, wanted)
        )
        assert one == other and samples(found, step) == samples(expected, step)


# -- what is generated ---------------------------------------------------------------------------------------------


def test_every_response_is_as_old_as_the_lag(folder):
    rows = metrics(run_of(folder, "ppo"))
    assert [rows[step]["rollout/staleness"] for step in range(1, STEPS + 1)] == [0, 1, 2, 2, 2]
    assert all(rows[step]["actor/ppo_kl_first"] == 0 for step in range(1, STEPS + 1))
    for step, age in zip(range(1, STEPS + 1), (0, 1, 2, 2, 2), strict=True):
        row = rows[step]
        assert [row[f"rollout/staleness_share_{k}"] for k in range(3)] == [float(k == age) for k in range(3)]
        assert row[f"correction/kl_k3_age_{age}"] == pytest.approx(row["correction/kl_k3"])
        assert (row["correction/kl_k3"] == 0) == (age == 0)
        assert row.get("rollout/logprob_gap_max_fresh") == (None if age else 0)
        assert row["weights/staged_bytes"] == min(step, 2) * row["weights/sync_bytes"] > 0 <= row["weights/slot_wait_s"]
        assert row["rollout/mixed_version_fraction"] == 0 <= row["rollout/lead"] <= 2


@pytest.mark.long
def test_a_critic_that_warms_up_delays_the_lag(folder):
    warm_up = metrics(run_of(folder, "critic warm-up"))
    assert [warm_up[step]["rollout/staleness"] for step in range(1, STEPS + 1)] == [0, 0, 0, 1, 2]


@pytest.mark.long
def test_replicas_of_both_sides_generate_the_same_responses_while_the_weights_are_equal(folder):
    """Sums of several replicas round differently, so only responses of the first weights are equal."""
    run, expected = run_of(folder, "replicas"), run_of(folder, "ppo")
    assert [metrics(run)[step]["rollout/staleness"] for step in range(1, STEPS + 1)] == [0, 1, 2, 2, 2]
    assert [samples(run, step) == samples(expected, step) for step in (1, 2, 3)] == [True] * 3


def test_a_run_with_batches_that_wait_resumes_with_its_lag_alone(folder, tmp_path):
    size, flags = RUNS["ppo"]
    start = run_of(folder, "ppo") / "checkpoints" / "step_00000003"
    assert sorted(path.name for path in start.glob("queued*"))
    line = refusal(argv(tmp_path / "other", f"{flags} --generation-lag 1 --load {start}"), size=size)
    assert "--generation-lag 1: the checkpoint of --load " in line and "; allowed is --generation-lag 2" in line


# -- what meets ----------------------------------------------------------------------------------------------------


def held_up(rank: int, parsed, side: str) -> int:
    """Runs a program whose trained ranks wait until the rollout is as far ahead as it may be, or whose rollout waits
    for them; how often it has waited."""
    from megarl.roles.actor import Actor
    from megarl.rollout.batcher import RolloutBatcher

    store, collect, update = dist.distributed_c10d._get_default_store(), RolloutBatcher._collect, Actor.update
    waits = []

    def wait_for(key: str):
        store.wait([key], timedelta(seconds=60))
        waits.append(key)

    def collected(batcher, step):
        if side == "rollout" and step > 1:
            wait_for(f"trained {step - 1}")
        found = collect(batcher, step)
        store.set(f"generated {step}", "1")
        return found

    def updated(actor, batch, kl_coefficient):
        if rank == 0 and side == "training" and batch.step + 2 <= STEPS:
            wait_for(f"generated {batch.step + 2}")
        update(actor, batch, kl_coefficient)
        if rank == 0:
            store.set(f"trained {batch.step}", "1")

    RolloutBatcher._collect, Actor.update = collected, updated
    in_world(rank, "rl", parsed)
    return len(waits)


@pytest.mark.parametrize("side, waits", [("training", [STEPS - 2, 0]), long(("rollout", [0, STEPS - 1]))])
def test_no_side_waits_for_more_than_it_needs(side, waits, folder, tmp_path):
    """Any meeting of all ranks within a step would end in a time-out."""
    flags = f"{RUNS['ppo'][1]} --save {tmp_path} --eval-interval 9 --save-interval 9"
    assert run_world(held_up, 2, program("rl", argv(tmp_path, flags), 2), side) == waits
    for step in (1, 2, 3, 4):
        assert samples(tmp_path, step) == samples(run_of(folder, "ppo"), step)
    lead = [metrics(tmp_path)[step]["rollout/lead"] for step in range(1, STEPS + 1)]
    assert lead == [0] * STEPS if side == "rollout" else lead[1] >= 1 <= lead[2] and max(lead) <= 2


def slowed(rank: int, parsed, place: str):
    """Runs a program in which one kind of work takes longer."""
    from megarl.roles.actor import Actor
    from megarl.roles.reward import Reward
    from megarl.rollout.rollout import Rollout
    from megarl.rollout.weight_sync import WeightSync

    owner, name = {"update": (Actor, "update"), "reward": (Reward, "score"), "rollout": (Rollout, "generate"),
                   "weights": (WeightSync, "_meet")}[place]  # fmt: skip
    method = getattr(owner, name)

    def slow(*args, **kwargs):
        time.sleep(0.1)
        return method(*args, **kwargs)

    setattr(owner, name, slow)
    in_world(rank, "rl", parsed)


@pytest.mark.parametrize("place", [long("update"), long("reward"), long("rollout"), long("weights")])
def test_no_speed_changes_a_byte(place, folder, tmp_path):
    name = "partial rollouts of two replicas"
    size, flags = RUNS[name]
    run_world(slowed, size, program("rl", argv(tmp_path, flags), size), place)
    assert_same_steps(tmp_path, run_of(folder, name), range(1, STEPS + 1))


def test_a_stopped_run_keeps_the_batches_that_were_generated(folder, tmp_path):
    size, flags = RUNS["ppo"]
    run_world(faults.stopped_in_update, size, program("rl", argv(tmp_path, flags), size), 2)
    start = tmp_path / "checkpoints" / "step_00000002"
    kept = kept_records(start)
    assert [step for step in range(STEPS + 1) if kept.entries(BATCH, step)] == [3, 4]
    train("rl", argv(tmp_path / "resumed", f"{flags} --load {start}"), size)
    assert_same_steps(tmp_path / "resumed", run_of(folder, "ppo"), range(3, STEPS + 1))


@pytest.mark.long
@pytest.mark.parametrize("lag", [2, 4])
def test_fewer_copies_of_the_weights_than_steps_of_lag_change_nothing(lag, folder, tmp_path):
    def one_copy(rank: int, parsed):
        from megarl.rollout.weight_sync import WeightSync

        send = WeightSync.send_copy

        def sent(sync):
            sync._copies = 1
            return send(sync)

        WeightSync.send_copy = sent
        in_world(rank, "rl", parsed)

    size, flags = RUNS["ppo"]
    flags += f" --generation-lag {lag}"
    if lag != 2:
        train("rl", argv(tmp_path / "all", flags), size)
    expected = run_of(folder, "ppo") if lag == 2 else tmp_path / "all"
    run_world(one_copy, size, program("rl", argv(tmp_path / "one", flags), size))
    rows, wanted = metrics(tmp_path / "one"), metrics(expected)
    assert_same_steps(tmp_path / "one", expected, range(1, STEPS + 1))
    for step in range(1, STEPS + 1):
        row, copies = rows[step], wanted[step]["weights/staged_bytes"] / wanted[step]["weights/sync_bytes"]
        assert row["weights/staged_bytes"] == row["weights/sync_bytes"] and copies == min(step, lag)
    assert wanted[STEPS]["rollout/staleness"] == lag


# -- flags ---------------------------------------------------------------------------------------------------------


OF_THE_ACTOR = "--generation-lag 2: needs a rollout in --role-map on other ranks than the actor"
LEADS = [  # role map, start of the message; None: accepted
    ("", OF_THE_ACTOR),
    ("actor=0;critic=1;reward=2;reference=2;rollout=1-3", OF_THE_ACTOR.replace("actor", "critic")),
    ("actor=0;critic=1;reward=1-2;reference=0;rollout=2-3", "--generation-lag 2: the reward shares ranks with"),
    ("actor=0;critic=0;reward=1;reference=1;rollout=2-3 --group-filter reward", None),
    ("actor=0;critic=0;reward=0;reference=1;rollout=2-3 --group-filter reward",
     "--generation-lag 2: --group-filter needs the scores of a batch before it is trained on"),
]  # fmt: skip


@pytest.mark.parametrize("roles, needle", LEADS)
def test_ranks_that_lead(roles, needle, tmp_path):
    words = argv(tmp_path, roles and f"--role-map {roles}")
    if needle is None:
        assert accepted(words, size=4)
    else:
        assert needle in refusal(words, size=4)


def test_a_run_that_goes_on_has_records_of_its_own(folder, monkeypatch):
    """Ranks that generate had nothing to do in the last iterations, whose records are no steps'."""
    checkpoints = run_of(folder, "ppo") / "checkpoints"
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    for step, held in ((3, {4, 5}), (5, set())):
        records = step_reports.StepRecords()
        records.restore(checkpoints / f"step_{step:08d}", STEPS, reporting_rank=1)
        assert records._restored.keys() == held


def test_damaged_records_are_wrong_input(folder, tmp_path):
    start = run_of(folder, "ppo") / "checkpoints" / "step_00000003"
    assert list(json.loads((start / step_reports.FILE).read_text())) == ["4", "5"]
    (tmp_path / step_reports.FILE).write_text('{"4": 1}')
    with pytest.raises(UsageError, match="queued_records.json: is damaged"):
        step_reports.StepRecords().restore(tmp_path, STEPS, reporting_rank=1)
