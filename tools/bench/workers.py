"""Processes that do a share of one side's work each and answer with the seconds they took.

    PYTHONPATH=. python tools/bench/workers.py rollout|logprob --case CASE --side SIDE [--share 0/2] [--quick]

tools/bench/all.py starts them: a side runs as one process with n threads, or as n processes of one thread with a share
of the requests each. A worker prints "seconds 0" when it has done the work once, and then for each line of stdin
"seconds S". megarl's weights come from the same seed in every process, and Hugging Face's are exported from them.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Setting:
    """How a side uses the cores: number of processes or ranks, and threads of each."""

    ranks: int
    threads: int

    def __str__(self) -> str:
        return f"{self.ranks} × {self.threads}"

    def environment(self) -> dict[str, str]:
        """The environment of one process; this process's own ranks and threads do not pass on."""
        kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        threads = str(self.threads)
        return kept | {"PYTHONPATH": path, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads,
                       "HF_HUB_OFFLINE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}  # fmt: skip


class Failed(Exception):
    """A side cannot be measured; the message is one line."""


class Workers:
    """The processes of one side in one setting; idle while another side is timed."""

    def __init__(self, command: Callable[[int], list[str]], setting: Setting):
        """`command`: of a rank. Starts all processes and waits until they are ready; raises Failed."""
        self._logs = [tempfile.TemporaryFile("w+") for _ in range(setting.ranks)]
        self._processes = []
        try:
            for rank, log in enumerate(self._logs):
                self._processes.append(
                    subprocess.Popen(
                        command(rank),
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        stderr=log,
                        text=True,
                        env=setting.environment(),
                    )
                )
            self._answers()
        except BaseException:
            self.close()
            raise

    def __call__(self) -> float:
        """Seconds of a round: those of the slowest process, which all begin together."""
        for process in self._processes:
            process.stdin.write("round\n")
            process.stdin.flush()
        return max(self._answers())

    def _answers(self) -> list[float]:
        return [self._answer(*pair) for pair in zip(self._processes, self._logs, strict=True)]

    def _answer(self, process: subprocess.Popen, log) -> float:
        for line in process.stdout:
            if line.startswith("seconds "):
                return float(line.split()[1])
        status = process.wait()
        log.seek(0)
        last = ([line.strip() for line in log if line.strip()] or ["no output"])[-1]
        raise Failed(f"ended with status {status}: {last}")

    def close(self):
        """Ends the processes."""
        for process in self._processes:
            process.stdin.close()
        for process in self._processes:
            try:
                process.wait(timeout=60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            process.stdout.close()
        for log in self._logs:
            log.close()


def command(work: str, case: str, side: str, setting: Setting, quick: bool) -> Callable[[int], list[str]]:
    """Rank -> command line of a worker of megarl or Hugging Face."""
    base = [sys.executable, __file__, work, "--case", case, "--side", side]
    return lambda rank: [*base, "--share", f"{rank}/{setting.ranks}", *["--quick"] * quick]


def rollout_work(args: argparse.Namespace) -> Callable[[], float]:
    """The share of a rollout's requests, on one side."""
    from tools.bench import common, rollout

    whole = rollout.CASES[args.case]()
    case = (whole.first(2, 3) if args.quick else whole).share(*args.share)
    lengths = max(map(len, whole.prompts)), max(whole.new_tokens)
    chunk, pg_collection, namespace = common.build(rollout.SHAPE, lengths)
    if args.side == common.OURS:
        work = rollout.megarl_side(chunk, pg_collection, case)
    else:
        work = rollout.hf_side(common.export(chunk, rollout.SHAPE, namespace, whole.longest).eval())
    return lambda: rollout.timed(work, case.requests())


def logprob_work(args: argparse.Namespace) -> Callable[[], float]:
    """The share of the sequences, on one side."""
    from tools.bench import logprob

    whole = logprob.CASES[args.case]()
    rank, ranks = args.share
    lengths = ([5] * 4 if args.quick else sorted(whole.lengths))[rank::ranks]
    work = logprob.sides_of(logprob.Case(lengths, whole.gradient), [args.side])[args.side]
    return lambda: logprob.timed(work)


def main(argv: list[str] | None = None):
    """Does the work once, then a round for each line of stdin."""
    made = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    works = {"rollout": rollout_work, "logprob": logprob_work}
    made.add_argument("work", choices=works)
    made.add_argument("--case", required=True)
    made.add_argument("--side", required=True, help="megarl or a peer in this environment")
    made.add_argument("--share", default="0/1", help="RANK/RANKS; default: %(default)s")
    made.add_argument("--quick", action="store_true", help="a few tokens only")
    args = made.parse_args(argv)
    args.share = tuple(map(int, args.share.split("/")))
    work = works[args.work](args)
    work()
    print("seconds 0", flush=True)
    for _ in sys.stdin:
        print(f"seconds {work()}", flush=True)


if __name__ == "__main__":
    main()
