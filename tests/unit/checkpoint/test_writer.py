"""Asynchronous saves have the bytes of synchronous ones; saves that fail end alike on all ranks; what is kept."""

import errno
import json
import os
import resource
import threading
from pathlib import Path

import pytest
import torch

from megarl.arguments import Settings
from megarl.checkpoint import commit, folders
from megarl.checkpoint.writer import CheckpointWriter, SaveError
from megarl.errors import UsageError
from megarl.mcore.weights import checkpoint_files
from megarl.observe.files import step_of
from tests.helpers.checkpoints import saved
from tests.helpers.programs import in_world, inputs, metrics, program, sft_argv, timeless, train
from tests.helpers.tiers import long
from tests.helpers.worlds import SAFETY, SAFETY_SECONDS, run_world

TP2 = "--tensor-model-parallel-size 2"
ENTRIES = {"program": "test"}


def trainable_model(parsed):
    from megarl.comm import role_mesh
    from megarl.roles.trainable_model import TrainableModel

    mesh = role_mesh.create_mesh(parsed.roles, SAFETY)
    return mesh, TrainableModel(parsed.roles["actor"], mesh["actor"], 16, updates=1)


def parsed(folder: Path, size: int, flags: str = ""):
    return program("sft", sft_argv(folder, f"--train-iters 4 {flags}"), size)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


class Gate:
    """Holds back the writing of files until it is opened."""

    def __init__(self):
        self.event, self.write = threading.Event(), checkpoint_files.PlannedSave.write
        gate = self

        def held(planned):
            assert gate.event.wait(SAFETY_SECONDS)
            return gate.write(planned)

        checkpoint_files.PlannedSave.write = held

    def open(self):
        self.event.set()


def change_everything(model):
    """What an update does to weights and moments."""
    for value in [*model.model[0].parameters(), *model.optimizer.param_groups[0]["params"]]:
        value.data.fill_(7.0)
    for chained in model.optimizer.chained_optimizers:
        for states in chained.optimizer.state.values():
            for value in states.values():
                if isinstance(value, torch.Tensor):
                    value.fill_(7.0)


def saved_both_ways(rank: int, config, run: Path):
    mesh, model = trainable_model(config)
    files = {"more.pt": b"more"} if rank == 0 else {}
    CheckpointWriter(run / "sync", mesh, Settings()).save(1, {"actor": model.state({})}, ENTRIES, files)
    gate, writer = Gate(), CheckpointWriter(run / "async", mesh, Settings(async_save=True))
    writer.save(1, {"actor": model.state({})}, ENTRIES, files)
    change_everything(model)  # while the copy waits to be written
    writer.poll(2)
    assert not (run / "async" / "checkpoints" / "latest").exists()
    gate.open()
    writer.wait()
    writer.wait()  # nothing is pending


@pytest.mark.parametrize("flags", [long(""), long("--use-distributed-optimizer"), TP2, long("--bf16")])
def test_an_asynchronous_save_has_the_bytes_of_a_synchronous_one(flags, tmp_path):
    run_world(saved_both_ways, 2, parsed(tmp_path, 2, flags), tmp_path)
    first, second = (folders.find(str(tmp_path / name), "--load") for name in ("sync", "async"))
    assert contents(first) == contents(second) and len(contents(first)) == 6


def one_rank_is_late(rank: int, config, run: Path) -> list[bool]:
    """Whether the checkpoint exists: when rank 0 has written, and when both have and the loop has come by."""
    mesh, model = trainable_model(config)
    gate, writer = Gate(), CheckpointWriter(run, mesh, Settings(async_save=True))
    if rank == 0:
        gate.open()
    writer.save(1, {"actor": model.state({})}, ENTRIES)
    if rank == 0:
        writer._pending.write()
    writer.poll(2)
    seen = [(run / "checkpoints" / "latest").exists()]
    gate.open()
    writer._pending.write()
    writer.poll(3)  # the first rank that comes cannot know yet that the other one has written
    torch.distributed.barrier()
    writer.poll(4)
    torch.distributed.barrier()
    return [*seen, (run / "checkpoints" / "latest").exists()]


def test_it_is_committed_when_all_ranks_have_written(tmp_path):
    assert run_world(one_rank_is_late, 2, parsed(tmp_path, 2, TP2), tmp_path) == [[False, True]] * 2


