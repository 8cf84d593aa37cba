"""A new run in the folder of an earlier one: refused, or the earlier one moves aside as a whole."""

import contextlib
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from megarl.checkpoint import earlier_run, folders
from megarl.observe.metrics_file import MetricsWriter
from megarl.observe.samples import write_samples
from tests.helpers.checkpoints import every_death, saved
from tests.helpers.forked_programs import refusal
from tests.helpers.programs import metrics, preference_argv, reward_argv, rl_argv, sft_argv, train
from tests.helpers.texts import refusals
from tests.helpers.tiers import long

STORES = {"run.lock", "wandb", "mlflow"}  # in a run's folder, but not of one run


def config_of(**settings):
    values = {"save": None, "load": None, "overwrite": False} | {k: v and str(v) for k, v in settings.items()}
    return SimpleNamespace(settings=SimpleNamespace(**values), roles={})


def problem(**settings) -> str:
    return refusals.refusal(earlier_run.check, config_of(**settings))


def written_run(run):
    with contextlib.closing(MetricsWriter(run, None)) as writer:
        writer.write(1, {"loss": 1.0})
    for name in ("hf/step_00000001", "samples", "tensorboard"):
        (run / name).mkdir(parents=True, exist_ok=True)
    saved(run, 1)


def names(folder) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize("name", ["checkpoints/step_00000003", "hf/step_00000003", "peft/step_00000003"])
def test_a_run_with_something_to_keep_is_not_started_over(name, tmp_path):
    (tmp_path / name).mkdir(parents=True)
    resumes = f"--load {tmp_path} resumes it, " * name.startswith("checkpoints")
    assert problem(save=tmp_path) == (
        f"--save {tmp_path}: holds an earlier run ({name}); {resumes}--overwrite moves it to {tmp_path}/old-1 and "
        "starts anew, and another folder leaves it as it is"
    )
    assert "holds an earlier run" in problem(save=tmp_path, load=tmp_path.parent)  # of another run
    earlier_run.check(config_of(save=tmp_path, overwrite=True))


def test_a_finished_run_without_checkpoints_is_kept_too(tmp_path):
    (tmp_path / "timeline.json").touch()
    assert "holds an earlier run (timeline.json); --overwrite moves it" in problem(save=tmp_path)


@pytest.mark.parametrize("load", [".", "checkpoints/latest", "checkpoints/step_00000001"])
def test_a_run_that_resumes_in_its_folder_is_no_new_one(load, tmp_path):
    written_run(tmp_path)
    config = config_of(save=tmp_path, load=tmp_path / load)
    before = sorted(tmp_path.rglob("*"))
    earlier_run.check(config)
    earlier_run.begin(config, str(tmp_path))
    assert sorted(tmp_path.rglob("*")) == before
    assert "give one of the two" in problem(save=tmp_path, load=tmp_path / load, overwrite=True)


def test_what_a_failed_start_left_needs_no_flag(tmp_path):
    with contextlib.closing(MetricsWriter(tmp_path, None)) as writer:
        writer.write(0, {"eval/accuracy": 0.5})
    (tmp_path / "notes.txt").touch()
    earlier_run.check(config_of(save=tmp_path))
    earlier_run.begin(config_of(save=tmp_path), str(tmp_path))
    assert names(tmp_path) == {"notes.txt", "old-1"} and names(tmp_path / "old-1") == {"metrics.jsonl", "tensorboard"}


def test_the_new_run_cannot_read_what_moves(tmp_path):
    written_run(tmp_path)
    named = {"--prompts": "/samples/x.jsonl", "--reward-model": "/checkpoints,other", "--load-rollouts": "",
             "--load": "/checkpoints/abandoned-1/step_3"}  # fmt: skip
    for flag, rest in named.items():
        value = f"{tmp_path}{rest}"
        name = flag.removeprefix("--").replace("-", "_")
        assert problem(save=tmp_path, overwrite=True, **{name: value}).startswith(f"{flag} {value}: is in the earlier")


def test_killed_at_any_instant_no_old_checkpoint_is_taken_for_the_new_runs(tmp_path, monkeypatch):
    for number, run in enumerate(every_death(monkeypatch, tmp_path, written_run, earlier_run.move_aside)):
        # Before the checkpoints have moved, nothing has; a restart that finds none starts anew.
        assert (run / "checkpoints").exists() == (number < 2)
        assert folders.find(str(run if number < 2 else run / "old-1"), "--load").name == "step_00000001"
        earlier_run.move_aside(run)  # started again
        assert names(run) <= {"old-1", "old-2"}


@pytest.mark.parametrize("kind", ["rl", long("sft"), long("reward"), long("preference")])
def test_nothing_of_the_earlier_run_lies_beside_the_new_one(kind, tmp_path):
    save = tmp_path / "run"
    argv = {"sft": sft_argv, "rl": rl_argv, "reward": reward_argv, "preference": preference_argv}[kind]
    plain = " --lr-decay-style constant --lr-warmup-iters 0" * (kind == "sft")
    plain += " --save-rollouts" * (kind == "rl")
    train(kind, argv(save, f"--train-iters 2 --save-interval 1{plain}"))
    refused = refusal(argv(save, f"--train-iters 1{plain}"), kind)
    assert f"--save {save}: holds an earlier run (checkpoints/step_00000002); --load {save} resumes it" in refused
    earlier = names(save)
    assert earlier - STORES <= {*earlier_run.FILES} and {"checkpoints", "metrics.jsonl"} <= earlier
    train(kind, argv(save, f"--train-iters 1 --overwrite{plain}"))
    assert sorted(metrics(save)) in ([1], [0, 1])
    assert names(save / "checkpoints") - {"frozen"} == {"latest", "step_00000001"}
    assert names(save / "old-1") == earlier - STORES
    assert json.loads((save / "old-1" / "metrics.jsonl").read_text().splitlines()[-1])["step"] == 2


