"""Trackers: packages that work or fail; ids; the real packages where they are installed."""

import contextlib
import importlib.util
import json
import math
import os
import signal
import sys
import types

import pytest

from megarl import child_process
from megarl.checkpoint import earlier_run
from megarl.errors import UsageError
from megarl.observe import trackers
from megarl.observe.metrics_file import MetricsWriter, read_metrics
from megarl.observe.trackers import QUIET, TrackerOptions
from tests.helpers.tracked_runs import METRICS, installed, stored, track_steps


class FakeWandb(types.ModuleType):
    """In place of wandb: it notes its calls, and what `fails` names (init, log, finish) raises."""

    class Error(Exception):
        """As the package's."""

    def __init__(self):
        super().__init__("wandb")
        self.calls, self.fails, self.rewinds, self.has_login = [], set(), True, True

    def _note(self, name: str, *what):
        self.calls.append((name, *what))
        if name in self.fails:
            raise self.Error("no network")

    def Settings(self, **settings):
        return settings

    def login(self, prompt: bool) -> bool:
        assert not prompt
        return self.has_login

    def init(self, **options):
        settings = options.pop("settings")
        assert settings["finish_timeout_raises"] and settings["stop_fn"]() is None
        assert all(os.environ[name] == value for name, value in QUIET.items())
        assert set(child_process.STOP_SIGNALS) <= signal.pthread_sigmask(signal.SIG_BLOCK, ())
        self._note("init", options)
        if "resume_from" in options and not self.rewinds:
            raise self.Error("not allowed")
        return self

    def log(self, row, step, commit):
        assert commit
        self._note("log", step, row)

    def finish(self):
        self._note("finish")

    def teardown(self):
        self._note("teardown")


@pytest.fixture
def fake(monkeypatch):
    """The package in place of wandb."""
    package = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", package)
    monkeypatch.delitem(sys.modules, "megarl.extras.wandb_run", raising=False)
    for name in QUIET:
        monkeypatch.delenv(name, raising=False)
    yield package
    sys.modules.pop("megarl.extras.wandb_run", None)


def options(*names, **more) -> TrackerOptions:
    return TrackerOptions(names=names or ("wandb",), config={"megarl": {"seed": 1, "top": None}}, **more)


def rows(fake: FakeWandb) -> list:
    return [call[1:] for call in fake.calls if call[0] == "log"]


def inits(fake: FakeWandb) -> list:
    return [call[1] for call in fake.calls if call[0] == "init"]


def write(folder, resume_step, steps, trackers):
    with contextlib.closing(MetricsWriter(folder, resume_step, trackers)) as writer:
        for step in steps:
            writer.write(step, {"reward/mean": step / 3})


# -- names -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text, names", [
    ("none", ()), ("wandb", ("wandb",)), ("mlflow, tensorboard", ("mlflow", "tensorboard")),
])  # fmt: skip
def test_names(text, names):
    assert trackers.parse_names(text) == names
    assert trackers.has_remote(text) == any(name in ("wandb", "mlflow") for name in names)


@pytest.mark.parametrize("text", ["", "wandb,", "wandb,wandb", "none,wandb", "comet", "WANDB"])
def test_other_names_are_refused(text):
    with pytest.raises(ValueError, match="allowed are"):
        trackers.parse_names(text)


def test_a_missing_package_is_named_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    trackers.check_installed("tensorboard")
    trackers.check_installed("none")
    with pytest.raises(UsageError, match="^--trackers mlflow: .* run bash .*launch/setup_env.sh trackers$"):
        trackers.check_installed("tensorboard,mlflow")


def test_a_tracker_may_be_the_users_own(tmp_path, capfd):
    (tmp_path / "mine.py").write_text(
        "class Lines:\n"
        "    def __init__(self, run):\n        self.rows, self.path = [], run.options.folder / 'lines'\n"
        "    def write(self, step, scalars):\n        self.rows.append(f'{step} {sorted(scalars)}')\n"
        "    def close(self):\n        self.path.write_text('\\n'.join(self.rows))\n"
        "def wrong():\n    pass\n"
    )
    name = f"{tmp_path}/mine.py:Lines"
    trackers.check_installed(f"tensorboard,{name}")
    assert trackers.has_remote(name)
    write(tmp_path / "run", None, [1, 2], TrackerOptions(names=(name,)))
    assert (tmp_path / "run" / "lines").read_text().startswith("1 [") and capfd.readouterr().err == ""
    with pytest.raises(UsageError, match=r"mine.py:wrong: takes \(\) \(.*mine.py:8\); megarl calls it with \(run\)$"):
        trackers.check_installed(f"{tmp_path}/mine.py:wrong")


def test_without_trackers_there_is_metrics_jsonl_alone(tmp_path):
    write(tmp_path, None, [1], TrackerOptions(names=()))
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


# -- a package that works or fails ---------------------------------------------------------------------------------


