"""PPO of the quickstart's policy on the device, in bf16, from a warm start that a CPU has made: does it learn there as
it does on a CPU (`docs/curves.json`), and does the gap stay 0 over all updates with `--exact-rollout`?"""

import functools
import subprocess
import tempfile
from pathlib import Path

from megarl.observe.metrics_file import FILE_NAME, read_metrics
from tools import curves
from tools.gpu import command, report, run_all, sized

START = curves.ROOT / "build" / "warm_start"
STEPS = sized(100, 2)
FEWER = sized("", "--lr-warmup-iters 0 --prompts-per-step 2 --samples-per-prompt 2 --minibatch-size 4 --eval-samples 2")
LEAST_GAIN = sized(5.0, -100.0)  # points of held-out accuracy; the warm start has about 80 %
GAP = 0.05  # nats in bf16, as in `programs`
CASES = {"bf16": "", "bf16, exact": "--exact-rollout"}


def prepare():
    """Makes prompts, tokenizer and warm start on this machine's CPU, unless they are there."""
    curves.make_warm_start(START)


def train(save: Path, flags: str) -> subprocess.Popen:
    """Starts a run on one rank; its output goes to `save`.log."""
    configs = [curves.CONFIGS / name for name in ("quickstart.yaml", "curves.yaml", "recipes/ppo.yaml")]
    own = ["--train-iters", STEPS, "--lr-decay-iters", STEPS, "--reward", "exact-match", "--trackers", "none", "--bf16"]
    files = [*curves.data_flags(START), "--pretrained-checkpoint", START / "sft", "--save", save]
    words = map(str, ["--config", *configs, *files, *own, *FEWER.split(), *flags.split()])
    with open(f"{save}.log", "w") as log:
        return subprocess.Popen(command("megarl.train_rl", *words), cwd=curves.ROOT, stdout=log, stderr=log)


def learned(name: str, process: subprocess.Popen, save: Path) -> bool:
    """Reports the curve of a run; False if it has not learned, or if its gap is too large."""
    if status := process.wait():
        raise RuntimeError(f"exit status {status}: {Path(f'{save}.log').read_text()[-1500:]}")
    curve = curves.read_curve(save, name, 1, [])
    gaps = [
        row["rollout/logprob_gap_max"] for row in read_metrics(save / FILE_NAME) if "rollout/logprob_gap_max" in row
    ]
    accuracy = dict(zip(curve.steps, curve.accuracy, strict=True))
    report(learn=name, accuracy=accuracy, gain=curve.gain, steps=len(gaps), gap_max=max(gaps))
    return curve.gain >= LEAST_GAIN and len(gaps) == STEPS and max(gaps) <= (0 if "exact" in name else GAP)


def main():
    """Runs all cases at once."""
    if not START.exists():
        raise SystemExit(f"{START} does not exist: `bash tools/gpu_check.sh prepare` makes it on a CPU")
    with tempfile.TemporaryDirectory() as folder:
        saves = {name: Path(folder, str(number)) for number, name in enumerate(CASES)}
        started = {name: train(saves[name], flags) for name, flags in CASES.items()}
        run_all({name: functools.partial(learned, name, process, saves[name]) for name, process in started.items()})


if __name__ == "__main__":
    main()
