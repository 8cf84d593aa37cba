"""Trackers of a real run: they change no bit, follow a resumed run, and wrong flags are refused before any work."""

import importlib.util

import pytest

from tests.helpers.forked_programs import error_line, launch, refusal
from tests.helpers.programs import GRADED, metrics, rl_argv, samples, timeless_rows, train
from tests.helpers.tracked_runs import stored

FLAGS = f"--train-iters 4 --save-interval 2 --advantage grpo {GRADED}"


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A run without trackers."""
    save = tmp_path_factory.mktemp("plain") / "run"
    train("rl", rl_argv(save, f"{FLAGS} --trackers none"))
    return save


@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("wandb", "mlflow")),
    reason="needs pip install 'megarl[trackers]'",
)
def test_trackers_change_no_bit_and_follow_a_run_that_goes_back(plain, tmp_path, capfd):
    save = tmp_path / "run"
    flags = f"{FLAGS} --trackers wandb,mlflow --tracker-offline --tracker-project sums --tracker-run first"
    train("rl", rl_argv(save, flags))
    train("rl", rl_argv(save, f"{flags} --load {save}/checkpoints/step_00000002"))
    assert timeless_rows(save, range(1, 5)) == timeless_rows(plain, range(1, 5))
    assert all(samples(save, step) == samples(plain, step) for step in range(1, 5))
    assert not (save / "tensorboard").exists() and not (plain / "tensorboard").exists()
    rows = metrics(save)
    one, two = stored("wandb", save)
    assert (one["name"], one["project"], one["id"]) == ("first", "sums", two["id"]) and two["rewound_to"] == 2
    assert one["config"]["megarl"]["seed"] == 5 and one["config"]["roles"]["actor"]["ranks"] == "0-0"
    assert list(one["history"]) == ["1", "2", "3", "4"] and list(two["history"]) == ["3", "4"]
    old, new = stored("mlflow", save / "mlflow")
    assert old["deleted"] and not new["deleted"] and new["status"] == "FINISHED"
    assert new["params"]["roles.actor.megatron.num_layers"] == "2"
    for name in ("reward/mean", "actor/grad_norm"):
        expected = [[step, rows[step][name]] for step in range(1, 5)]
        assert new["points"][name] == expected
        assert [[step, two["history"][str(step)][name]] for step in (3, 4)] == expected[2:]
    assert "warning: --trackers" not in capfd.readouterr().err


def test_without_save_or_tracker_the_flags_have_no_effect_and_say_so(tmp_path):
    argv = list(rl_argv(tmp_path, "--tracker-run x --check"))
    status, _, err = launch(tmp_path, argv)
    assert status == 0 and err == (
        "megarl: warning: without effect: --tracker-run (needs --save and wandb or mlflow in --trackers)\n"
    )


WRONG = {
    "--trackers comet": "--trackers comet: allowed is names with commas among tensorboard, wandb, mlflow, each once",
    "--trackers none,wandb": "--trackers none,wandb: allowed is",
    "--trackers wandb --tracker-project a/b": "--tracker-project a/b: allowed is printable text without / and :",
    "--trackers wandb --tracker-run :": "--tracker-run :: allowed is printable text",
    "--trackers wandb --tracker-folder /dev/null/x": "--tracker-folder /dev/null/x: /dev/null is not a writable folder",
}


@pytest.mark.parametrize("flags", WRONG)
def test_wrong_flags_are_refused(flags, tmp_path):
    assert WRONG[flags] in refusal(rl_argv(tmp_path / "run", flags))


def test_a_package_that_is_missing_is_refused_before_work(tmp_path, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == "mlflow" else find(name, *more)
    )
    line = error_line(launch(tmp_path, rl_argv(tmp_path / "run", "--trackers mlflow")))
    assert "--trackers mlflow: its package is not installed; run bash launch/setup_env.sh trackers" in line
    assert not (tmp_path / "run").exists()
