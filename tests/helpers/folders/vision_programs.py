"""Programs on a small vision-language folder whose prompts have pictures: their arguments, and how they refuse."""

import functools
import json
from pathlib import Path

from tests.helpers import programs
from tests.helpers.folders import vision_folders
from tests.helpers.forked_programs import check
from tests.helpers.worlds import run_world

# Turns that answer with pictures; a turn of a policy that has learned nothing ends with every second token.
TURNS = ("--environment tests.helpers.envs.sum_environments:PicturedSums --reward environment --max-turns 3"
         " --max-turn-length 4 --max-prompt-length 160 --max-response-length 120 --max-tokens-per-microbatch 600"
         f" --environment-timeout 60 --stop-token-ids {','.join(map(str, range(0, 264, 2)))}")  # fmt: skip
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


def inputs_of(model: Path, ids: list[int], encoder, swap: bool = False) -> dict:
    """Arguments of the forward of transformers' model in a folder for a token stream; `swap`: with its pictures upside
    down."""
    import torch

    from megarl.data.images.names import key_of, row_of

    assert any(token < 0 for token in ids)
    place = json.loads((model / "config.json").read_text())["image_token_id"]
    found = [encoder.images.pixels(key_of(token)) for token in ids if token < 0 and row_of(token) == 0]
    values = [torch.from_numpy(pixels.values.copy()) for pixels in found]
    return {
        "input_ids": torch.tensor([[place if token < 0 else token for token in ids]]),
        "attention_mask": torch.ones(1, len(ids), dtype=torch.int64),
        "mm_token_type_ids": torch.tensor([[int(token < 0) for token in ids]]),
        "pixel_values": torch.cat([each.flip(0) if swap else each for each in values]),
        "image_grid_thw": torch.tensor([pixels.grid for pixels in found]),
    }


def transformers_model(model: Path):
    import torch
    from transformers import AutoModelForImageTextToText

    return AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32).eval()
