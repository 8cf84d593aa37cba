"""Teachers of small runs: run folders of models of other shapes than the policy's, and prompts with hints for them."""

import functools
import json
from pathlib import Path

from tests.helpers.programs import inputs, sft_argv, train, write_lines

# Depth, width, head and softcap differ from the policy's, and from each other.
SHAPES = {
    "math": "--num-layers 3 --hidden-size 48 --ffn-hidden-size 96 --untie-embeddings-and-output-weights",
    "code": "--num-layers 1 --hidden-size 40 --ffn-hidden-size 64 --final-logit-softcapping 5",
}


@functools.cache
def teacher_folder() -> Path:
    """Of what is made here; removed with the inputs of all small runs."""
    (inputs() / "teachers").mkdir()
    return inputs() / "teachers"


@functools.cache
def teacher(name: str) -> Path:
    """The run folder of a teacher."""
    train("sft", sft_argv(teacher_folder() / name, f"{SHAPES[name]} --train-iters 20"))
    return teacher_folder() / name


def one_teacher(name: str = "math") -> str:
    """Flags of one teacher without a name."""
    return f"{SHAPES[name].replace('--', '--teacher-')} --teacher-pretrained-checkpoint {teacher(name)}"


def teachers(**names: str) -> str:
    """`--teachers` with the run folders of these teachers by name."""
    return "--teachers " + " ".join(f"{name}={teacher(of)}" for name, of in names.items())


@functools.cache
def prompts_of_teachers(*names: str | None) -> Path:
    """Prompts whose teachers are these names in turn; None: a line without the field."""
    rows = [json.loads(line) for line in (inputs() / "train.jsonl").read_text().splitlines()]
    rows = [row | ({} if (of := names[i % len(names)]) is None else {"teacher": of}) for i, row in enumerate(rows)]
    return write_lines(teacher_folder() / f"{'-'.join(map(str, names))}-train.jsonl", rows)


@functools.cache
def hinted_prompts() -> Path:
    """Prompts, of which every second one has another prompt for the teacher: with a worked sum before it."""
    rows = [json.loads(line) for line in (inputs() / "train.jsonl").read_text().splitlines()[:40]]
    hints = [row | {"teacher_prompt": f"1+{i}={i + 1}{row['prompt']}"} for i, row in enumerate(rows[::2])]
    rows = [row for pair in zip(rows[1::2], hints, strict=True) for row in pair]
    return write_lines(teacher_folder() / "hinted.jsonl", rows)
