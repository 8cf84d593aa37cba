"""Peak memory of a colocated PPO step with its rollout, against the peak of training alone.

    PYTHONPATH=. python tools/bench/memory.py [--steps 2] [--json FILE] [--markdown]

Whole runs of megarl.train_rl on one rank: actor, critic and reference of 31 M parameters each, fp32. ppo has a KV cache
as large as the actor's gradients, which its requests nearly fill; its number is the peak of all phases. training has a
KV cache of 16 MiB, which serves few requests at a time; its number is the peak of the updates. The first step is not
counted. On CUDA, bytes are those of torch's allocator; on a CPU, the process's resident bytes minus those of a run with
models of a few kB and the same prompts.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path

from megarl.mcore import device
from tools.bench.offload import ENVIRONMENT, NOTHING, run_step
from tools.bench.tables import add_output_flags, whole_table

MIB, LAYERS, HIDDEN, FFN = 2**20, 16, 384, 1152
PARAMETERS = LAYERS * HIDDEN * (4 * HIDDEN + 3 * FFN)  # without embeddings and norms, a thousandth of it
MODEL = (
    f"--num-layers {LAYERS} --hidden-size {HIDDEN} --num-attention-heads 8 --ffn-hidden-size {FFN} --swiglu"
    " --normalization RMSNorm --disable-bias-linear --make-vocab-size-divisible-by 32 --max-prompt-length 96"
    " --max-response-length 8 --max-tokens-per-microbatch 208 --lr 1e-5 --kl-coefficient 0.01 --reward exact-match"
    " --prompts-per-step 6 --samples-per-prompt 4 --minibatch-size 24"
)
SMALL = "--rollout-buffer-gb 0.016"
SIDES = {
    "nothing": f"{NOTHING} --group-query-attention --num-query-groups 2 {SMALL}", "training": SMALL,
    "ppo": f"--rollout-buffer-gb {4 * PARAMETERS / 2**30}",
}  # fmt: skip


def make_inputs(folder: Path) -> list[str]:
    """Makes prompts of random digits, one token each, and a tokenizer; returns their flags."""
    digits = random.Random(1)
    rows = [{"prompt": "".join(digits.choices("0123456789", k=94)), "answer": str(i)} for i in range(64)]
    prompts, tools = folder / "train.jsonl", Path(__file__).parents[1]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = [sys.executable, str(tools / "train_tokenizer.py"), "--input", str(prompts), "--vocab-size", "16"]
    subprocess.run([*command, "--out", str(folder / "tokenizer")], check=True, capture_output=True)
    return ["--prompts", str(prompts), "--tokenizer-model", str(folder / "tokenizer.model")]


def peaks_of(side: str, inputs: list[str], steps: int, out: Path) -> dict[str, int]:
    """Peak bytes by phase of a run in its own process."""
    flags = [*MODEL.split(), *SIDES[side].split(), *inputs, "--train-iters", str(steps)]
    done = subprocess.run([sys.executable, __file__, "--out", str(out), "--", *flags], env=ENVIRONMENT,
                          capture_output=True, text=True)  # fmt: skip
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    return json.loads(out.read_text())


def measure(steps: int) -> dict:
    """Runs all sides one after the other."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        inputs = make_inputs(folder)
        peaks = {side: peaks_of(side, inputs, steps, folder / side) for side in SIDES}
    on_cuda = device.has_cuda()
    none = {} if on_cuda else peaks["nothing"]
    held = {side: {phase: size - none.get(phase, 0) for phase, size in peaks[side].items()} for side in SIDES}
    updates = [size for phase, size in held["training"].items() if phase.endswith("/update")]
    found = {"training": max(updates), "ppo": max(held["ppo"].values())}
    return {
        "device": device.device().type, "parameters": PARAMETERS, "cache_bytes": 4 * PARAMETERS, "phases": held,
        "peak_bytes": found, "ratio": found["ppo"] / found["training"],
    }  # fmt: skip


def table(found: dict, markdown: bool) -> str:
    """Peaks of training alone and of PPO, their ratio, and the KV cache."""
    names = ["training", "ppo", "ratio", "cache"]
    sizes = [found["peak_bytes"]["training"], found["peak_bytes"]["ppo"], found["cache_bytes"]]
    mib = [f"{size / MIB:.0f} MiB" for size in sizes]
    lines = [names, [*mib[:2], f"{found['ratio']:.3f}", mib[2]]]
    return whole_table(lines, markdown, 12)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--steps", type=int, default=2, help="of each run; the first does not count")
    add_output_flags(parser)
    parser.add_argument("--out", type=Path, metavar="FILE", help="run FLAGS in this process, peaks into FILE")
    parser.add_argument("flags", nargs="*", metavar="FLAGS", help="with --out: of megarl.train_rl")
    args = parser.parse_args(argv)
    if args.steps < 2:
        parser.error(f"--steps {args.steps}: must be at least 2")
    if args.out:
        run_step(args.flags, args.out)
        return 0
    found = measure(args.steps)
    print(table(found, args.markdown))
    if args.json:
        args.json.write_text(json.dumps(found, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
