"""Small runs of the real programs for tests: data, tokenizer and warm start made once, command lines, results."""

import atexit
import contextlib
import functools
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.helpers.worlds import SAFETY_SECONDS, run_world, wait_until
from tools import _metric_catalog as metric_catalog
from tools._metric_catalog import reproducible as timeless
from tools.train_tokenizer import train as train_tokenizer

ROOT = Path(__file__).parents[2]
INPUTS = "MEGARL_TEST_INPUTS"
RECIPES = sorted((ROOT / "configs" / "recipes").glob("*.yaml"))
RL_RECIPES = [path for path in RECIPES if "\nadvantage:" in path.read_text()]  # the others are of train_preference
LAYERS = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --ffn-hidden-size 64 --swiglu --normalization RMSNorm"
    " --disable-bias-linear --group-query-attention --num-query-groups 2 --make-vocab-size-divisible-by 32"
)
LENGTHS = " --max-prompt-length 6 --max-response-length 4 --max-tokens-per-microbatch 40"
SHAPE = LAYERS + LENGTHS
RL = (
    " --prompts-per-step 6 --samples-per-prompt 2 --minibatch-size 4 --ppo-epochs 1 --lr 1e-3"
    " --kl-coefficient 0.05 --entropy-coefficient 0.01 --temperature 0.9 --rollout-buffer-gb 0.001"
    " --rollout-max-requests 8 --seed 5"
)
CRITIC = " --critic-lr 3e-3"
SFT = " --global-batch-size 12 --lr 1e-2 --lr-decay-style cosine --lr-warmup-iters 2 --lr-warmup-init 0 --seed 5"
REWARD = " --global-batch-size 12 --lr 5e-3 --seed 5 --max-tokens-per-microbatch 80"
PREFERENCE = " --global-batch-size 12 --lr 1e-3 --seed 5 --max-tokens-per-microbatch 80"
REWARD_STEPS = 20
SFT_STEPS = 40  # enough to end answers, too few to know them


def addition(first: int, second: int) -> dict:
    """A prompt of four or five tokens with an answer of one or two."""
    return {"prompt": f"{first}+{second}=", "answer": str(first + second)}


def write_lines(path: Path, rows: list) -> Path:
    """A JSONL file."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@functools.cache
def inputs() -> Path:
    """Folder of this process with train.jsonl, heldout.jsonl, tokenizer.model and the warm start `sft`, for runs beside
    them, too; removed at exit."""
    return shutil.copytree(made_inputs(), _folder(), dirs_exist_ok=True)


@functools.cache
def made_inputs() -> Path:
    """What all processes of --jobs copy; made once, or before: a folder that `INPUTS` names."""
    if made := os.environ.get(INPUTS):
        return Path(made)
    folder = _folder()
    rows = [addition(first, second) for first in range(30) for second in range(10)]
    held_out = rows[7::19]
    write_lines(folder / "heldout.jsonl", held_out)
    write_lines(folder / "train.jsonl", [row for row in rows if row not in held_out])
    texts = [text for row in rows for text in (row["prompt"], row["answer"])]
    (folder / "tokenizer.model").write_bytes(train_tokenizer(texts, 16, False))
    train("sft", _sft(folder, folder / "sft", ["--train-iters", str(SFT_STEPS)]))
    return folder


def _folder() -> Path:
    """A new folder, which goes when the process that made it ends; forks of it leave it."""
    folder, owner = Path(tempfile.mkdtemp(prefix="megarl-tests-")), os.getpid()
    atexit.register(lambda: os.getpid() == owner and shutil.rmtree(folder, ignore_errors=True))
    return folder


def _files(folder: Path) -> list[str]:
    files = {"--prompts": "train.jsonl", "--tokenizer-model": "tokenizer.model"}
    return [token for flag, name in files.items() for token in (flag, str(folder / name))]


def _sft(folder: Path, save: Path, more: list[str]) -> list[str]:
    return [*(SHAPE + SFT).split(), *_files(folder), "--save", str(save), *more]


def sft_argv(save: Path, flags: str = "") -> list[str]:
    """Command line of a small supervised run."""
    return _sft(inputs(), save, flags.split())


@functools.cache
def preferences() -> Path:
    """Folder with preferences.jsonl and heldout-preferences.jsonl: of two numbers the even one is chosen."""
    folder = inputs()
    for name, lines in (("preferences", "train.jsonl"), ("heldout-preferences", "heldout.jsonl")):
        rows = map(json.loads, (folder / lines).read_text().splitlines())
        pairs = [(row["prompt"], int(row["answer"]) // 2 * 2) for row in rows]
        rows = [{"prompt": prompt, "chosen": str(even), "rejected": str(even + 1)} for prompt, even in pairs]
        write_lines(folder / f"{name}.jsonl", rows)
    return folder


def reward_argv(save: Path, flags: str = "") -> list[str]:
    """Command line of a small training of a reward model."""
    files = ["--prompts", str(preferences() / "preferences.jsonl")]
    files += ["--tokenizer-model", str(inputs() / "tokenizer.model"), "--save", str(save)]
    return [*(SHAPE + REWARD).split(), *files, *flags.split()]


def preference_argv(save: Path, flags: str = "") -> list[str]:
    """Command line of a small training of a policy on pairs, from the warm start; `flags` win over the defaults."""
    files = ["--prompts", str(preferences() / "preferences.jsonl"), "--pretrained-checkpoint", str(inputs() / "sft")]
    files += ["--tokenizer-model", str(inputs() / "tokenizer.model"), "--save", str(save)]
    return [*(SHAPE + PREFERENCE).split(), *files, *flags.split()]


@functools.cache
def reward_model() -> Path:
    """Run folder of a reward model that knows even numbers from odd ones; trained once."""
    save, held_out = inputs() / "reward", preferences() / "heldout-preferences.jsonl"
    train("reward", reward_argv(save, f"--train-iters {REWARD_STEPS} --eval-prompts {held_out} --eval-interval 10"))
    return save


def rl_argv(save: Path, flags: str = "", warm_start: bool = True) -> list[str]:
    """Command line of a small run from the warm start, PPO by default; `flags` win over the defaults. If they name a
    folder, it describes the layers."""
    shape = (LENGTHS if "hf-model" in flags else SHAPE) + RL + CRITIC * ("--advantage" not in flags)
    start = ["--pretrained-checkpoint", str(inputs() / "sft")] if warm_start else []
    return [*shape.split(), *_files(inputs()), "--save", str(save), *start, *flags.split()]


def program(name: str, argv: list[str], size: int):
    """The parsed command line of a program ('rl', 'sft' or 'reward') for a world of that size."""
    from megarl import arguments

    return arguments.parse(argv, size, name)


def in_world(rank: int, name: str, parsed) -> str:
    """Runs a program on this rank of a world, without drawing the report; returns what it printed."""
    from megarl import train_preference, train_reward, train_rl, train_sft
    from megarl.extras import report
    from megarl.observe.timers import Timers

    report.write_report = lambda folder: None  # type: ignore[assignment]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        programs = {"rl": train_rl, "sft": train_sft, "reward": train_reward, "preference": train_preference}
        programs[name].train(parsed, Timers())
    return printed.getvalue()


def train(name: str, argv: list[str], size: int = 1) -> list[str]:
    """Runs a program in a world of forked ranks; returns what each rank printed."""
    from megarl import train_preference, train_reward, train_rl, train_sft  # noqa: F401  imported once, before the fork

    return run_world(in_world, size, name, program(name, argv, size))


def digit_reward(sample) -> float:
    """A plug-in: the share of sevens in a response, and a little for its length, so that rewards differ."""
    return sample.response.count("7") / 4 + len(sample.response) / 100


def torchrun(
    module: str, argv: list[str], size: int, restarts: int = 0, launcher: str = "torch.distributed.run"
) -> subprocess.CompletedProcess:
    """Runs a program as users do; output as text."""
    command = [sys.executable, "-m", launcher, "--standalone", "--nproc-per-node", str(size)]
    command += ["--max-restarts", str(restarts), "-m", module, *argv]
    return subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=SAFETY_SECONDS)


def environment(**more: str) -> dict[str, str]:
    """The environment of a program that a test starts."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **more}


