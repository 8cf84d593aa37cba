"""Programs of megarl on emulated devices, for tests: forks of one process that has imported everything."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.emulator import build
from tests.helpers.programs import ROOT

needs_emulator = pytest.mark.skipif(build.absence() is not None, reason=f"the emulator {build.absence()}")


class Emulator:
    """A process with emulated devices, which forks the ranks of one program after another."""

    def __init__(self):
        command = [sys.executable, "-W", "ignore", "-m", "tests.emulator.server"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._process = subprocess.Popen(command, cwd=ROOT, env=build.environment(), **pipes)

    def run(self, name: str, argv: list[str], ranks: int = 1) -> dict[str, int]:
        """Runs a program ('rl', 'sft' …) on so many ranks, and fails if one of them does; returns how often operators
        ran on the first rank, by name."""
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps([name, argv, ranks, folder]), file=self._process.stdin, flush=True)
            answer = self._process.stdout.readline()
            assert answer, "the emulator has ended"
            statuses = json.loads(answer)
            logs = [Path(folder, str(rank)) / "err" for rank in range(ranks)]
            errors = [log.read_text()[-3000:] if log.exists() else "killed as it started" for log in logs]
            failed = [f"rank {rank}, status {status}: {errors[rank]}" for rank, status in enumerate(statuses) if status]
            assert not failed, "\n".join(failed)
            return json.loads(Path(folder, "0", "counts").read_text())

    def close(self):
        """Ends the process."""
        self._process.kill()
        self._process.wait()
