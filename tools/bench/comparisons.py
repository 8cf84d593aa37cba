"""The comparisons of tools/bench/all.py: what each side runs in a setting of ranks and threads."""

import contextlib
import dataclasses
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import torch

from tools.bench import common, image_step, lora_step, rollout, startup, step
from tools.bench.workers import Failed, Setting, Workers, command

LOGPROB_PEERS = ("hf-softmax", "hf-cross-entropy")


@dataclass(frozen=True)
class Options:
    """What the comparisons depend on besides the setting."""

    quick: bool
    vllm_python: str | None
    lora_model: Path | None
    trl_batch: int
    lora_batch: int


@dataclass(frozen=True)
class Side:
    """A side of a comparison."""

    # (setting, whether it is a trial) -> context in which a call measures one round, in seconds; raises Failed.
    open: Callable[[Setting, bool], AbstractContextManager[Callable[[], float]]]
    settings: list[Setting] | None = None  # None: those of the run


@dataclass(frozen=True)
class Comparison:
    """One line of work, with the sides that do it; megarl is the first."""

    name: str
    sides: dict[str, Side]


@contextlib.contextmanager
def workers(of_rank: Callable[[Setting], Callable[[int], list[str]]], setting: Setting) -> Iterator[Workers]:
    """Worker processes, which end with the context."""
    made = Workers(of_rank(setting), setting)
    try:
        yield made
    finally:
        made.close()


def served(work: str, case: str, side: str, options: Options) -> Side:
    """A side of worker processes in this environment."""

    def of_rank(setting: Setting):
        return command(work, case, side, setting, options.quick)

    return Side(lambda setting, trial: workers(of_rank, setting))


def refused(reason: str) -> Side:
    """A side that cannot run, and why."""

    def open(setting: Setting, trial: bool):
        raise Failed(reason)

    return Side(open)


def vllm(case: rollout.Case, folder: Path, options: Options) -> Side:
    """vLLM, which reads the exported model from `folder`."""
    if not options.vllm_python:
        return refused("not installed: set --vllm-python")

    def of_rank(setting: Setting):
        names = []
        for rank in range(setting.ranks):
            names.append(f"requests-{rank}-of-{setting.ranks}.json")
            rollout.write_requests(folder / names[-1], case.share(rank, setting.ranks))
        program = str(Path(rollout.__file__).with_name("vllm_side.py"))
        return lambda rank: [options.vllm_python, program, str(folder), names[rank]]

    return Side(lambda setting, trial: workers(of_rank, setting))


def rollouts(name: str, folder: Path, options: Options) -> Comparison:
    """Generation: Hugging Face's `generate` and vLLM."""
    case = rollout.CASES[name]()
    lengths = max(map(len, case.prompts)), max(case.new_tokens)
    if options.vllm_python:
        chunk, _, namespace = common.build(rollout.SHAPE, lengths)
        common.export(chunk, rollout.SHAPE, namespace, case.longest).save_pretrained(folder / "model")
    sides = {side: served("rollout", name, side, options) for side in (common.OURS, "hf")}
    case = case.first(2, 3) if options.quick else case
    return Comparison(f"rollout {name}", sides | {"vllm": vllm(case, folder, options)})


def logprobs(name: str, folder: Path, options: Options) -> Comparison:
    """Log-probs of given tokens: Hugging Face's forward in two ways."""
    sides = {side: served("logprob", name, side, options) for side in (common.OURS, *LOGPROB_PEERS)}
    return Comparison(f"log-probs {name}", sides)


def reason(output: str) -> str:
    """The last line that names an error in what a failed program printed, else its last line."""
    lines = output.strip().splitlines() or ["no output"]
    errors = [line for line in lines if re.search(r"^\S*(Error|Exception)\b.*:", line.split("]: ")[-1])]
    return (errors or lines)[-1].split("]: ")[-1].strip()


def steps(program: str, side: str, folder: Path, options: Options, more: list[str]) -> Side:
    """A side of step.py, image_step.py or lora_step.py; a trial and a quick run measure one step, others three."""

    def open(setting: Setting, trial: bool):
        number = 1 if trial or options.quick else 3
        flags = [*more, "--steps", str(number)]

        def clock() -> float:
            try:
                seconds = step.in_process(program, side, folder, setting.ranks, flags, setting.threads)
            except common.Unusable as error:
                raise Failed(reason(str(error))) from error
            return sum(seconds) / len(seconds)

        return contextlib.nullcontext(clock)

    return Side(open)


