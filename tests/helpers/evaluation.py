"""Small runs of the program evaluate: command lines and what each rank prints."""

import contextlib
import io
from pathlib import Path

from tests.helpers.programs import SHAPE, inputs, program
from tests.helpers.worlds import run_world

MODEL = SHAPE.replace(" --max-tokens-per-microbatch 40", "") + " --rollout-buffer-gb 0.001 --rollout-max-requests 8"


def evaluate_argv(
    save: Path | None = None, flags: str = "", prompts: Path | None = None, load: Path | None = None
) -> list[str]:
    """Command line of an evaluation of the warm start; `flags` win over the defaults."""
    files = {"--tokenizer-model": inputs() / "tokenizer.model", "--load": load or inputs() / "sft"}
    files |= {"--eval-prompts": prompts or inputs() / "heldout.jsonl"} | ({"--save": save} if save else {})
    return [*MODEL.split(), *(str(item) for pair in files.items() for item in pair), "--seed", "5", *flags.split()]


def _in_world(rank: int, parsed) -> str:
    """What the program prints on this rank of a world."""
    from megarl.observe.timers import Timers
    from megarl.trainers.evaluation_program import evaluate

    with contextlib.redirect_stdout(io.StringIO()) as printed:
        evaluate(parsed, Timers())
    return printed.getvalue()


def run_evaluate(command: list[str], size: int = 1) -> list[str]:
    """Runs the program in a world of forked ranks; returns what each rank printed."""
    import megarl.trainers.evaluation_program  # noqa: F401  imported once, before the fork

    return run_world(_in_world, size, program("evaluate", command, size))
