"""A new run in the folder of an earlier one: refused, or the earlier one moves aside as a whole."""

import contextlib
import json
from types import SimpleNamespace

import pytest

from megarl.checkpoint import earlier_run, folders
from megarl.errors import UsageError
from megarl.observe.metrics_file import MetricsWriter
from tests.helpers.checkpoints import every_death, saved
from tests.helpers.forked_programs import refusal
from tests.helpers.programs import metrics, preference_argv, reward_argv, rl_argv, sft_argv, train

STORES = {"run.lock", "wandb", "mlflow"}  # in a run's folder, but not of one run


def config_of(**settings):
    values = {"save": None, "load": None, "overwrite": False} | {k: v and str(v) for k, v in settings.items()}
    return SimpleNamespace(settings=SimpleNamespace(**values), roles={})


def problem(**settings) -> str:
    with pytest.raises(UsageError) as caught:
        earlier_run.check(config_of(**settings))
    return str(caught.value)


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


@pytest.mark.parametrize("kind", ["sft", "rl", "reward", "preference"])
def test_nothing_of_the_earlier_run_lies_beside_the_new_one(kind, tmp_path):
    save = tmp_path / "run"
    argv = {"sft": sft_argv, "rl": rl_argv, "reward": reward_argv, "preference": preference_argv}[kind]
    plain = " --lr-decay-style constant --lr-warmup-iters 0" * (kind == "sft")
    plain += " --save-rollouts --profile-steps 1" * (kind == "rl")
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
