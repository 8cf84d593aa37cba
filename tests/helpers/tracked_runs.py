"""Runs with Weights & Biases and MLflow, and what these have stored, read by their own packages in other processes.

    python -m tests.helpers.tracked_runs wandb FOLDER      FOLDER holds the .wandb files of one id
    python -m tests.helpers.tracked_runs mlflow FOLDER     FOLDER is a store of files
    python -m tests.helpers.tracked_runs track REQUEST     a run as `track` describes it, in JSON

The packages start threads, so no test process may import them.
"""

import importlib.util
import json
import math
import os
import signal
import struct
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

HEADER, BLOCK, CHUNK = 7, 32768, struct.Struct("<IHB")  # of the log format of LevelDB, which .wandb files have


def stored(kind: str, folder: Path) -> list[dict]:
    """The runs in a folder, oldest first; see `wandb_runs` and `mlflow_runs`."""
    from tests.helpers.programs import environment

    command = [sys.executable, "-m", "tests.helpers.tracked_runs", kind, str(folder)]
    variables = environment(MLFLOW_ALLOW_FILE_STORE="true", MLFLOW_DISABLE_TELEMETRY="true")
    done = subprocess.run(command, capture_output=True, text=True, env=variables)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def track(folder: Path, name: str, resume_step: int | None, rows: list, **more) -> str:
    """Writes the rows [[step, metrics]] of a run with one tracker, by default one that writes files only.

    Args:
        more: `config`; `offline`; `kill_children_after`: the number of rows after which Slurm's signals come to the
            processes that the package has started.

    Returns:
        What the run printed.
    """
    from tests.helpers.programs import environment

    request = {"folder": str(folder), "name": name, "resume_step": resume_step, "rows": rows, **more}
    command = [sys.executable, "-m", "tests.helpers.tracked_runs", "track", json.dumps(request)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment())
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def write_run(folder, name, resume_step, rows, config=None, offline=True, kill_children_after=None):
    """`track` in the process that has the packages."""
    from megarl.observe.metrics_file import MetricsWriter
    from megarl.observe.trackers import TrackerOptions

    options = TrackerOptions((name,), "proj", "mine", None, offline, config or {"megarl": {"seed": 1}})
    with closing(MetricsWriter(Path(folder), resume_step, options)) as writer:
        for number, (step, metrics) in enumerate(rows):
            if number == kill_children_after:
                _end_children()
            writer.write(step, metrics)


def _end_children():
    """Sends the stop signals to the process's children, and waits until they are gone."""
    import psutil

    children = psutil.Process().children()
    assert children
    for child in children:
        for number in (signal.SIGUSR1, signal.SIGTERM):
            os.kill(child.pid, number)
    psutil.wait_procs(children)


def log_records(data: bytes):
    """The records of a log: chunks of at most a block, each with checksum, length and place in its record."""
    position, record = HEADER, b""
    while position + CHUNK.size <= len(data):
        if BLOCK - position % BLOCK < CHUNK.size:
            position += BLOCK - position % BLOCK
            continue
        _, length, place = CHUNK.unpack_from(data, position)
        position += CHUNK.size
        record += data[position : position + length]
        position += length
        if place in (1, 4):  # whole, last
            yield record
            record = b""


def wandb_runs(folder: Path) -> list[dict]:
    """Of each .wandb file: id, name, project, config, the step it was rewound to, rows by step, exit status."""
    from wandb.proto import wandb_internal_pb2

    found = []
    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.stat().st_ctime_ns):
        one = {"history": {}, "exit": None}
        for data in log_records(path.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            kind = record.WhichOneof("record_type")
            if kind == "run":
                run = record.run
                one |= {"id": run.run_id, "name": run.display_name, "project": run.project}
                one["rewound_to"] = run.branch_point.value if run.HasField("branch_point") else None
                config = {item.key: json.loads(item.value_json) for item in run.config.update}
                one.setdefault("config", config)
            elif kind == "history":
                row = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
                one["history"][record.history.step.num] = row
            elif kind == "exit":
                one["exit"] = record.exit.exit_code
        found.append(one)
    return found


def mlflow_runs(folder: Path) -> list[dict]:
    """Of each run, deleted ones too: id, name, experiment, status, whether it is deleted, params, points by metric."""
    from mlflow.entities import ViewType
    from mlflow.tracking import MlflowClient

    client, found = MlflowClient(tracking_uri=folder.resolve().as_uri()), []
    for experiment in client.search_experiments():
        for run in client.search_runs([experiment.experiment_id], run_view_type=ViewType.ALL):
            points = {
                name: sorted([p.step, p.value] for p in client.get_metric_history(run.info.run_id, name))
                for name in run.data.metrics
            }
            found.append({
                "id": run.info.run_id, "name": run.info.run_name, "experiment": experiment.name,
                "status": run.info.status, "deleted": run.info.lifecycle_stage == "deleted",
                "params": dict(run.data.params), "points": points, "start": run.info.start_time,
                "tags": dict(run.data.tags),
            })  # fmt: skip
    return sorted(found, key=lambda run: run["start"])


def installed(name: str):
    """Marks a test of a package that only the extra `trackers` installs."""
    is_missing = importlib.util.find_spec(name) is None
    return pytest.mark.skipif(is_missing, reason=f"{name} is not installed: pip install 'megarl[trackers]'")


METRICS = {"reward/mean": 0.1 + 0.2, "eval/pass@4": 0.5, "reward/a.b:c/mean": 5e-324}


def track_steps(folder, name, resume_step, steps, sign=1.0, **more) -> str:
    """Steps of a run with one tracker; returns what is printed."""
    rows = [[step, {key: sign * step * value for key, value in METRICS.items()} | {"nan": math.nan}] for step in steps]
    return track(folder, name, resume_step, rows, **more)


if __name__ == "__main__":
    if sys.argv[1] == "track":
        write_run(**json.loads(sys.argv[2]))
    else:
        readers = {"wandb": wandb_runs, "mlflow": mlflow_runs}
        print(json.dumps(readers[sys.argv[1]](Path(sys.argv[2]))))