def test_a_run_that_saves_beside_its_training_has_the_same_checkpoints(tmp_path):
    for name, flag in (("sync", ""), ("async", "--async-save")):
        train("sft", sft_argv(tmp_path / name, f"--train-iters 3 --save-interval 1 {flag}"))
    for step in (1, 2, 3):  # the last one is waited for
        first, second = (contents(folders.step_folder(tmp_path / name, step)) for name in ("sync", "async"))
        assert first == second


# -- saves that fail ---------------------------------------------------------------------------------------------


def failing_save(rank: int, config, run: Path, settings: Settings, fails: str) -> list:
    """[message or None of a save of step 2 that fails, latest step], then the same after a third one that does not."""
    mesh, model = trainable_model(config)
    writer, limits = CheckpointWriter(run, mesh, settings), resource.getrlimit(resource.RLIMIT_FSIZE)
    frozen = {"reference": dict}

    def save(step: int) -> list:
        try:
            writer.save(step, {"actor": model.state({})}, ENTRIES, {}, frozen)
            writer.wait()
            message = None
        except SaveError as error:
            message = str(error)
        torch.distributed.barrier()
        return [message, folders.find(str(run), "--load").name]

    save(1)
    make_room = commit.make_room
    if fails == "size" and rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    if fails == "read-only":
        commit.make_room = read_only
    found = save(2)
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    commit.make_room = make_room
    assert rank or not list((run / "checkpoints").glob(".*"))  # its space is free again
    found += save(3)
    return [*found, list(folders.find_damage([folders.find(str(run), "--load")]))]


def read_only(*_):
    raise OSError(errno.EROFS, os.strerror(errno.EROFS), "checkpoints")


@pytest.mark.parametrize("asynchronous", [long(False), True])
@pytest.mark.parametrize("fails, reason", [
    ("size", "rank 1: OSError: [Errno 27] File too large"),
    ("read-only", "OSError: [Errno 30] Read-only file system: 'checkpoints'"),
])  # fmt: skip
def test_a_save_that_fails_leaves_the_one_before_and_all_ranks_agree(fails, reason, asynchronous, tmp_path, capfd):
    config = parsed(tmp_path, 2, TP2)
    settings = Settings(async_save=asynchronous)
    stops = run_world(failing_save, 2, config, tmp_path / "stop", settings, fails)
    for message, latest, *third in stops:
        assert message.startswith(f"the checkpoint of step 2 could not be written: {reason}") and "\n" not in message
        assert latest == "step_00000001" and third == [None, "step_00000003", []]
    assert stops[0] == stops[1]
    capfd.readouterr()
    settings = Settings(async_save=asynchronous, on_save_failure="continue")
    goes_on = run_world(failing_save, 2, config, tmp_path / "continue", settings, fails)
    assert goes_on == [[None, "step_00000001", None, "step_00000003", []]] * 2
    line = f"megarl: warning: the checkpoint of step 2 could not be written: {reason}"
    assert capfd.readouterr().err.count(line) == 1


