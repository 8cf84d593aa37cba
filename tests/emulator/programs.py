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
        """Runs a program ('rl', 'sft' …) on so many ranks, and fails if one of them does; returns the counts of the
        first rank: how often operators ran, by name, and bytes."""
        errors, counts = self._end_of(name, argv, ranks)
        assert counts, "\n".join(errors)
        return counts

    def error(self, fault: str, ranks: int) -> str:
        """The errors of a function of `faults.py`, which must fail on a rank."""
        errors, counts = self._end_of("planted", [fault], ranks)
        assert not counts, f"the fault was not found: {fault}"
        return "\n".join(errors)

    def _end_of(self, name: str, argv: list[str], ranks: int) -> tuple[list[str], dict[str, int]]:
        """Errors of the ranks that failed; counts if none did."""
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps([name, argv, ranks, folder]), file=self._process.stdin, flush=True)
            answer = self._process.stdout.readline()
            assert answer, "the emulator has ended"
            logs = [Path(folder, str(rank)) / "err" for rank in range(ranks)]
            texts = [log.read_text()[-3000:] if log.exists() else "killed as it started" for log in logs]
            errors = [
                f"rank {rank}, status {status}: {texts[rank]}"
                for rank, status in enumerate(json.loads(answer))
                if status
            ]
            return errors, {} if errors else json.loads(Path(folder, "0", "counts").read_text())

    def close(self):
        """Ends the process."""
        self._process.kill()
        self._process.wait()
