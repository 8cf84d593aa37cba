"""The state of a run from the files of its folder, for programs that watch it from outside.

Files are those of a run that may end, hang, be moved aside or start again at any moment, on another machine with
another clock, so nothing here raises once the folder has been found.
"""

import os
import time
from collections import deque
from pathlib import Path

from megarl.errors import UsageError
from megarl.observe import status_file
from megarl.observe.metrics_file import FILE_NAME
from megarl.observe.settings_file import read_settings
from megarl.observe.terminal import printable
from megarl.plain_files import MAX_BYTES, open_bytes, parse_record, read_json, reason_of
from megarl.plain_values import is_plain_number

KEPT_ROWS = 512  # of metrics.jsonl
PATIENCE = (10.0, 5)  # seconds, and intervals, without a new status.json before a run counts as silent


class RunReader:
    """What is known of a run; `update` looks again.

    folder       of the run.
    rows         the last rows of metrics.jsonl.
    total_steps  `--train-iters`; None if it is not known.
    roles        ranks by role.
    status       content of status.json, checked; None without one.
    problem      why there is no status, in words; None if there just is no file.
    age          seconds since status.json last changed.
    """

    def __init__(self, folder: Path):
        """UsageError if there is no such folder, or none of a run."""
        self.folder = folder
        if not folder.is_dir():
            raise UsageError(f"{printable(folder)}: no such folder; allowed is the folder of a run (--save)")
        names = (FILE_NAME, "settings.yaml", status_file.NAME)
        if not any((folder / name).exists() for name in names):
            raise UsageError(f"{printable(folder)}: is not the folder of a run: {', '.join(names)} are missing")
        self.rows: deque[dict] = deque(maxlen=KEPT_ROWS)
        self.total_steps: int | None = None
        self.roles: dict[str, range] = {}
        self.status: dict | None = None
        self.problem: str | None = None
        self.age = 0.0
        self._offset, self._changed = 0, 0.0
        self._file: int | None = None
        self._settings_time: int | None = None
        self._seen: tuple | None = None

    @property
    def step(self) -> int:
        """The last step that has ended."""
        return self.rows[-1]["step"] if self.rows else 0

    @property
    def has_ended(self) -> bool:
        """Whether the run has said that it ended, failed or hangs."""
        return self.status is not None and self.status["state"] != status_file.RUNNING

    def is_alive(self) -> bool:
        """Whether status.json has changed lately. The clocks of two machines are compared for the first look only."""
        least, intervals = PATIENCE
        return self.status is not None and self.age <= max(least, intervals * self.status["interval"])

    def values(self, name: str) -> list[float | None]:
        """A metric in each of `rows`; None where it is missing or was not finite."""
        return [row.get(name) if isinstance(row.get(name), (int, float)) else None for row in self.rows]

    def last(self, name: str) -> float | None:
        """The newest value of a metric."""
        return next((value for value in reversed(self.values(name)) if value is not None), None)

    def names(self, prefix: str) -> list[str]:
        """The metrics of the last row that begin with a prefix."""
        return [name for name in (self.rows[-1] if self.rows else ()) if name.startswith(prefix)]

    def update(self, now: float | None = None):
        """Reads what is new. `now`: of a monotonic clock."""
        now = time.monotonic() if now is None else now
        for read in (self._read_settings, self._read_metrics):
            try:
                read()
            except Exception:  # it is not there yet, being replaced, or damaged in any way
                continue  # the next look finds it
        self._read_status(now)

    def _read_settings(self):
        path = self.folder / "settings.yaml"
        changed = path.stat().st_mtime_ns
        if changed == self._settings_time:
            return
        settings = read_settings(self.folder)
        self._settings_time = changed
        total = (settings.get("megarl") or {}).get("train_iters")
        self.total_steps = total if isinstance(total, int) and total > 0 else None
        self.roles = {}
        for name, role in (settings.get("roles") or {}).items():
            first, _, last = str(role.get("ranks", "")).partition("-") if isinstance(role, dict) else ("", "", "")
            if first.isdigit() and last.isdigit():
                self.roles[str(name)] = range(int(first), int(last) + 1)

    def _read_metrics(self):
        """Reads lines that were added; all of them if the file is another one or has become shorter."""
        with open_bytes(self.folder / FILE_NAME) as file:
            found = os.fstat(file.fileno())
            if found.st_ino != self._file or found.st_size < self._offset:
                self._file, self._offset = found.st_ino, 0
                self.rows.clear()
            self._offset = max(self._offset, found.st_size - MAX_BYTES)  # of more, the end has the last rows
            file.seek(self._offset)
            data = file.read(MAX_BYTES)
        complete = data.rfind(b"\n") + 1
        self._offset += complete
        for line in data[:complete].split(b"\n"):
            row = parse_record(line)
            if row is not None and type(row.get("step")) is int:
                self.rows.append(row)

    def _read_status(self, now: float):
        path = self.folder / status_file.NAME
        try:
            written = path.stat().st_mtime
            content = read_json(path)
            _check(content)
        except FileNotFoundError:
            self.status, self.problem = None, None
            return
        except Exception as error:  # a file made for harm can raise anything
            self.status, self.problem = None, f"status.json cannot be read: {printable(reason_of(error))}"
            return
        self.status, self.problem = content, None
        version = (content["pid"], content["writes"], content["unix_time"])
        if self._seen is None:
            self._changed = now - max(0.0, time.time() - written)
        elif version != self._seen:
            self._changed = now
        self._seen, self.age = version, max(0.0, now - self._changed)


def _check(content: dict):
    """ValueError, KeyError or TypeError unless it is what `StatusFile` writes, of this version."""
    if content["format"] != status_file.FORMAT:
        raise ValueError(f"it has format {content['format']}; this version reads format {status_file.FORMAT}")
    numbers = [content[name] for name in ("interval", "limit", "uptime", "unix_time", "writes", "pid")]
    for row in content["ranks"]:
        if row:
            role, phase, step, inside, stuck, done = row
            numbers += [step, inside, stuck]
            if not all(isinstance(text, (str, type(None))) for text in (role, phase)) or not isinstance(done, bool):
                raise ValueError("a rank's row is damaged")
    if not all(is_plain_number(number) for number in numbers):
        raise ValueError("a number is missing")
    if not isinstance(content["state"], str) or not isinstance(content["host"], str):
        raise ValueError("state or host is missing")
    if not isinstance(content["problem"], (str, type(None))):
        raise ValueError("the problem is no text")