def without_space(rank: int, config) -> str | None:
    """A run in which no checkpoint can be written; the message that ends it."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    try:
        in_world(rank, "sft", config)
    except SaveError as error:
        return str(error)


def test_a_run_without_space_stops_or_goes_on(tmp_path):
    flags = "--train-iters 3 --save-interval 1 --on-save-failure"
    (message,) = run_world(without_space, 1, program("sft", sft_argv(tmp_path / "a", f"{flags} stop"), 1))
    assert message.startswith("the checkpoint of step 1 could not be written: rank 0: OSError: [Errno 27]")
    assert run_world(without_space, 1, program("sft", sft_argv(tmp_path / "b", f"{flags} continue"), 1)) == [None]
    assert sorted(metrics(tmp_path / "b")) == [1, 2, 3]
    with pytest.raises(UsageError):
        folders.find(str(tmp_path / "b"), "--load")


# -- retention ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("last, every, best, kept", [
    (0, 0, None, [1, 2, 3, 4, 5, 6]),
    (2, 0, None, [5, 6]),
    (2, 3, None, [3, 5, 6]),
    (1, 0, 2, [2, 6]),
    (1, 4, 2, [2, 4, 6]),
    (9, 0, None, [1, 2, 3, 4, 5, 6]),
])  # fmt: skip
def test_which_checkpoints_are_kept(last, every, best, kept, tmp_path):
    for step in range(1, 7):
        saved(tmp_path, step, best if best and best <= step else None)
        commit.prune(tmp_path, last, every, [])
        commit.sweep(tmp_path)
    found = sorted(step_of(path) for path in (tmp_path / "checkpoints").glob("step_*"))
    assert found == kept and folders.find(str(tmp_path), "--load").name == "step_00000006"


@pytest.mark.parametrize("last, kept", [(1, [3, 6]), (2, [2, 3, 5, 6]), (5, [1, 2, 3, 4, 5, 6])])
def test_checkpoints_while_updates_are_skipped_do_not_push_out_those_before(last, kept, tmp_path):
    """Steps 4 to 6 skip updates."""
    for step in range(1, 7):
        saved(tmp_path, step, skipped=max(step - 3, 0))
        commit.prune(tmp_path, last, 0, [])
    assert sorted(step_of(path) for path in (tmp_path / "checkpoints").glob("step_*")) == kept
    saved(tmp_path, 7)
    commit.prune(tmp_path, last, 0, [])
    newest = [*kept, 7][-last:]
    assert [step_of(path) for path in sorted((tmp_path / "checkpoints").glob("step_*"))][-last:] == newest


def test_weights_that_the_run_started_from_and_unreadable_checkpoints_are_kept(tmp_path):
    used, unreadable = saved(tmp_path, 1), saved(tmp_path, 2)
    (unreadable / "manifest.json").write_text("{}")
    for step in (3, 4):
        saved(tmp_path, step)
    commit.prune(tmp_path, 1, 0, [used])
    assert sorted(step_of(path) for path in (tmp_path / "checkpoints").glob("step_*")) == [1, 2, 4]


def test_a_run_keeps_its_newest_checkpoints(tmp_path):
    train("sft", sft_argv(tmp_path, "--train-iters 4 --save-interval 1 --keep-last 1 --keep-every 2"))
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["latest", "step_00000002", "step_00000004"]


def best_of(folder: Path) -> tuple[int, float]:
    """(step, loss) of the evaluation with the lowest loss in a run's metrics."""
    loss, step = min((row["eval/loss"], step) for step, row in metrics(folder).items())
    return step, loss


def test_a_supervised_run_keeps_the_best_evaluation_whatever_is_due(tmp_path):
    """The rate is so high that the loss gets worse. A resumed run continues with what was the best."""
    started = f"--pretrained-checkpoint {inputs()}/sft --lr-decay-style constant --lr-warmup-iters 0"
    held_out = f"--lr 0.03 {started} --eval-prompts {inputs()}/heldout.jsonl --eval-interval 1"
    flags = f"{held_out} --save-interval 3 --keep-last 1 --async-save"
    train("sft", sft_argv(tmp_path, f"{flags} --train-iters 3"))
    step, loss = best_of(tmp_path)
    assert step < 3  # not due
    checkpoints = tmp_path / "checkpoints"
    assert sorted(path.name for path in checkpoints.glob("step_*")) == [f"step_{step:08d}", "step_00000003"]
    train("sft", sft_argv(tmp_path, f"{flags} --train-iters 5 --load {tmp_path}"))
    assert best_of(tmp_path) == (step, loss) and sorted(metrics(tmp_path)) == [1, 2, 3, 4, 5]
    assert (checkpoints / "best").read_text() == f"step_{step:08d}\n"
    assert sorted(path.name for path in checkpoints.glob("step_*")) == [
        *(f"step_{kept:08d}" for kept in (step, 3, 5))  # 3: the run started from it
    ]
    for number, kept_for in ((step, "best"), (5, "interval")):
        entries = json.loads((checkpoints / f"step_{number:08d}" / "manifest.json").read_text())
        assert entries["best"] == {"loss": loss, "step": step} and entries["kept_for"] == kept_for
    train("sft", sft_argv(tmp_path / "again", f"{flags} --train-iters 5 --load {checkpoints}/best --keep-best false"))
    for number, row in metrics(tmp_path / "again").items():
        assert timeless(row) == timeless(metrics(tmp_path)[number])
