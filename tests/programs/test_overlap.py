"""Roles that work at the same time: a batch generated ahead, sends and metrics that do not block."""

from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megarl.batch import round_robin
from megarl.comm import exchange
from megarl.errors import UsageError
from megarl.trainers.async_metrics import AsyncMetrics, StepReport
from megarl.trainers.rl_trainer import RLInputs
from tests.helpers.batches import create_mesh, random_batch, sequences
from tests.helpers.exactness import largest_gap_allowed
from tests.helpers.programs import metrics, program, rl_argv, samples, timeless, train
from tests.helpers.tiers import long
from tests.helpers.worlds import RankFailed, run_world
from tools.bench import overlap

GRADED = "--reward tests.helpers.programs:graded_reward"
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32"


def assert_same_step(one, other, step: int):
    """Two runs agree in a step to the bit, in samples and metrics."""
    first, second = (timeless(metrics(save)[step]) for save in (one, other))
    assert {name for name in first | second if first.get(name) != second.get(name)} <= {"weights/sync_s"}
    assert samples(one, step) == samples(other, step)


# -- one step off ------------------------------------------------------------------------------------------------

AHEAD = f"{GRADED} --role-map actor=0;critic=0;reward=1;reference=1;rollout=1 --rollout-correction tis"
AHEAD += " --lr-decay-iters 3"


@pytest.mark.parametrize("model", ["", long(EXPERTS)], ids=["dense", "experts"])
def test_a_batch_generated_ahead_survives_an_interruption(model, tmp_path):
    whole, resumed, plain = (tmp_path / name for name in ("whole", "resumed", "plain"))
    ahead, warm_start = f"{AHEAD} {model}", not model
    train("rl", rl_argv(whole, f"--train-iters 3 --save-interval 2 {ahead} --one-step-off", warm_start), 2)
    start = whole / "checkpoints" / "step_00000002"
    train("rl", rl_argv(resumed, f"--train-iters 3 {ahead} --one-step-off --load {start}", warm_start), 2)
    assert_same_step(whole, resumed, 3)
    rows = metrics(whole)
    assert [rows[step]["rollout/staleness"] for step in (1, 2, 3)] == [0, 1, 1]
    assert rows[1]["rollout/logprob_gap_max"] <= largest_gap_allowed() < 1e-3 < rows[2]["rollout/logprob_gap_max"]
    assert all(row["actor/ppo_kl_first"] == 0 for row in rows.values())
    train("rl", rl_argv(plain, f"--train-iters 1 {ahead}", warm_start), 2)
    assert samples(plain, 1) == samples(whole, 1) and samples(whole, 2) != samples(whole, 3)
    for name in ("actor/loss", "critic/loss", "actor/grad_norm", "kl/reference"):
        assert metrics(plain)[1][name] == rows[1][name]
    with pytest.raises(RankFailed, match="--load: a batch of 6 groups was generated ahead; allowed are --one-step-off"):
        train("rl", rl_argv(tmp_path / "refused", f"--train-iters 3 {ahead} --load {start}", warm_start), 2)


# -- flags -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flags, needle", [
    ("--one-step-off --rollout-correction tis", "--one-step-off: needs a rollout in --role-map on other ranks"),
])  # fmt: skip
def test_overlap_needs_disjoint_ranks(flags, needle, tmp_path):
    with pytest.raises(UsageError) as caught:
        RLInputs(program("rl", rl_argv(tmp_path, flags), 4))
    assert str(caught.value).startswith(needle) and "\n" not in str(caught.value)


# -- no blocking -------------------------------------------------------------------------------------------------


def store_of_ranks() -> dist.Store:
    return dist.distributed_c10d._get_default_store()


def send_and_continue(rank: int):
    mesh, store = create_mesh("--role-map actor=0;critic=1;reward=1;reference=1"), store_of_ranks()
    dp_assignment = {role: round_robin(torch.arange(6), 1, 2) for role in ("actor", "critic")}
    parts, pending = (
        [random_batch(number, ["tokens"], ids=torch.arange(6)) for number in (1, 2, 3)],
        exchange.PendingSends(),
    )
    if rank == 1:
        store.wait(["gone on"], timedelta(seconds=20))  # the giver must not need this rank to get here
    mine = parts if rank == 0 else [None] * 3
    taken = [exchange.send(mesh, part, "actor", "critic", ["tokens"], dp_assignment, pending) for part in mine]
    if rank == 0:
        store.set("gone on", "1")
    pending.wait()
    return [sequences(part) for part in parts] if rank == 0 else [sequences(batch) for batch in taken]


def test_a_sender_does_not_wait_for_the_receiver():
    given, taken = run_world(send_and_continue, 2)
    assert given == taken


def report(rank: int, value: float) -> StepReport:
    return StepReport({"value": value}, {}, float(rank), [])


def publish(rank: int):
    from megarl.comm.role_mesh import RoleMesh

    store, metrics_of_ranks = store_of_ranks(), AsyncMetrics(RoleMesh({}, {}, {}), timedelta(seconds=20))
    metrics_of_ranks.publish(1, report(rank, 0.1))
    if rank == 1:
        store.wait(["half"], timedelta(seconds=20))
        metrics_of_ranks.publish(2, report(rank, 0.2))
        return metrics_of_ranks.poll(wait=True)
    store.wait(["megarl/report/1/1"], timedelta(seconds=20))
    metrics_of_ranks.publish(2, report(rank, 0.2))
    half = metrics_of_ranks.poll(wait=False)
    store.set("half", "1")
    return half, metrics_of_ranks.poll(wait=True), metrics_of_ranks.poll(wait=True)


def test_rank_0_reads_the_metrics_of_all_ranks():
    (half, rest, nothing), other = run_world(publish, 2)
    assert half == [(1, [report(0, 0.1), report(1, 0.1)])] and rest == [(2, [report(0, 0.2), report(1, 0.2)])]
    assert nothing == other == []


# -- the benchmark -----------------------------------------------------------------------------------------------


def test_the_benchmark_reports_both_sides(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["overlap.py", "--sides", "ahead,nothing"])
    with pytest.raises(SystemExit) as caught:
        overlap.main()
    assert caught.value.code == 2 and "--sides nothing: allowed are before, replicas, " in capsys.readouterr().err
    sides = {
        name: {"idle": {"time/idle_fraction": idle, "time/critic/idle_fraction": 0.5}, "step_s": 2.0}
        for name, idle in (("before", 0.4), ("ahead", 0.1))
    }
    lines = overlap.table({"sides": sides, "idle_ratio": {"ahead": 0.25}}, markdown=False).splitlines()
    assert lines == [
        "before  40.0% idle  critic 50%  2.00 s per step  ",
        "ahead  10.0% idle  critic 50%  2.00 s per step  0.25 × as idle",
    ]
    for flags in overlap.SIDES.values():
        RLInputs(program("rl", rl_argv(Path("unused"), flags), overlap.RANKS))