def metrics(save: Path) -> dict[int, dict]:
    """Rows of metrics.jsonl by step. Every name must be in the catalogue: a new metric needs an entry there."""
    rows = {row["step"]: row for row in map(json.loads, (save / "metrics.jsonl").read_text().splitlines())}
    names = dict.fromkeys(name for row in rows.values() for name in row)
    unknown = metric_catalog.unknown(names)
    assert not unknown, f"not in tools/_metric_catalog.py: {unknown}"
    return rows


def samples(save: Path, step: int) -> bytes:
    """A step's samples file."""
    return (save / "samples" / f"step_{step:08d}.jsonl").read_bytes()


def rows_of(save: Path, step: int = 1) -> list[dict]:
    """The rows of a step's samples file."""
    return list(map(json.loads, samples(save, step).splitlines()))


def assert_close(found: dict, expected: dict, names: list[str], tolerance: float):
    """Metrics agree within a relative tolerance, absolute below 0.2: a small sum has the rounding of its terms."""
    for name in names:
        wanted = pytest.approx(expected[name], rel=tolerance, abs=tolerance * 0.2)
        assert found[name] == wanted, (name, found[name], expected[name])


def broken_reward(sample) -> float:
    """A plug-in whose result is no number."""
    return float("nan")


def graded_reward(sample) -> float:
    """A plug-in: another reward for almost every response."""
    return sum(int(c) + 1 for c in sample.response if c.isdigit()) / 20 - 0.3 * (not sample.finished)


def waiting_reward(sample) -> float:
    """A plug-in: `graded_reward` after the file that MEGARL_TEST_AWAITED names exists, if it names one."""
    awaited = os.environ.get("MEGARL_TEST_AWAITED")
    assert awaited is None or wait_until(Path(awaited).exists)
    return graded_reward(sample)


def coarse_reward(sample) -> float:
    """A plug-in: right or wrong, about half of the time, so that the rewards of a group are often all equal."""
    return float(sum(map(ord, sample.prompt + sample.response)) % 2)


def never_right(sample) -> float:
    """A plug-in: a reward that differs, but never one of a right answer."""
    return 0.1 * len(sample.response)


GRADED = "--reward tests.helpers.programs:graded_reward"  # rewards that differ, so that the policy trains
PLACED = ["reward/mean", "reward/std", "actor/loss", "actor/entropy", "actor/grad_norm", "critic/loss",
          "critic/grad_norm", "kl/reference", "rollout/tokens"]  # fmt: skip


def timeless_rows(save: Path, steps) -> dict:
    """Rows of metrics.jsonl by step without the metrics of time and memory."""
    rows = metrics(save)
    return {step: timeless(rows[step]) for step in steps}
