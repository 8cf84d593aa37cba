"""The metrics of a run: metrics.jsonl (one line per step, authoritative) and the same scalars for its trackers."""

import sys
from pathlib import Path

from megarl.errors import UsageError
from megarl.observe.files import json_line, write_atomically
from megarl.observe.trackers import TrackerOptions, open_trackers
from megarl.plain_files import is_absent, parse_record, read_records, reading
from megarl.plain_values import MAX_COUNT, is_plain_number, is_whole

FILE_NAME = "metrics.jsonl"


class MetricsWriter:
    """Appends one line per step to `directory/metrics.jsonl` and hands the scalars to trackers (`observe/trackers.py`).

    directory    the run's directory; made when missing.
    resume_step  None starts a new run, whose folder must hold no metrics. An integer resumes after that step: lines of
                 later steps, written before the interruption, are dropped and hidden in TensorBoard, so that every
                 step has one line.
    trackers     TensorBoard in `directory/tensorboard` by default.

    Only one process may write to a directory (rank 0).
    """

    def __init__(self, directory: Path, resume_step: int | None, trackers: TrackerOptions = TrackerOptions()):
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        self.path = directory / FILE_NAME
        rewinds = resume_step is not None and _drop_after(self.path, resume_step)
        self._last_step = resume_step
        mode = "x" if resume_step is None else "a"  # x: an earlier run would be read as part of this one
        self._file = open(self.path, mode, encoding="utf-8", newline="\n")
        self._trackers = open_trackers(trackers, directory, resume_step, rewinds)

    def write(self, step: int, metrics: dict[str, float]) -> None:
        """Write the line of `step`: `step` first, then the metrics sorted by name.

        Floats keep every bit (repr), integers stay integers, NaN and infinities are null in the file (TensorBoard gets
        them unchanged). The line is flushed, so it survives a crash of the process.
        Raises ValueError unless the step is after the last one, or if `metrics` has a key `step`.
        """
        if "step" in metrics:
            raise ValueError("metrics hold the key 'step'; the step is the first argument of write()")
        if self._last_step is not None and step <= self._last_step:
            raise ValueError(f"metrics of step {step} come after those of step {self._last_step}; steps must increase")
        scalars = {name: float(value) for name, value in metrics.items()}
        line = json_line({"step": step, **{name: metrics[name] for name in sorted(metrics)}})
        self._file.write(line + "\n")
        self._file.flush()
        self._last_step = step
        for tracker in self._trackers:
            tracker.write(step, scalars)

    def close(self) -> None:
        """Close the file and all trackers; a second call does nothing."""
        self._file.close()
        while self._trackers:
            self._trackers.pop().close()


def read_metrics(path: Path) -> list[dict]:
    """The lines of a metrics.jsonl in order; a value that was NaN or infinite reads as None.

    A truncated last line is skipped, with a note on stderr. Raises UsageError when the file is missing
    or another line is not a JSON object with an integer `step` (the message gives its number).
    """
    return [record for _, record in _read_lines(Path(path))]


def series(rows: list[dict], name: str) -> tuple[list[int], list[float]]:
    """(steps, values) of one metric, without the steps where it is missing or not finite."""
    pairs = [(row["step"], row[name]) for row in rows if is_plain_number(row.get(name))]
    return [step for step, _ in pairs], [value for _, value in pairs]


def lines_after(path: Path, last_step: int) -> bytes:
    """The lines of a metrics.jsonl with later steps, byte for byte. Errors as of `read_metrics`."""
    return b"".join(line + b"\n" for line, record in _read_lines(Path(path)) if record["step"] > last_step)


def _read_lines(path: Path) -> list[tuple[bytes, dict]]:
    """(raw line, its record) for every complete line."""
    if is_absent(path):
        raise UsageError(f"no metrics file {path}")
    with reading(str(path)):
        lines = read_records(path)
    pairs = []
    for number, line in enumerate(lines, start=1):
        record = _parse(line)
        if record is not None:
            pairs.append((line, record))
        elif number == len(lines):
            print(f"note: {path} line {number} is truncated and skipped", file=sys.stderr)
        else:
            raise UsageError(f"{path} line {number} is not a JSON object with an integer step: {line[:60]!r}")
    return pairs


def _parse(line: bytes) -> dict | None:
    record = parse_record(line)
    return record if record is not None and is_whole(record.get("step"), -MAX_COUNT, MAX_COUNT) else None


def _drop_after(path: Path, last_step: int) -> bool:
    """Keep the lines with step <= last_step, byte for byte; returns whether there were others."""
    if is_absent(path):
        return False
    lines = _read_lines(path)
    kept = [line + b"\n" for line, record in lines if record["step"] <= last_step]
    write_atomically(path, b"".join(kept))
    return len(kept) < len(lines)
