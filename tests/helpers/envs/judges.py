"""A judge for small runs: the warm start, which reads and writes sums, and files that say what it reads."""

from pathlib import Path

import yaml

from tests.helpers.programs import inputs

LENGTH = 64  # tokens of the judge
SAMPLED = {
    "messages": [{"role": "user", "content": "{question}{answer}{response}="}], "number": {"last-number": True},
    "range": [0, 99], "temperature": 1, "max-tokens": 4, "samples": 2, "retries": 2,
}  # fmt: skip


def write(path: Path, **changes) -> Path:
    """A file for --judge-config: `SAMPLED` with changes."""
    path.write_text(yaml.safe_dump({**SAMPLED, **changes}, sort_keys=False))
    return path


def judge_flags(config: Path, flags: str = "", reward: str = "judge+0*exact-match") -> str:
    """Flags of a run with a judge."""
    return (
        f"--train-iters 1 --reward {reward} --judge-config {config} --judge-load {inputs()}/sft"
        f" --judge-max-length {LENGTH} --judge-buffer-gb 0.001 {flags}"
    )
