"""Roles that work at the same time: a batch generated ahead, sends and metrics that do not block."""

import traceback
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import megarl
from megarl.batch import ACTOR, GENERATED, fields_sent
from megarl.comm import exchange
from megarl.comm.announcements import Announcements
from megarl.comm.step_batch import StepBatch
from megarl.flags.settings import Settings
from megarl.groups import PromptGroups
from megarl.observe.timers import Timers
from megarl.trainers.rl_trainer import RLInputs
from megarl.trainers.step_reports import AsyncMetrics, StepReport
from tests.helpers.models.batches import create_mesh, random_batch, sequences
from tests.helpers.programs import in_world, program, rl_argv
from tests.helpers.worlds import run_world
from tools.bench import overlap

EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32"


# -- meetings of a step ------------------------------------------------------------------------------------------

# What ranks that generate and ranks that train do together in a step. Everything else they do apart, so a collective
# that is not in this list would make the one side wait for the other.
MEETINGS = {
    ("all_to_all_single", "comm/exchange.py"),  # responses, scores and routes
}
COLLECTIVES = ("all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "all_to_all_single",
               "barrier", "broadcast", "broadcast_object_list", "gather", "gather_object", "scatter")  # fmt: skip


def meetings(rank: int, parsed) -> set[tuple[str, str]]:
    """The collectives of a step between ranks of the rollout and of the actor: name, file of the caller."""
    from megarl.checkpoint import writer
    from megarl.rollout.batcher import RolloutBatcher

    found, recorded, package = set(), [False], Path(megarl.__file__).parent
    generates, trains = (set(parsed.roles[role].ranks) for role in ("rollout", "actor"))

    def noted(name, collective):
        def call(*args, **kwargs):
            group = kwargs.get("group") or next((arg for arg in args if isinstance(arg, dist.ProcessGroup)), None)
            ranks = set(dist.get_process_group_ranks(group or dist.group.WORLD))
            if recorded[0] and ranks & generates and ranks & trains:
                callers = [Path(frame.filename) for frame in reversed(traceback.extract_stack())]
                caller = next(path for path in callers if path.is_relative_to(package))
                found.add((name, caller.relative_to(package).as_posix()))
            return collective(*args, **kwargs)

        return call

    for name in COLLECTIVES:
        setattr(dist, name, noted(name, getattr(dist, name)))
    generate = RolloutBatcher.generate

    def recording(batcher, step):
        recorded[0] = step == 3  # the second step saves, the last one waits for all ranks' metrics
        return generate(batcher, step)

    RolloutBatcher.generate = recording
    assert writer._Pending.completes
    writer._Pending.completes = lambda pending, step: False  # the checkpoint of step 2 is completed at the end
    in_world(rank, "rl", parsed)
    return found


def test_ranks_that_generate_and_ranks_that_train_meet_where_the_list_says(tmp_path):
    flags = (
        f"{EXPERTS} --router-replay rollout --advantage grpo --group-filter reward --dynamic-sampling"
        " --partial-rollouts --over-sampling 1.5 --rollout-correction tis --async-save"
        " --role-map actor=0;reward=1;reference=1;rollout=1 --reward tests.helpers.programs:coarse_reward"
        " --save-interval 2 --train-iters 4"
    )
    found = run_world(meetings, 2, program("rl", rl_argv(tmp_path, flags, warm_start=False), 2))
    assert found == [MEETINGS] * 2


# -- no blocking -------------------------------------------------------------------------------------------------


def store_of_ranks() -> dist.Store:
    return dist.distributed_c10d._get_default_store()


def send_and_continue(rank: int):
    mesh, store = create_mesh("--role-map actor=0;critic=1;reward=1;reference=1"), store_of_ranks()
    dp_assignment = {role: torch.zeros(6, dtype=torch.int64) for role in ("actor", "critic")}
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


def dispatch_and_continue(rank: int):
    mesh, store = create_mesh("--role-map actor=0;critic=0;reward=1;reference=1;rollout=1"), store_of_ranks()
    dp_assignment = {role: torch.zeros(6, dtype=torch.int64) for role in mesh.roles}
    responses = random_batch(1, fields_sent(Settings(), [GENERATED], ACTOR), ids=torch.arange(6))
    if rank == 0:
        store.wait(["gone on"], timedelta(seconds=20))
    batch = StepBatch(
        mesh, Timers(), dp_assignment, responses if rank == 1 else None, 1, None, PromptGroups.equal(6, 1), Settings()
    )
    batch.dispatch("actor", "reward", "reference", "critic")
    if rank == 1:
        store.set("gone on", "1")
    batch.wait_sends()
    return sequences(batch["actor"] if rank == 0 else responses)


def test_the_rollout_does_not_wait_until_its_responses_are_received():
    received, sent = run_world(dispatch_and_continue, 2)
    assert received == sent


def announce(rank: int) -> list[dict]:
    """The first rank is three messages ahead of the two that take them."""
    announcements, store = Announcements("test", 0, [1, 2]), store_of_ranks()
    if rank == 0:
        for number in range(3):
            announcements.send({"number": number})
        store.set("sent", "1")
        return []
    announcements.send({"number": -1})  # not the sender
    store.wait(["sent"], timedelta(seconds=20))
    taken = [announcements.take() for _ in range(3)]
    store.add("taken", 1)
    while store.add("taken", 0) < 2:
        pass
    return [*taken, store.check([f"megarl/test/{number}" for number in (1, 2, 3)])]


def test_a_message_waits_for_all_of_its_receivers_and_is_deleted_then():
    taken = [{"number": 0}, {"number": 1}, {"number": 2}, False]
    assert run_world(announce, 3) == [[], taken, taken]


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
