"""Trackers: a process of their own that may fail, hang or be slow; ids; the real packages where they are installed."""

import importlib.util
import json
import math
import os
import signal
import sys

import pytest

from megarl.errors import UsageError
from megarl.observe.metrics_file import MetricsWriter, read_metrics
from megarl.observe.trackers import base, process
from megarl.observe.trackers.base import TrackerOptions
from tests.helpers.faults import sleep_for_ever
from tests.helpers.tracked_runs import stored
from tests.helpers.worlds import alive, wait_until, wait_until_gone

# A package in place of wandb: it writes its calls to a file, and does what the test says in FAKE.
FAKE = '''
"""Stands for wandb."""
import json, os, time
class Error(Exception): pass
class Settings:
    def __init__(self, **settings): pass
def note(*what):
    with open(os.environ["FAKE_CALLS"], "a") as file:
        file.write(json.dumps(what) + "\\n")
class Run:
    def log(self, row, step, commit):
        %(log)s
        note("log", step, row)
    def finish(self, exit_code):
        note("finish", exit_code)
        %(finish)s
def init(**options):
    note("init", os.getpid(), {name: value for name, value in options.items() if name != "settings"})
    print("noise")
    %(init)s
    return Run()
'''
LAST = 'raise Error("no network")'


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """`fake(init=…, log=…, finish=…)` installs a package whose functions run these statements first; returns a
    function that reads its calls."""
    calls = tmp_path / "calls"

    def install(**statements):
        place = tmp_path / "packages"
        place.mkdir()
        lines = {name: statements.get(name, "pass") for name in ("init", "log", "finish")}
        (place / "wandb.py").write_text(FAKE % lines)
        monkeypatch.setenv("PYTHONPATH", str(place))
        monkeypatch.setenv("FAKE_CALLS", str(calls))
        return lambda: [json.loads(line) for line in calls.read_text().splitlines()] if calls.exists() else []

    return install


def options(*names, **more) -> TrackerOptions:
    return TrackerOptions(names=names or ("wandb",), config={"megarl": {"seed": 1, "top": None}}, **more)


def rows(calls: list) -> list:
    return [call[1:] for call in calls if call[0] == "log"]


def write(folder, resume_step, steps, trackers):
    with MetricsWriter(folder, resume_step, trackers) as writer:
        for step in steps:
            writer.write(step, {"reward/mean": step / 3})


# -- names -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text, names", [
    ("none", ()), ("wandb", ("wandb",)), ("mlflow, tensorboard", ("mlflow", "tensorboard")),
])  # fmt: skip
def test_names(text, names):
    assert base.are_names(text) and base.parse_names(text) == names
    assert base.has_remote(text) == any(name in ("wandb", "mlflow") for name in names)


@pytest.mark.parametrize("text", ["", "wandb,", "wandb,wandb", "none,wandb", "comet", "WANDB"])
def test_other_names_are_refused(text):
    assert not base.are_names(text)


def test_a_missing_package_is_named_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    base.check_installed("tensorboard")
    base.check_installed("none")
    with pytest.raises(UsageError, match="^--trackers mlflow: .* run pip install mlflow-skinny$"):
        base.check_installed("tensorboard,mlflow")


def test_without_trackers_there_is_metrics_jsonl_alone(tmp_path):
    write(tmp_path, None, [1], TrackerOptions(names=()))
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


# -- a package that works, fails, hangs ---------------------------------------------------------------------------


def test_rows_arrive_in_order_with_every_bit_and_the_run_ends(fake, tmp_path, capfd):
    calls = fake()
    with MetricsWriter(tmp_path / "mine", None, options(project="p")) as writer:
        writer.write(1, {"a": 0.1 + 0.2, "nan": math.nan})
        writer.write(2, {"a": 5e-324, "inf": -math.inf})
    init, *logged, finish = calls()
    (run_id,) = json.loads((tmp_path / "mine" / "trackers.json").read_text().strip()).values()
    assert init[0] == "init" and init[1] != os.getpid()
    assert init[2] == {
        "project": "p", "name": "mine", "id": run_id, "resume": None, "mode": None, "dir": str(tmp_path / "mine"),
        "config": {"megarl": {"seed": 1, "top": None}},
    }  # fmt: skip
    assert repr(logged) == repr([
        ["log", 1, {"a": 0.1 + 0.2, "nan": math.nan}], ["log", 2, {"a": 5e-324, "inf": -math.inf}],
    ])  # fmt: skip
    assert finish == ["finish", 0]
    assert capfd.readouterr() == ("", "")  # what the package prints goes to the log
    assert (tmp_path / "mine" / "trackers.log").read_text() == "noise\n"


