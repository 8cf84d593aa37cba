"""Three PPO steps of small models: dense, experts with router replay, offload; which runs are equal to the bit.

`python -m tools.gpu.ppo [CASE…]`, of `CASES`; default: all.
"""

import functools
import json
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.helpers import programs
from tools.gpu import report, run_all
from tools.train_tokenizer import train as train_tokenizer

ROOT = Path(__file__).parent.parent.parent
SHAPE = (
    "--num-layers 8 --hidden-size 1024 --ffn-hidden-size 2816 --num-attention-heads 16 --group-query-attention"
    " --num-query-groups 4 --swiglu --normalization RMSNorm --disable-bias-linear --make-vocab-size-divisible-by 32"
)
RL = (
    "--prompts-per-step 32 --samples-per-prompt 8 --max-prompt-length 32 --max-response-length 256 --train-iters 3"
    " --reward exact-match --advantage gae --lr 1e-5 --critic-lr 1e-5 --bf16 --trackers none"
)
EXPERTS = "--num-experts 16 --moe-router-topk 4 --moe-ffn-hidden-size 512"
CASES = {
    "dense": "",
    "dense, no graphs": "--decode-graphs off",
    "experts": f"{EXPERTS} --moe-grouped-gemm --router-replay rollout",
    "experts, no graphs": f"{EXPERTS} --moe-grouped-gemm --router-replay rollout --decode-graphs off",
    "offload": "--offload",
    "exact": "--exact-rollout",
    "exact experts": f"{EXPERTS} --exact-rollout --router-replay rollout",
    "deterministic 1": "--deterministic",
    "deterministic 2": "--deterministic",
}
SAME = [("dense", "dense, no graphs"), ("experts", "experts, no graphs"), ("deterministic 1", "deterministic 2")]
SHOWN = ("rollout/logprob_gap_max", "rollout/logprob_gap_mean", "actor/ppo_kl_first", "rollout/tokens_per_s",
         "perf/tokens_per_s", "time/actor/rollout_s", "time/actor/update_s", "memory/actor/peak_bytes")  # fmt: skip


def data(folder: Path) -> str:
    """Flags of prompts and a tokenizer, made here: sums of two numbers."""
    rows = [programs.addition(first, second) for first in range(60) for second in range(60)]
    prompts = programs.write_lines(folder / "train.jsonl", rows)
    tokenizer, texts = folder / "tokenizer.model", [text for row in rows for text in row.values()]
    tokenizer.write_bytes(train_tokenizer(texts, 16, False))
    return f"--prompts {prompts} --tokenizer-model {tokenizer}"


def train(save: Path, flags: str) -> list[dict]:
    """Metrics of each step of a run on one rank."""
    command = [sys.executable, "-m", "megarl.train_rl", *shlex.split(f"{SHAPE} {RL} {flags} --save {save}")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr[-1500:])
    return [json.loads(line) for line in (save / "metrics.jsonl").read_text().splitlines()]


def main(names: list[str]):
    """Runs the named cases, or all. A gap of an exact rollout other than 0 fails, and so do equal runs that differ."""
    from tools._metric_catalog import reproducible

    found: dict[str, list[dict]] = {}

    def run(name: str, folder: Path, flags: str) -> bool:
        rows = found[name] = train(folder / "".join(x for x in name if x.isalnum()), f"{flags} {CASES[name]}")
        report(ppo=name, steps=[{key: row[key] for key in SHOWN if key in row} for row in rows])
        gaps = [row["rollout/logprob_gap_max"] for row in rows if "rollout/logprob_gap_max" in row]
        return "exact" not in name or max(gaps) == 0

    def are_equal() -> bool:
        runs = {name: [reproducible(row) for row in rows] for name, rows in found.items()}
        pairs = [pair for pair in SAME if runs.keys() >= {*pair}]
        different = [pair for pair in pairs if runs[pair[0]] != runs[pair[1]]]
        report(equal_runs=pairs, different=different)
        return not different

    with tempfile.TemporaryDirectory() as folder:
        flags = data(Path(folder))
        cases = {name: functools.partial(run, name, Path(folder), flags) for name in names or CASES}
        run_all(cases | {"equal runs": are_equal})


if __name__ == "__main__":
    main(sys.argv[1:])
