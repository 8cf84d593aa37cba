"""The real MLflow, where it is installed: every bit of the metrics, runs that continue, a server that is away."""

import math

from megarl.observe.metrics_file import read_metrics
from tests.helpers.tracked_runs import installed, stored, track_steps


@installed("mlflow")
def test_mlflow_stores_every_bit_and_replaces_a_run_that_had_gone_further(tmp_path):
    printed = track_steps(tmp_path, "mlflow", None, range(3)) + track_steps(tmp_path, "mlflow", 2, [3, 4])
    (only,) = stored("mlflow", tmp_path / "mlflow")
    assert (only["name"], only["experiment"], only["status"]) == ("mine", "proj", "FINISHED")
    assert only["params"] == {"megarl.seed": "1"} and not only["deleted"]
    printed += track_steps(tmp_path, "mlflow", 2, [3, 4], sign=-1.0)
    old, new = stored("mlflow", tmp_path / "mlflow")
    assert old["deleted"] and not new["deleted"] and old["points"] == only["points"]
    assert new["status"] == "FINISHED" and new["params"] == only["params"] and new["id"] != old["id"]
    for name, value in {"reward/mean": 0.1 + 0.2, "eval/pass.4": 0.5, "reward/a.b.c/mean": 5e-324}.items():
        assert old["points"][name] == [[step, step * value] for step in range(5)]
        assert new["points"][name] == [[step, (step if step < 3 else -step) * value] for step in range(5)]
    assert [step for step, value in new["points"]["nan"] if math.isnan(value)] == [0, 1, 2, 3, 4]
    printed += track_steps(tmp_path, "mlflow", 4, [5])  # the new one is the run that continues
    assert [len(run["points"]["reward/mean"]) for run in stored("mlflow", tmp_path / "mlflow")] == [5, 6]
    assert printed == ""


@installed("mlflow")
def test_changed_settings_of_a_resumed_run_become_tags_of_mlflow(tmp_path):
    track_steps(tmp_path, "mlflow", None, [1])
    track_steps(tmp_path, "mlflow", 1, [2], config={"megarl": {"seed": 2, "lr": 0.1}})
    (found,) = stored("mlflow", tmp_path / "mlflow")
    assert found["params"] == {"megarl.seed": "1", "megarl.lr": "0.1"} and found["tags"]["changed.megarl.seed"] == "2"


@installed("mlflow")
def test_an_mlflow_server_that_does_not_answer_is_one_warning(tmp_path, monkeypatch):
    """Nobody listens at the address, and the package's own retries are switched off."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    printed = track_steps(tmp_path, "mlflow", None, [1, 2], offline=False)
    assert printed.count("warning: --trackers mlflow: ") == 1 == printed.count("\n")
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 2
