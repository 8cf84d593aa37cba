"""Programs on a small vision-language folder whose prompts have pictures: their arguments, and how they refuse."""

import functools
from pathlib import Path

from tests.helpers import programs
from tests.helpers.folders import vision_folders
from tests.helpers.forked_programs import check
from tests.helpers.worlds import run_world

FLAGS = ("--max-prompt-length 80 --max-response-length 6 --max-tokens-per-microbatch 200 --prompts-per-step 4"
         " --samples-per-prompt 2 --minibatch-size 8 --ppo-epochs 1 --advantage grpo --kl-coefficient 0 --lr 1e-4"
         " --rollout-buffer-gb 0.01 --rollout-max-requests 8 --reward tests.helpers.programs:graded_reward"
         " --save-interval 1 --lr-decay-iters 9")  # fmt: skip


@functools.cache
def folder() -> Path:
    path = vision_folders.temporary() / "pictures"
    run_world(vision_folders.write_program_folder, 1, path)
    return path


def argv(save: Path, flags: str = "", model: Path | None = None, prompts: str = "pictures") -> list[str]:
    model = model or folder() / "model"
    tokens = f"--hf-model {model} --tokenizer-type HuggingFaceTokenizer --tokenizer-model {model}"
    return f"{tokens} --prompts {folder() / prompts}.jsonl {FLAGS} --save {save} --train-iters 1 {flags}".split()


def refused(argv: list[str]) -> str:
    """The last line of a program that must refuse its input; one before it is about parts that are not trained."""
    status, printed, errors = check(argv)
    assert (status, printed) == (2, ""), errors
    return errors.splitlines()[-1]


def counted(rank: int, parsed) -> list[int]:
    """The keys of the images that this rank's tower computed in a run, in order."""
    from megarl.mcore.any_model.tower import Tower

    keys, compute = [], Tower.compute

    def count(tower, pixels):
        keys.append(pixels.key)
        return compute(tower, pixels)

    Tower.compute = count
    programs.in_world(rank, "rl", parsed)
    return keys