def test_a_resumed_run_keeps_its_id_and_is_rewound_only_if_it_had_gone_further(fake, tmp_path):
    calls = fake()
    folder = tmp_path / "run"
    for resume_step, steps in ((None, [1, 2, 3]), (3, [4]), (2, [3])):
        write(folder, resume_step, steps, options(run="name", offline=True))
    first, second, third = [call[2] for call in calls() if call[0] == "init"]
    assert first["id"] == second["id"] and (first["resume"], second["resume"]) == (None, "allow")
    assert third["resume_from"] == f"{first['id']}?_step=2" and "id" not in third
    assert {one["mode"] for one in (first, second, third)} == {"offline"} and third["name"] == "name"
    write(folder, None, [1], options())  # a new run in the same folder
    assert [call[2] for call in calls() if call[0] == "init"][-1]["id"] != first["id"]
    assert json.loads((folder / "trackers.json.old-1").read_text()) == {"wandb": first["id"]}


def test_a_server_that_does_not_rewind_gets_the_rest_of_the_run(fake, tmp_path):
    calls = fake(init='if "resume_from" in options: raise Error("no")')
    write(tmp_path, None, [1, 2, 3], options())
    write(tmp_path, 1, [2, 3], options())
    inits = [call[2] for call in calls() if call[0] == "init"]
    assert "resume_from" in inits[1] and inits[2]["resume"] == "allow" and inits[2]["id"] == inits[0]["id"]
    assert rows(calls())[-1] == [3, {"reward/mean": 1.0}]
    assert "resume_from: no" in (tmp_path / "trackers.log").read_text()


def test_a_package_that_always_fails_is_one_warning_and_the_metrics_are_whole(fake, tmp_path, capfd):
    calls = fake(init=LAST)
    write(tmp_path, None, range(1, 6), options())
    assert rows(calls()) == [] and len(calls()) == 2  # the first attempt, and one at the end
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4, 5]
    printed = capfd.readouterr()
    assert printed.out == "" and printed.err == (
        "megarl: warning: --trackers wandb: Error: no network; the run goes on and tries again\n"
    )


def test_rows_that_failed_are_sent_later(fake, tmp_path, capfd):
    calls = fake(log='os.path.exists(os.environ["FAKE_CALLS"] + ".ok") or exec("raise Error(\\"busy\\")")')
    printed = []

    def has_failed() -> bool:
        printed.append(capfd.readouterr().err)
        return "busy" in "".join(printed)

    with MetricsWriter(tmp_path, None, options()) as writer:
        writer.write(1, {"a": 1.0})
        writer.write(2, {"a": 2.0})
        assert wait_until(has_failed)
        open(os.environ["FAKE_CALLS"] + ".ok", "w").close()
    assert rows(calls()) == [[1, {"a": 1.0}], [2, {"a": 2.0}]] and calls()[-1] == ["finish", 0]


@pytest.mark.parametrize("place", ["init", "log", "finish"])
def test_a_package_that_hangs_delays_the_end_by_the_limit_and_leaves_no_process(
    place, fake, tmp_path, capfd, monkeypatch
):
    calls = fake(**{place: "time.sleep(3600)"})
    writer = MetricsWriter(tmp_path, None, options())
    writer.write(1, {"a": 1.0})
    waited_for = {"init": "init", "log": "init", "finish": "log"}[place]
    assert wait_until(lambda: any(call[0] == waited_for for call in calls()))
    monkeypatch.setattr(process, "CLOSE_SECONDS", 0.2)
    writer.close()
    assert wait_until_gone([calls()[0][1]])
    assert capfd.readouterr().err == (
        "megarl: warning: --trackers wandb: had not taken everything 0.2 s after the end of the run; the run and its "
        "metrics.jsonl are complete\n"
    )