# -- a run that resumes from an earlier step: the new branch is the folder's at once, nothing is deleted ---------------


def branched_run(run: Path, best: int | None = None):
    """A run of four steps with a checkpoint after each, samples and metrics."""
    with contextlib.closing(MetricsWriter(run, None)) as writer:
        for step in range(1, 5):
            writer.write(step, {"loss": step / 3})
            write_samples(run, step, [{"response": str(step)}, {"response": str(step), "tokens": []}])
    (run / "hf" / "step_00000003").mkdir(parents=True)
    for step in range(1, 5):
        saved(run, step, best if best and best <= step else None)


def found(run: Path) -> str:
    return folders.find(str(run), "--load").name


def lines(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_a_run_from_an_earlier_step_leaves_the_later_ones_aside(tmp_path, capsys):
    branched_run(tmp_path)
    checkpoints, source = tmp_path / "checkpoints", folders.step_folder(tmp_path, 2)
    earlier_run.begin_branch(tmp_path, 2, source, [source])
    assert sorted(names(checkpoints)) == ["abandoned-1", "latest", "step_00000001", "step_00000002"]
    assert found(tmp_path) == "step_00000002" and (checkpoints / "latest").read_text() == "step_00000002\n"
    assert capsys.readouterr().err.count("\n") == 1
    aside = checkpoints / "abandoned-1"
    assert sorted(names(aside)) == ["hf", "metrics.jsonl", "samples", "step_00000003", "step_00000004", "tokens"]
    assert lines(aside / "metrics.jsonl") == [3, 4] and sorted(names(aside / "hf")) == ["step_00000003"]
    for folder in ("samples", "tokens"):
        assert sorted(names(aside / folder)) == ["step_00000003.jsonl", "step_00000004.jsonl"]
        assert sorted(names(tmp_path / folder)) == ["step_00000001.jsonl", "step_00000002.jsonl"]
    folders.check(aside / "step_00000004", "--load")  # it can still be loaded
    MetricsWriter(tmp_path, 2).close()
    assert lines(tmp_path / "metrics.jsonl") == [1, 2]


def test_a_run_from_its_last_step_changes_nothing(tmp_path, capsys):
    branched_run(tmp_path)
    source = folders.step_folder(tmp_path, 4)
    before = sorted(tmp_path.rglob("*"))
    earlier_run.begin_branch(tmp_path, 4, source, [source])
    assert sorted(tmp_path.rglob("*")) == before and not capsys.readouterr().err


@pytest.mark.parametrize("best, named", [(1, "step_00000001"), (3, None), (2, "step_00000002")])
def test_best_names_no_checkpoint_of_the_other_branch(best, named, tmp_path):
    branched_run(tmp_path, best)
    source = folders.step_folder(tmp_path, 2)
    earlier_run.begin_branch(tmp_path, 2, source, [source])
    pointer = folders.named(tmp_path / "checkpoints", "best")
    assert (pointer and pointer.name) == named


def test_exports_of_steps_without_a_checkpoint_are_not_the_resumed_runs(tmp_path, capsys):
    branched_run(tmp_path)
    (tmp_path / "peft" / "step_00000006").mkdir(parents=True)
    (tmp_path / "samples" / "step_00000005.jsonl").write_text("")
    source = folders.step_folder(tmp_path, 4)
    earlier_run.begin_branch(tmp_path, 4, source, [source])
    aside = tmp_path / "checkpoints" / "abandoned-1"
    assert sorted(names(aside)) == ["metrics.jsonl", "peft", "samples"] and sorted(names(aside / "samples")) == [
        "step_00000005.jsonl"
    ]
    assert sorted(names(tmp_path / "peft")) == [] and sorted(names(tmp_path / "hf")) == ["step_00000003"]
    assert "exports of steps without a checkpoint (step_00000006 to step_00000006)" in capsys.readouterr().err
    assert found(tmp_path) == "step_00000004"


def test_killed_at_any_instant_the_branch_that_starts_is_the_one_that_resumes(tmp_path, monkeypatch):
    def start(run):
        source = folders.find(str(folders.step_folder(run, 2)), "--load")
        earlier_run.begin_branch(run, 2, source, [source])

    seen = []
    for run in every_death(monkeypatch, tmp_path, lambda run: branched_run(run, 3), start, earlier_run):
        seen.append(found(run))
        start(run)  # once more
        moved = sorted(path.name for path in (run / "checkpoints").glob("abandoned-*/step_*"))
        assert found(run) == "step_00000002" and moved == ["step_00000003", "step_00000004"]
    assert seen[0] == "step_00000004" and set(seen[1:]) == {"step_00000002"}
