"""MLflow. The server is the package's own setting, MLFLOW_TRACKING_URI; without one, a store of files in the folder."""

import os
import re
import time
from pathlib import Path

from megarl.observe.trackers.base import TrackedRun

os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"  # MLflow 3.17 refuses folders without it; before the import

import mlflow
from mlflow.entities import Metric, Param, RunTag
from mlflow.tracking import MlflowClient

ID_TAG = "megarl.id"
METRICS, PARAMS = 1000, 100  # MLflow's limits of a request
LONGEST = 6000  # characters of a parameter's value


class MlflowTracker:
    """The run of an MLflow experiment that has this run's id as a tag.

    MLflow cannot remove points of a metric. A run that continues after an earlier step than it had reached becomes a
    new MLflow run with the points up to that step; the old one is deleted in MLflow's sense: hidden, and kept.
    """

    def __init__(self, run: TrackedRun):
        """Raises MlflowException if the server does not answer."""
        uri = None if mlflow.is_tracking_uri_set() and not run.offline else (Path(run.folder) / "mlflow").as_uri()
        self._client = MlflowClient(tracking_uri=uri)
        found = self._client.get_experiment_by_name(run.project)
        self._experiment = found.experiment_id if found else self._client.create_experiment(run.project)
        old = None if run.resume_step is None else self._find(run.id)
        if old is None or run.rewinds:
            created = self._client.create_run(self._experiment, run_name=run.name)
            self._id = created.info.run_id
            if old is not None:
                self._copy(old, run.resume_step)
            self._client.set_tag(self._id, ID_TAG, run.id)
            if old is not None:
                self._client.delete_run(old.info.run_id)
            self._write_params(flatten(run.config), {})
        else:
            self._id = old.info.run_id
            self._client.update_run(self._id, status="RUNNING")
            self._write_params(flatten(run.config), old.data.params)

    def _find(self, run_id: str):
        runs = self._client.search_runs([self._experiment], f"tags.`{ID_TAG}` = '{run_id}'", max_results=1)
        return runs[0] if runs else None

    def _copy(self, old, last_step: int):
        for name in old.data.metrics:
            history = self._client.get_metric_history(old.info.run_id, name)
            self._write_metrics([point for point in history if point.step <= last_step])

    def _write_metrics(self, points: list):
        for start in range(0, len(points), METRICS):
            self._client.log_batch(self._id, metrics=points[start : start + METRICS])

    def _write_params(self, config: dict[str, str], known: dict[str, str]):
        """Parameters can be written once; those that have changed since become tags."""
        new = [Param(name, value) for name, value in config.items() if name not in known]
        changed = [
            RunTag(f"changed.{name}", value) for name, value in config.items() if known.get(name, value) != value
        ]
        for start in range(0, len(new), PARAMS):
            self._client.log_batch(self._id, params=new[start : start + PARAMS])
        for start in range(0, len(changed), PARAMS):
            self._client.log_batch(self._id, tags=changed[start : start + PARAMS])

    def write(self, step: int, scalars: dict[str, float]) -> None:
        """One point of each metric."""
        now = int(time.time() * 1000)
        self._write_metrics([Metric(allowed(name), value, now, step) for name, value in scalars.items()])

    def close(self, failed: bool = False) -> None:
        """Sets the run's status."""
        self._client.set_terminated(self._id, "FAILED" if failed else "FINISHED")


def allowed(name: str) -> str:
    """A metric's name with the characters that MLflow allows: `eval/pass@4` -> `eval/pass.4`."""
    return re.sub(r"[^\w\-. /]", ".", name)


def flatten(config: dict, prefix: str = "") -> dict[str, str]:
    """`{"megarl": {"seed": 1}}` -> `{"megarl.seed": "1"}`; without settings that are not set."""
    found = {}
    for name, value in config.items():
        if isinstance(value, dict):
            found |= flatten(value, f"{prefix}{name}.")
        elif value is not None:
            found[allowed(f"{prefix}{name}")] = str(value)[:LONGEST]
    return found
