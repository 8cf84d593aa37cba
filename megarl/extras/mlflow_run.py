"""MLflow. The server is the package's own setting, MLFLOW_TRACKING_URI; without one, a store of files in the folder."""

import itertools
import logging
import re
import time

import mlflow
from mlflow.entities import Metric, Param, RunTag
from mlflow.tracking import MlflowClient

from megarl.observe.trackers import TrackedRun

ID_TAG = "megarl.id"
METRICS, PARAMS = 1000, 100  # MLflow's limits of a request
MAX_VALUE_LENGTH = 6000  # characters of a parameter's value

for logger in ("mlflow", "urllib3.connectionpool"):  # a failure is raised, and becomes one warning
    logging.getLogger(logger).setLevel(logging.CRITICAL)


class MlflowTracker:
    """The run of an MLflow experiment that has this run's id as a tag. The package's threads send the rows.

    MLflow cannot remove points of a metric, so a run that continues after an earlier step than it had reached becomes a
    new MLflow run with the points up to that step; the old one is deleted in MLflow's sense: hidden, and kept.
    """

    def __init__(self, run: TrackedRun):
        options, after = run.options, run.resume_step
        assert options.folder is not None  # filled in
        uri = None if mlflow.is_tracking_uri_set() and not options.offline else (options.folder / "mlflow").as_uri()
        self._client = MlflowClient(tracking_uri=uri)
        self._sent: list = []  # rows on their way
        found = self._client.get_experiment_by_name(options.project)
        self._experiment = found.experiment_id if found else self._client.create_experiment(options.project)
        old = None if after is None else self._find(run.id)
        known: dict[str, str] = {}
        if old is not None and not run.rewinds:
            self._id, known = old.info.run_id, old.data.params
            self._client.update_run(self._id, status="RUNNING")
        else:
            self._id = self._client.create_run(self._experiment, run_name=options.run).info.run_id
            if old is not None and after is not None:
                self._copy(old, after)
            self._client.set_tag(self._id, ID_TAG, run.id)
            if old is not None:
                self._client.delete_run(old.info.run_id)
        self._write_params(flatten(options.config), known)

    def _find(self, run_id: str):
        runs = self._client.search_runs([self._experiment], f"tags.`{ID_TAG}` = '{run_id}'", max_results=1)
        return runs[0] if runs else None

    def _copy(self, old, last_step: int):
        for name in old.data.metrics:
            history = self._client.get_metric_history(old.info.run_id, name)
            self._send([point for point in history if point.step <= last_step])
        self._wait()  # the old run is hidden afterwards

    def _send(self, points: list):
        for batch in itertools.batched(points, METRICS):
            self._sent.append(self._client.log_batch(self._id, metrics=list(batch), synchronous=False))

    def _write_params(self, config: dict[str, str], known: dict[str, str]):
        """Parameters can be written once; those that have changed since become tags."""
        new = [Param(name, value) for name, value in config.items() if name not in known]
        changed = {name: value for name, value in config.items() if known.get(name, value) != value}
        for params in itertools.batched(new, PARAMS):
            self._client.log_batch(self._id, params=list(params))
        for tags in itertools.batched((RunTag(f"changed.{name}", value) for name, value in changed.items()), PARAMS):
            self._client.log_batch(self._id, tags=list(tags))

    def write(self, step: int, scalars: dict[str, float]) -> None:
        now = int(time.time() * 1000)
        self._send([Metric(allowed(name), value, now, step) for name, value in scalars.items()])

    def close(self) -> None:
        """Waits for the rest, and sets the run's status. Raises the error of a lost row."""
        try:
            self._wait()
        finally:
            self._client.set_terminated(self._id)

    def _wait(self):
        """Waits for the rows that are on their way. Raises the error of a lost one."""
        while self._sent:
            self._sent.pop(0).wait()


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
            found[allowed(f"{prefix}{name}")] = str(value)[:MAX_VALUE_LENGTH]
    return found
