"""What a rank reports of a step: kept from the iteration that works on its batch to the one that ends the step.

With `--generation-lag` these are different iterations on ranks that generate, and a checkpoint holds the records of
batches that wait for training.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from megarl.comm.role_mesh import RoleMesh
from megarl.entry_kinds import Each, fits
from megarl.errors import UsageError
from megarl.plain_files import read_json, reading

FILE = "queued_records.json"  # in a checkpoint: metrics and samples of the steps whose batches it holds


class StepRecord(NamedTuple):
    """What a rank knows of the batch of a step when it has done its part of it."""

    metrics: dict[str, float]
    samples: list[dict]  # rows of the samples file
    moments: dict[str, float]  # of the reward role, after the step's scores


class StepRecords:
    """This rank's records of the step that it ends and of later ones."""

    def __init__(self):
        self._records: dict[int, StepRecord] = {}
        self._restored: dict[int, tuple[dict, list]] = {}  # metrics and samples of a checkpoint, by step

    def __getitem__(self, step: int) -> StepRecord:
        return self._records[step]

    def add(self, step: int, record: StepRecord):
        """Keeps a record; metrics and samples of a batch that a checkpoint held are those of its generation."""
        if step in self._restored:
            metrics, samples = self._restored.pop(step)
            record = record._replace(metrics=metrics, samples=samples)
        self._records[step] = record

    def forget_before(self, step: int):
        """Removes the records of earlier steps."""
        self._records = {number: record for number, record in self._records.items() if number >= step}

    def files(self, mesh: RoleMesh, step: int) -> dict[str, bytes]:
        """The file of all ranks' records of later steps, on rank 0; {} elsewhere, and if there are none. Collective."""
        own = {number: record[:2] for number, record in self._records.items() if number > step}
        merged: dict[int, tuple[dict, list]] = {}
        for of_rank in mesh.gather(own) or []:
            for number, (metrics, rows) in of_rank.items():
                before = merged.get(number, ({}, []))
                merged[number] = metrics | before[0], before[1] + rows  # the first rank wins, as in a report
        return {FILE: json.dumps(merged).encode()} if merged else {}

    def restore(self, folder: Path, through: int, reporting_rank: int):
        """Reads the records of a checkpoint, which `reporting_rank` reports; the others then report nothing.

        `through`: the last step whose batch the checkpoint holds; records of later steps are of a run that ended.

        Raises:
            UsageError: the file is damaged.
        """
        records, reports = _read(folder / FILE, reporting_rank), dist.get_rank() == reporting_rank
        held = {step: record for step, record in records.items() if step <= through}
        self._restored = {step: record if reports else ({}, []) for step, record in held.items()}


def _read(path: Path, reporting_rank: int) -> dict[int, tuple[dict, list]]:
    if not path.exists():
        return {}
    try:
        with reading(f"--load {path}", "is damaged"):
            records = read_json(path)
            if not fits(records, Each(_is_record, str.isdecimal)):
                raise ValueError("it is not what megarl writes")
    except UsageError as error:
        raise UsageError(str(error), reporting_rank) from None
    return {int(step): (metrics, samples) for step, (metrics, samples) in records.items()}


def _is_record(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) == 2
        and fits(value[0], Each((None, int, float)))
        and fits(value[1], [dict])
    )
