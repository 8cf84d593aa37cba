"""Three PPO steps of small models: dense, experts with router replay, offload; which runs are equal to the bit.

`python -m tools.gpu.ppo [CASE…]`, of `CASES`; default: all. The first runs alone, so its times are those of the device;
the others run several at a time.
"""

import functools
import json
import shlex
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from megarl.mcore.recurrence import fused_chunks
from tests.helpers import programs
from tools.gpu import command, report, run_all, sized
from tools.train_tokenizer import train as train_tokenizer

ROOT = Path(__file__).parent.parent.parent
SHAPE = (
    "--group-query-attention --swiglu --normalization RMSNorm --disable-bias-linear --make-vocab-size-divisible-by 32"
)
SHAPE += sized(
    " --num-layers 8 --hidden-size 1024 --ffn-hidden-size 2816 --num-attention-heads 16 --num-query-groups 4",
    " --num-layers 4 --hidden-size 64 --ffn-hidden-size 64 --num-attention-heads 4 --num-query-groups 2",
)
RL = "--train-iters 3 --reward exact-match --advantage gae --lr 1e-5 --critic-lr 1e-5 --bf16 --trackers none"
RL += sized(
    " --prompts-per-step 32 --samples-per-prompt 8 --max-prompt-length 32 --max-response-length 256"
    " --rollout-buffer-gb 4",
    " --prompts-per-step 4 --samples-per-prompt 2 --max-prompt-length 8 --max-response-length 8"
    " --rollout-buffer-gb 0.01",
)
EXPERTS = f"--num-experts 16 --moe-router-topk 4 --moe-ffn-hidden-size {sized(512, 16)}"
RECURRENT = (
    "--experimental-attention-variant gated_delta_net --linear-attention-freq 4 --linear-num-key-heads 8"
    " --linear-num-value-heads 16 --linear-key-head-dim 64 --linear-value-head-dim 64 --attention-output-gate"
)
MAMBA = "--hybrid-layer-pattern M-M*-M-* --mamba-num-heads 32 --mamba-head-dim 64 --mamba-num-groups 8"
HAS_FLA = fused_chunks.version() is not None
AT_ONCE = 8  # runs, after the first
CASES = {
    "dense": "",
    "dense, no graphs": "--decode-graphs off",
    "experts": f"{EXPERTS} --moe-grouped-gemm --router-replay rollout",
    "experts, no graphs": f"{EXPERTS} --moe-grouped-gemm --router-replay rollout --decode-graphs off",
    "recurrent": RECURRENT,
    "recurrent, no graphs": f"{RECURRENT} --decode-graphs off",
    **({"recurrent by flash-linear-attention": f"{RECURRENT} --delta-rule-backend fla"} if HAS_FLA else {}),
    "mamba": MAMBA,
    "mamba, no graphs": f"{MAMBA} --decode-graphs off",
    "drafts": "--mtp-train --mtp-drafts",
    "offload": "--offload",
    "states on the host": "--use-distributed-optimizer --optimizer-cpu-offload --overlap-cpu-optimizer-d2h-h2d",
    "exact": "--exact-rollout",
    "exact experts": f"{EXPERTS} --exact-rollout --router-replay rollout",
    "deterministic 1": "--deterministic",
    "deterministic 2": "--deterministic",
}
SAME = [*((name, f"{name}, no graphs") for name in ("dense", "experts", "recurrent", "mamba")),
        ("deterministic 1", "deterministic 2")]  # fmt: skip
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
    train_rl = command("megarl.train_rl", *shlex.split(f"{SHAPE} {RL} {flags} --save {save}"))
    done = subprocess.run(train_rl, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr[-1500:])
    return [json.loads(line) for line in (save / "metrics.jsonl").read_text().splitlines()]


def main(names: list[str]):
    """Runs the named cases, or all. A gap of an exact rollout other than 0 fails, and so do equal runs that differ."""
    from tools._metric_catalog import reproducible

    found: dict[str, list[dict]] = {}
    names = names or [*CASES]

    def run(name: str, wait) -> bool:
        rows = found[name] = wait()
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
        calls = {name: functools.partial(train, Path(folder, str(number)), f"{flags} {CASES[name]}")
                 for number, name in enumerate(names)}  # fmt: skip
        with ThreadPoolExecutor(AT_ONCE) as pool:
            first = calls.pop(names[0])
            cases = {names[0]: functools.partial(run, names[0], first)}
            started = functools.cache(lambda: {name: pool.submit(call) for name, call in calls.items()})
            cases |= {name: functools.partial(run, name, lambda name=name: started()[name].result()) for name in calls}
            run_all(cases | {"equal runs": are_equal})


if __name__ == "__main__":
    main(sys.argv[1:])
