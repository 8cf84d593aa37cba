"""Programs of megarl on emulated devices, for tests: forks of one process that has imported everything."""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.emulator import build
from tests.helpers.programs import ROOT
from tests.helpers.server.servers import ANNOUNCED
from tests.helpers.worlds import wait_until

needs_emulator = pytest.mark.skipif(build.absence() is not None, reason=f"the emulator {build.absence()}")


class Emulator:
    """A process with emulated devices, which forks the ranks of one program after another."""

    def __init__(self):
        command = [sys.executable, "-W", "ignore", "-m", "tests.emulator.server"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._process = subprocess.Popen(command, cwd=ROOT, env=build.environment(), **pipes)

    def run(self, name: str, argv: list[str], ranks: int = 1, backend: str = "nccl") -> dict[str, int]:
        """Runs a program ('rl', 'sft' …) on so many ranks, and fails if one of them does; returns the counts of the
        first rank: how often operators ran, by name, and bytes."""
        with self._started(name, argv, ranks, backend) as folder:
            errors, counts = self._end(ranks, folder)
        assert counts, "\n".join(errors)
        return counts

    def error(self, fault: str, ranks: int, argv: Sequence[str] = (), backend: str = "nccl") -> str:
        """The errors of a function of `faults.py`, or of train_rl with one of `weight_faults.py`, which must fail on a
        rank."""
        with self._started("weights" if argv else "planted", [fault, *argv], ranks, backend) as folder:
            errors, counts = self._end(ranks, folder)
        assert not counts, f"the fault was not found: {fault}"
        return "\n".join(errors)

    @contextlib.contextmanager
    def served(self, argv: list[str], ranks: int = 1) -> Iterator[tuple[str, dict[str, int]]]:
        """A generation server: its URL, and counts as of `run`, which are there once it has been stopped."""
        counts: dict[str, int] = {}
        with self._started("serve", argv, ranks) as folder:
            out = Path(folder, "0", "out")
            try:
                assert wait_until(lambda: _announced(out) or select.select([self._process.stdout], [], [], 0)[0])
                if url := _announced(out):
                    yield url, counts
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(Path(folder, "0", "pid").read_text()), signal.SIGTERM)
                errors, of_first_rank = self._end(ranks, folder)
            assert of_first_rank, "\n".join(errors)
            counts |= of_first_rank

    @contextlib.contextmanager
    def _started(self, name: str, argv: list[str], ranks: int, backend: str = "nccl") -> Iterator[str]:
        """The folder of a program that has been started; `_end` waits for it."""
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps([name, argv, ranks, backend, folder]), file=self._process.stdin, flush=True)
            yield folder

    def _end(self, ranks: int, folder: str) -> tuple[list[str], dict[str, int]]:
        """Errors of the ranks that failed; counts if none did."""
        answer = self._process.stdout.readline()
        assert answer, "the emulator has ended"
        logs = [Path(folder, str(rank)) / "err" for rank in range(ranks)]
        texts = [_last_of(log) if log.exists() else "killed as it started" for log in logs]
        errors = [
            f"rank {rank}, status {status}: {texts[rank]}" for rank, status in enumerate(json.loads(answer)) if status
        ]
        return errors, {} if errors else json.loads(Path(folder, "0", "counts").read_text())

    def close(self):
        """Ends the process."""
        self._process.kill()
        self._process.wait()


def _last_of(log: Path) -> str:
    """The end of a rank's errors, after what the runtime has said, which long stacks of all threads may follow."""
    text = log.read_text()
    return "\n".join([*(line for line in text.splitlines() if line.startswith("emulator: ")), text[-3000:]])


def _announced(out: Path) -> str | None:
    """The URL in what a server has printed."""
    found = ANNOUNCED.search(out.read_text()) if out.exists() else None
    return found and found[2]