def test_rows_that_a_slow_tracker_cannot_take_are_dropped_with_one_warning(fake, tmp_path, capfd, monkeypatch):
    fake(init="time.sleep(3600)")
    monkeypatch.setattr(process, "MAX_ROWS", 4)
    monkeypatch.setattr(process, "CLOSE_SECONDS", 0.2)
    with MetricsWriter(tmp_path, None, options()) as writer:
        for step in range(1, 200):  # more than the pipe holds
            writer.write(step, {f"metric {number}": 1.0 for number in range(200)})
    err = capfd.readouterr().err
    assert err.count("warning") == 1 and "cannot keep up: 4 steps wait for it" in err


def test_a_process_that_dies_is_one_warning(fake, tmp_path, capfd):
    calls = fake(log="os._exit(7)")
    with MetricsWriter(tmp_path, None, options()) as writer:
        writer.write(1, {"a": 1.0})
        assert wait_until(lambda: calls() and not alive(calls()[0][1]))
        for step in range(2, 50):
            writer.write(step, {"a": 1.0})
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 49
    err = capfd.readouterr().err
    assert err.count("warning") == 1 and "its process ended with status 7" in err


def test_signals_to_the_whole_job_do_not_end_the_tracker_before_the_run(fake, tmp_path, capfd):
    calls = fake()
    with MetricsWriter(tmp_path, None, options()) as writer:
        assert wait_until(calls)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            os.kill(calls()[0][1], number)
        writer.write(1, {"a": 1.0})
    assert [call[0] for call in calls()] == ["init", "log", "finish"] and capfd.readouterr().err == ""


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # of the fork
def test_a_run_that_dies_is_told_to_the_tracker_as_failed(fake, tmp_path):
    """The rank's process ends without closing anything."""
    calls = fake()
    child = os.fork()
    if child == 0:
        writer = MetricsWriter(tmp_path, None, options())
        writer.write(1, {"a": 1.0})
        while not rows(calls()):
            pass
        os._exit(1)
    os.waitpid(child, 0)
    assert wait_until(lambda: calls() and calls()[-1] == ["finish", 1])


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # of the fork
def test_a_process_that_the_rank_has_forked_does_not_hold_up_the_end(fake, tmp_path, capfd):
    calls = fake()
    writer = MetricsWriter(tmp_path, None, options())
    forked = os.fork()
    if forked == 0:
        sleep_for_ever()
    try:
        writer.write(1, {"a": 1.0})
        writer.close()
    finally:
        os.kill(forked, 9)
        os.waitpid(forked, 0)
    assert calls()[-1] == ["finish", 0] and capfd.readouterr().err == ""


def test_damaged_ids_are_a_warning_and_new_runs(fake, tmp_path, capfd):
    calls = fake()
    tmp_path.joinpath("run").mkdir()
    for content in ("{", "[1]", '{"wandb": "../../x"}'):
        (tmp_path / "run" / "trackers.json").write_text(content)
        write(tmp_path / "run", 0, [1], options())
        assert [call[2] for call in calls() if call[0] == "init"][-1]["id"].isalnum()
    assert capfd.readouterr().err.count("trackers.json: cannot be read") == 2


def test_a_tracker_beside_tensorboard_with_files_in_a_folder_of_several_runs(fake, tmp_path):
    calls, shared = fake(), tmp_path / "shared" / "trackers"
    write(tmp_path / "run", None, [1], options("tensorboard", "wandb", folder=shared))
    assert calls()[0][2]["dir"] == str(shared) and shared.is_dir()
    assert "wandb" not in sys.modules and (tmp_path / "run" / "tensorboard").is_dir()


# -- the packages -------------------------------------------------------------------------------------------------


def installed(name: str):
    """Marks a test of a package that only the extra `trackers` installs."""
    is_missing = importlib.util.find_spec(name) is None
    return pytest.mark.skipif(is_missing, reason=f"{name} is not installed: pip install 'megarl[trackers]'")


METRICS = {"reward/mean": 0.1 + 0.2, "eval/pass@4": 0.5, "reward/a.b:c/mean": 5e-324}


