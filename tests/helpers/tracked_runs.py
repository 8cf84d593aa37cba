"""What Weights & Biases and MLflow have stored of a run, read by their own packages in a process of its own.

    python -m tests.helpers.tracked_runs wandb FOLDER      FOLDER holds the .wandb files of one id
    python -m tests.helpers.tracked_runs mlflow FOLDER     FOLDER is a store of files

The packages start threads, so no test process may import them.
"""

import json
import struct
import subprocess
import sys
from pathlib import Path

HEADER, BLOCK, CHUNK = 7, 32768, struct.Struct("<IHB")  # of the log format of LevelDB, which .wandb files have


def stored(kind: str, folder: Path) -> list[dict]:
    """The runs in a folder, oldest first; see `wandb_runs` and `mlflow_runs`."""
    from tests.helpers.programs import environment

    command = [sys.executable, "-m", "tests.helpers.tracked_runs", kind, str(folder)]
    variables = environment(MLFLOW_ALLOW_FILE_STORE="true", MLFLOW_DISABLE_TELEMETRY="true")
    done = subprocess.run(command, capture_output=True, text=True, env=variables)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


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
                name: [[p.step, p.value] for p in client.get_metric_history(run.info.run_id, name)]
                for name in run.data.metrics
            }
            found.append({
                "id": run.info.run_id, "name": run.info.run_name, "experiment": experiment.name,
                "status": run.info.status, "deleted": run.info.lifecycle_stage == "deleted",
                "params": dict(run.data.params), "points": points, "start": run.info.start_time,
                "tags": dict(run.data.tags),
            })  # fmt: skip
    return sorted(found, key=lambda run: run["start"])


if __name__ == "__main__":
    readers = {"wandb": wandb_runs, "mlflow": mlflow_runs}
    print(json.dumps(readers[sys.argv[1]](Path(sys.argv[2]))))