def test_rows_arrive_in_order_with_every_bit_and_the_run_ends(fake, tmp_path, capfd):
    with contextlib.closing(MetricsWriter(tmp_path / "mine", None, options(project="p"))) as writer:
        writer.write(1, {"a": 0.1 + 0.2, "nan": math.nan})
        writer.write(2, {"a": 5e-324, "inf": -math.inf})
    (run_id,) = json.loads((tmp_path / "mine" / "trackers.json").read_text().strip()).values()
    assert inits(fake) == [{
        "project": "p", "name": "mine", "id": run_id, "resume": None, "mode": None, "dir": tmp_path / "mine",
        "config": {"megarl": {"seed": 1, "top": None}},
    }]  # fmt: skip
    assert repr(rows(fake)) == repr([
        (1, {"a": 0.1 + 0.2, "nan": math.nan}), (2, {"a": 5e-324, "inf": -math.inf}),
    ])  # fmt: skip
    assert fake.calls[-2:] == [("finish",), ("teardown",)]
    assert capfd.readouterr() == ("", "")
    assert not set(child_process.STOP_SIGNALS) & signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_a_resumed_run_keeps_its_id_and_is_rewound_only_if_it_had_gone_further(fake, tmp_path):
    folder = tmp_path / "run"
    for resume_step, steps in ((None, [1, 2, 3]), (3, [4]), (2, [3])):
        write(folder, resume_step, steps, options(run="name", offline=True))
    first, second, third = inits(fake)
    assert first["id"] == second["id"] and (first["resume"], second["resume"]) == (None, "allow")
    assert third["resume_from"] == f"{first['id']}?_step=2" and "id" not in third
    assert {one["mode"] for one in (first, second, third)} == {"offline"} and third["name"] == "name"
    earlier_run.move_aside(folder)
    write(folder, None, [1], options())  # a new run in the same folder
    assert inits(fake)[-1]["id"] != first["id"]
    assert json.loads((folder / "old-1" / "trackers.json").read_text()) == {"wandb": first["id"]}


def test_a_server_that_does_not_rewind_gets_the_rest_of_the_run(fake, tmp_path, capfd):
    fake.rewinds = False
    write(tmp_path, None, [1, 2, 3], options())
    write(tmp_path, 1, [2, 3], options())
    first, refused, last = inits(fake)
    assert "resume_from" in refused and last["resume"] == "allow" and last["id"] == first["id"]
    assert rows(fake)[-1] == (3, {"reward/mean": 1.0}) and capfd.readouterr().err == ""


@pytest.mark.parametrize("place, logged", [("init", 0), ("log", 5), ("finish", 5)])
def test_a_package_that_fails_is_one_warning_and_the_metrics_are_whole(place, logged, fake, tmp_path, capfd):
    fake.fails = {place}
    write(tmp_path, None, range(1, 6), options())
    assert len(rows(fake)) == logged  # each row is tried: the package may recover
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4, 5]
    assert capfd.readouterr() == ("", (
        "megarl: warning: --trackers wandb: Error: no network; the run goes on, its metrics.jsonl is complete\n"
    ))  # fmt: skip


def test_without_login_nobody_is_asked(fake, tmp_path, capfd):
    fake.has_login = False
    write(tmp_path / "a", None, [1], options())
    assert "--trackers wandb: Error: no API key; run `wandb login`; " in capfd.readouterr().err
    write(tmp_path / "b", None, [1], options(offline=True))
    assert len(inits(fake)) == 1 and capfd.readouterr().err == ""


def test_tensorboard_that_cannot_write_is_one_warning_too(tmp_path, capfd):
    (tmp_path / "tensorboard").write_text("a file")
    write(tmp_path, 0, [1, 2], options("tensorboard"))
    assert capfd.readouterr().err.startswith("megarl: warning: --trackers tensorboard: ")
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 2


def test_a_package_is_imported_only_if_it_is_asked_for(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)  # an import would fail
    write(tmp_path, None, [1], options("tensorboard"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl", "tensorboard"]


def test_damaged_ids_are_a_warning_and_new_runs(fake, tmp_path, capfd):
    tmp_path.joinpath("run").mkdir()
    for content in ("{", "[1]", '{"wandb": "../../x"}'):
        (tmp_path / "run" / "trackers.json").write_text(content)
        write(tmp_path / "run", 0, [1], options())
        assert inits(fake)[-1]["id"].isalnum()
    assert capfd.readouterr().err.count("trackers.json: cannot be read") == 2


def test_a_tracker_beside_tensorboard_with_files_in_a_folder_of_several_runs(fake, tmp_path):
    shared = tmp_path / "shared" / "trackers"
    write(tmp_path / "run", None, [1], options("tensorboard", "wandb", folder=shared))
    assert inits(fake)[0]["dir"] == shared and shared.is_dir() and (tmp_path / "run" / "tensorboard").is_dir()


# -- the packages, in processes of their own: they start threads -------------------------------------------------------


@installed("wandb")
def test_weights_and_biases_stores_every_bit_and_rewinds(tmp_path):
    printed = track_steps(tmp_path, "wandb", None, range(5)) + track_steps(tmp_path, "wandb", 2, [3, 4], sign=-1.0)
    first, second = stored("wandb", tmp_path)
    assert first["id"] == second["id"] == json.loads((tmp_path / "trackers.json").read_text())["wandb"]
    assert (first["name"], first["project"], first["exit"], first["rewound_to"]) == ("mine", "proj", 0, None)
    assert first["config"]["megarl"] == {"seed": 1} and second["rewound_to"] == 2
    assert list(first["history"]) == ["0", "1", "2", "3", "4"] and list(second["history"]) == ["3", "4"]
    for one, sign in ((first, 1.0), (second, -1.0)):
        for step, row in one["history"].items():
            assert {name: row[name] for name in METRICS} == {k: sign * int(step) * v for k, v in METRICS.items()}
            assert math.isnan(row["nan"]) and row["_step"] == int(step)
    assert printed == ""


@installed("wandb")
def test_a_signal_that_ends_the_process_of_weights_and_biases_ends_no_run(tmp_path):
    printed = track_steps(tmp_path, "wandb", None, range(5), kill_children_after=2)
    assert printed.count("megarl: warning: --trackers wandb: ") == 1 == printed.count("\n")
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 5