CHOICE = (
    "import sys; from megarl.launcher import cores, ranks_for;"
    " n = cores(); ranks = ranks_for(sys.argv[1:], 'rl', n); print(ranks, n // ranks)"
)


def default_setting(flags: list[str]) -> Setting:
    """What launch/run.sh chooses for train_rl without NPROC and OMP_NUM_THREADS."""
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    done = subprocess.run([sys.executable, "-c", CHOICE, *flags], env=environment, capture_output=True, text=True)
    if done.returncode:
        raise Failed(done.stderr.strip().splitlines()[-1])
    return Setting(*map(int, done.stdout.split()[-2:]))


def grpo_steps(name: str, is_granite: bool, folder: Path, options: Options) -> Comparison:
    """A whole GRPO step: TRL, and megarl with the ranks and threads that its launcher chooses. Of a Llama, or of a
    Granite as transformers' module."""
    case = step.CASES[name]
    step.make_folder(folder, case, is_granite)
    more = ["--case", name, "--trl-batch", str(options.trl_batch), *["--granite"] * is_granite]
    sides = {side: steps(step.__file__, side, folder, options, more) for side in (common.OURS, *step.PEERS)}
    chosen = [default_setting(step.megarl_flags(folder, case, 1, step.model_flags(folder, is_granite)))]
    sides["megarl, default"] = dataclasses.replace(sides[common.OURS], settings=chosen)
    return Comparison(f"GRPO step {name}{', a module' * is_granite}", sides)


def image_steps(name: str, folder: Path, options: Options) -> Comparison:
    """A whole GRPO step on pictures: TRL."""
    image_step.make_folder(folder, step.CASES[name])
    more = ["--case", name, "--trl-batch", str(options.trl_batch)]
    sides = {side: steps(image_step.__file__, side, folder, options, more) for side in (common.OURS, *step.PEERS)}
    return Comparison(f"GRPO step on pictures {name}", sides)


def lora_steps(folder: Path, options: Options) -> Comparison:
    """A GRPO step with LoRA on a public model: megarl with transformers' module of it, TRL with PEFT."""
    name, sides = "GRPO step LoRA", lora_step.SIDES
    if options.lora_model is None:
        return Comparison(name, dict.fromkeys(sides, refused("no model: set --lora-model")))
    lora_step.make_inputs(folder)
    more = ["--model", str(options.lora_model), "--trl-batch", str(options.lora_batch)]
    return Comparison(name, {side: steps(lora_step.__file__, side, folder, options, more) for side in sides})


def starts(ranks: int, folder: Path, options: Options) -> Comparison:
    """From the command to the first rollout: torchrun."""
    flags = ["--train-iters", "2", "--eval-interval", "2", "--lr-warmup-iters", "1"]
    startup.timed(["bash", "launch/warm_start.sh", *flags], SAVE=str(folder))
    start = startup.Quickstart(folder, ranks)
    settings = [Setting(ranks, max(1, torch.get_num_threads() // ranks))]
    clocks = {common.OURS: start.by_script, "torchrun": start.by_torchrun}

    def side(clock) -> Side:
        return Side(lambda *_: contextlib.nullcontext(lambda: clock()["first_rollout_s"]), settings)

    return Comparison(f"start-up, {ranks} ranks", {name: side(clock) for name, clock in clocks.items()})


# Group of --only -> the comparisons in it, each a function of a folder of its own and the options.
GROUPS: dict[str, list[Callable[[Path, Options], Comparison]]] = {
    "rollout": [lambda *a, n=name: rollouts(n, *a) for name in rollout.CASES],
    "step": [lambda *a, n=name: grpo_steps(n, False, *a) for name in step.CASES],
    "module": [lambda *a, n=name: grpo_steps(n, True, *a) for name in step.CASES],
    "images": [lambda *a, n=name: image_steps(n, *a) for name in step.CASES],
    "lora": [lora_steps],
    "logprob": [lambda *a, n=name: logprobs(n, *a) for name in ("plain", "gradient", "ragged")],
    "startup": [lambda *a, n=ranks: starts(n, *a) for ranks in (1, 2)],
}

PACKAGES = ("torch", "megatron-core", "transformers", "trl", "peft")
VERSION = "from importlib.metadata import packages_distributions as p, version as v; print(v(p()['vllm'][0]))"


def versions(options: Options) -> dict[str, str]:
    """Version of each installed library, vLLM's from its own interpreter."""
    found = {"python": sys.version.split()[0]}
    for package in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    if options.vllm_python:
        done = subprocess.run([options.vllm_python, "-c", VERSION], capture_output=True, text=True)
        found["vllm"] = done.stdout.strip() or "unknown"
    return found