def track(folder, name, resume_step, steps, sign=1.0, **more):
    """Steps of a run with one tracker that writes files only."""
    trackers = options(name, offline=True, project="proj", run="mine", **more)
    with MetricsWriter(folder, resume_step, trackers) as writer:
        for step in steps:
            writer.write(step, {key: sign * step * value for key, value in METRICS.items()} | {"nan": math.nan})


@installed("wandb")
def test_weights_and_biases_stores_every_bit_and_rewinds(tmp_path, capfd):
    track(tmp_path, "wandb", None, range(5))
    track(tmp_path, "wandb", 2, [3, 4], sign=-1.0)
    first, second = stored("wandb", tmp_path)
    assert first["id"] == second["id"] == json.loads((tmp_path / "trackers.json").read_text())["wandb"]
    assert (first["name"], first["project"], first["exit"], first["rewound_to"]) == ("mine", "proj", 0, None)
    assert first["config"]["megarl"] == {"seed": 1, "top": None} and second["rewound_to"] == 2
    assert list(first["history"]) == ["0", "1", "2", "3", "4"] and list(second["history"]) == ["3", "4"]
    for one, sign in ((first, 1.0), (second, -1.0)):
        for step, row in one["history"].items():
            assert {name: row[name] for name in METRICS} == {k: sign * int(step) * v for k, v in METRICS.items()}
            assert math.isnan(row["nan"]) and row["_step"] == int(step)
    assert capfd.readouterr() == ("", "")


@installed("mlflow")
def test_mlflow_stores_every_bit_and_replaces_a_run_that_had_gone_further(tmp_path, capfd):
    track(tmp_path, "mlflow", None, range(3))
    track(tmp_path, "mlflow", 2, [3, 4])
    (only,) = stored("mlflow", tmp_path / "mlflow")
    assert (only["name"], only["experiment"], only["status"]) == ("mine", "proj", "FINISHED")
    assert only["params"] == {"megarl.seed": "1"} and not only["deleted"]
    track(tmp_path, "mlflow", 2, [3, 4], sign=-1.0)
    old, new = stored("mlflow", tmp_path / "mlflow")
    assert old["deleted"] and not new["deleted"] and old["points"] == only["points"]
    assert new["status"] == "FINISHED" and new["params"] == only["params"] and new["id"] != old["id"]
    for name, value in {"reward/mean": 0.1 + 0.2, "eval/pass.4": 0.5, "reward/a.b.c/mean": 5e-324}.items():
        assert old["points"][name] == [[step, step * value] for step in range(5)]
        assert new["points"][name] == [[step, (step if step < 3 else -step) * value] for step in range(5)]
    assert [step for step, value in new["points"]["nan"] if math.isnan(value)] == [0, 1, 2, 3, 4]
    track(tmp_path, "mlflow", 4, [5])  # the new one is the run that continues
    assert [len(run["points"]["reward/mean"]) for run in stored("mlflow", tmp_path / "mlflow")] == [5, 6]
    assert capfd.readouterr() == ("", "")


@installed("mlflow")
def test_changed_settings_of_a_resumed_run_become_tags_of_mlflow(tmp_path):
    track(tmp_path, "mlflow", None, [1])
    trackers = TrackerOptions(("mlflow",), "proj", "mine", None, True, {"megarl": {"seed": 2, "lr": 0.1}})
    with MetricsWriter(tmp_path, 1, trackers) as writer:
        writer.write(2, {"a": 1.0})
    (run,) = stored("mlflow", tmp_path / "mlflow")
    assert run["params"] == {"megarl.seed": "1", "megarl.lr": "0.1"} and run["tags"]["changed.megarl.seed"] == "2"


@installed("mlflow")
def test_an_mlflow_server_that_does_not_answer_is_one_warning(tmp_path, capfd, monkeypatch):
    """Nobody listens at the address, and the package's own retries are switched off."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setattr(process, "CLOSE_SECONDS", 600.0)
    write(tmp_path, None, [1, 2], options("mlflow"))
    err = capfd.readouterr().err
    assert err.count("warning: --trackers mlflow: ") == 1 == err.count("\n")
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 2
