"""Makes training and held-out prompt files from a procedural reasoning_gym task, offline and provably disjoint.

    python tools/make_prompts.py --task chain_sum --train 4000 --heldout 300 --seed 1 --out data/sums \\
        --task-option min_terms=2 --task-option max_terms=2 --task-option max_digits=2 \\
        --prompt-template "{metadata[expression]} ="

Writes to DIR train.jsonl, heldout.jsonl (each line: prompt, answer, task, metadata) and prompts.json (arguments and
SHA-256). The same arguments give the same bytes. Two entries are the same question if their question texts or their
prompts are equal after normalisation; `metadata.question_id` is a hash of the question text. The split orders the
distinct questions by a hash keyed with the seed, so both files have the same distribution.
"""

import argparse
import collections.abc
import dataclasses
import difflib
import enum
import hashlib
import importlib.metadata
import json
import os
import random
import re
import sys
import types
import typing
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from megarl.errors import ArgumentParser, UsageError, refuses_in_one_line, writing

# Entries to try per wanted question before giving up: small tasks repeat questions.
_TRIES_PER_QUESTION = 30
_EXTRA_TRIES = 1000
# Fields set from --seed and the number of tries.
_OWN_FIELDS = {"seed", "size"}
# A text that answers no question.
_NO_ANSWER = "?"


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    parser = ArgumentParser(description=__doc__.split("\n\n")[0], allow_abbrev=False)
    parser.add_argument("--task", required=True, help="name of a reasoning_gym task, e.g. chain_sum")
    parser.add_argument("--train", type=int, required=True, help="number of training prompts")
    parser.add_argument("--heldout", type=int, required=True, help="number of held-out prompts")
    parser.add_argument(
        "--seed", type=int, default=1, help="random seed of the questions and the split; default: %(default)s"
    )
    parser.add_argument("--out", required=True, metavar="DIR", help="folder for the three files")
    parser.add_argument(
        "--task-option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a field of the task's configuration with a YAML value, e.g. max_digits=2 or 'operators=[\"+\"]'",
    )
    parser.add_argument(
        "--prompt-template",
        default="{question}",
        help="text of a prompt, with {question} and {metadata[FIELD]} of the entry; default: %(default)s",
    )
    parser.add_argument("--keep", metavar="REGEX", help="leave out prompts that this Python expression does not match")
    arguments = parser.parse_args(argv)
    for name in ("train", "heldout"):
        if getattr(arguments, name) < 1:
            raise UsageError(f"--{name} {getattr(arguments, name)}: must be at least 1")
    if arguments.seed < 0:
        raise UsageError(f"--seed {arguments.seed}: must not be negative")
    try:
        arguments.keep = re.compile(arguments.keep or "")
    except re.error as error:
        raise UsageError(f"--keep {arguments.keep!r}: is no regular expression: {error}") from None
    return arguments


def normalise(text: str) -> str:
    """Text normalised in case, character width and white space, to compare questions."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def close_matches(name: str, allowed: list[str]) -> str:
    near = difflib.get_close_matches(name, allowed, n=3, cutoff=0.5)
    return f"did you mean {' or '.join(near)}?" if near else f"allowed: {', '.join(sorted(allowed))}"


def convert(value: Any, hint: Any) -> Any:
    """Converts a YAML `value` to the type `hint`; TypeError if it does not fit."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in inner:
            return None
        return convert(value, next(kind for kind in inner if kind is not type(None)))
    if origin is typing.Literal and value in inner:
        return value
    if (origin or hint) in (list, tuple, collections.abc.Sequence):
        if not isinstance(value, list):
            raise TypeError
        element = inner[0] if len(set(inner) - {...}) == 1 else Any
        values = [convert(item, element) for item in value]
        return tuple(values) if (origin or hint) is tuple else values
    if hint is Any:
        return value
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return _enum_member(value, hint)
    if hint is float and type(value) is int:
        return float(value)
    if isinstance(hint, type) and origin is None and type(value) is hint:
        return value
    raise TypeError


def _enum_member(value: Any, kind: type[enum.Enum]) -> enum.Enum:
    try:
        return kind(value)
    except ValueError:
        raise TypeError from None


def parse_option(text: str, config_class: type) -> tuple[str, Any]:
    """(name, value) of `name=value`, typed as the field of `config_class`; UsageError for a wrong name or value."""
    name, equals, value_text = text.partition("=")
    hints = typing.get_type_hints(config_class)
    allowed = [field.name for field in dataclasses.fields(config_class) if field.name not in _OWN_FIELDS]
    if not equals:
        raise UsageError(f"--task-option {text}: must be NAME=VALUE")
    if name not in allowed:
        raise UsageError(f"--task-option {text}: the task has no option {name!r}; {close_matches(name, allowed)}")
    try:
        value = value_text if hints[name] is str else convert(yaml.safe_load(value_text), hints[name])
    except (TypeError, yaml.YAMLError):
        kind = getattr(hints[name], "__name__", None) if not typing.get_args(hints[name]) else str(hints[name])
        raise UsageError(f"--task-option {text}: {name} must be {kind or hints[name]}") from None
    return name, value


def build_task(task: str, options: list[str], seed: int, size: int) -> Any:
    """The reasoning_gym dataset of `task` with the given options; UsageError for a wrong name or value."""
    from reasoning_gym.factory import DATASETS

    if task not in DATASETS:
        raise UsageError(f"--task {task}: reasoning_gym has no such task; {close_matches(task, list(DATASETS))}")
    dataset_class, config_class = DATASETS[task]
    # A few tasks also use Python's global generator.
    random.seed(seed)
    fields: dict[str, Any] = {}
    for text in options:
        name, value = parse_option(text, config_class)
        if name in fields:
            raise UsageError(f"--task-option {text}: {name} is given twice")
        fields[name] = value
    # A task uses seed + index for entry `index`; hashing separates the entries of two seeds.
    start = int.from_bytes(hashlib.sha256(f"{task}/{seed}".encode()).digest()[:4], "big")
    try:
        return dataset_class(config_class(**fields, seed=start, size=size))
    except Exception as error:
        raise UsageError(f"--task {task}: cannot be built with {fields}: {error}") from None


def make_line(entry: dict[str, Any], task: str, template: str, original: Callable, rebuilt: Callable) -> dict[str, Any]:
    """The prompt line of an entry; UsageError if its answer scores differently after a round trip through JSON, or if a
    text that answers nothing is right.

    `original`: scorer of the dataset that made the entry; `rebuilt`: the scorer that training will use.
    """
    # The difficulty is the same on every line, and no scorer reads it.
    metadata = {key: value for key, value in entry["metadata"].items() if key != "difficulty"}
    line = {"prompt": "", "answer": entry["answer"], "task": task, "metadata": metadata}
    if entry["answer"] is None:
        del line["answer"]
    try:
        line = json.loads(json.dumps(line))
        expected = original(entry["answer"], entry)
        stored = {"answer": line.get("answer"), "metadata": line["metadata"]}
        survived = rebuilt(stored["answer"], stored) == expected
    except Exception:
        survived = False
    if not survived:
        raise UsageError(f"--task {task}: its entries cannot be scored after they were written as JSON")
    if entry["answer"] != _NO_ANSWER and _is_right(_NO_ANSWER, stored, rebuilt):
        raise UsageError(f"--task {task}: its scorer calls the text {_NO_ANSWER} right, where {entry['answer']} is")
    try:
        line["prompt"] = template.format(question=entry["question"], metadata=line["metadata"])
    except (LookupError, AttributeError, ValueError, TypeError) as error:
        raise UsageError(
            f"--prompt-template {template!r}: {type(error).__name__} {error}; "
            f"fields: question, {', '.join(f'metadata[{key}]' for key in metadata)}"
        ) from None
    if not line["prompt"].strip():
        raise UsageError(f"--prompt-template {template!r}: gives an empty prompt")
    line["metadata"]["question_id"] = hashlib.sha256(normalise(entry["question"]).encode()).hexdigest()[:16]
    return line


def _is_right(answer: str, entry: dict[str, Any], scorer: Callable) -> bool:
    try:
        return scorer(answer, entry) == 1.0
    except Exception:  # scorers may fail on a text that has not the form of an answer
        return False


def distinct_lines(dataset: Any, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Lines of as many distinct questions as both files need, in the order of the task."""
    from reasoning_gym import get_score_answer_fn

    rebuilt = get_score_answer_fn(arguments.task)
    wanted = arguments.train + arguments.heldout
    lines: list[dict[str, Any]] = []
    questions: set[str] = set()
    prompts: set[str] = set()
    for index in range(dataset.config.size):
        try:
            entry = dataset[index]
        except Exception as error:
            raise UsageError(f"--task {arguments.task}: fails on entry {index}: {error}") from None
        line = make_line(entry, arguments.task, arguments.prompt_template, dataset.score_answer, rebuilt)
        question, prompt = normalise(entry["question"]), normalise(line["prompt"])
        if question not in questions and prompt not in prompts and arguments.keep.search(line["prompt"]):
            lines.append(line)
        questions.add(question)
        prompts.add(prompt)
        if len(lines) == wanted:
            return lines
    raise UsageError(
        f"--train {arguments.train} and --heldout {arguments.heldout} need {wanted} different questions, but --task "
        f"{arguments.task} gave {len(lines)} in {dataset.config.size} tries; ask for fewer, widen its options or --keep"
    )


def split(lines: list[dict[str, Any]], heldout: int, seed: int) -> tuple[list[dict], list[dict]]:
    """(train, held-out), split by a keyed hash of the question, so that both have the same distribution."""

    def rank(line: dict[str, Any]) -> str:
        return hashlib.sha256(f"{seed}/{line['metadata']['question_id']}".encode()).hexdigest()

    ranked = sorted(lines, key=rank)
    return ranked[heldout:], ranked[:heldout]


def write_files(folder: Path, train: list[dict], heldout: list[dict], made_from: dict[str, Any]) -> None:
    """Writes the two JSONL files, then the manifest, which marks them as complete."""
    folder.mkdir(parents=True, exist_ok=True)
    manifest_path = folder / "prompts.json"
    manifest_path.unlink(missing_ok=True)
    files = {}
    for name, lines in (("train.jsonl", train), ("heldout.jsonl", heldout)):
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines).encode()
        (folder / name).write_bytes(text)
        files[name] = {"count": len(lines), "sha256": hashlib.sha256(text).hexdigest()}
    manifest_path.write_text(json.dumps({**made_from, "files": files}, indent=2) + "\n")


def shared_questions(folder: Path) -> list[str]:
    """Prompts of the held-out file whose question or prompt is also in the training file."""

    def keys(line: str) -> tuple[str, str]:
        entry = json.loads(line)
        return entry["metadata"]["question_id"], normalise(entry["prompt"])

    def read(name: str) -> list[str]:
        return (folder / name).read_text(encoding="utf-8").split("\n")[:-1]

    train = {key for line in read("train.jsonl") for key in keys(line)}
    return [json.loads(line)["prompt"] for line in read("heldout.jsonl") if train.intersection(keys(line))]


def told(tool: str, folder: Path, text: str, is_apart: bool = True) -> int:
    """Prints what was made, and returns 0; 1 if `is_apart`, and yet a held-out question is in the training file."""
    shared = shared_questions(folder) if is_apart else []
    if shared:
        print(f"{tool}: {len(shared)} held-out questions are in train, e.g. {shared[0]!r}", file=sys.stderr)
        return 1
    print(f"{folder}: {text}")
    return 0


@refuses_in_one_line("make_prompts")
def main(argv: list[str]) -> int:
    arguments = parse_arguments(argv)
    with writing(f"--out {arguments.out}"):
        size = _TRIES_PER_QUESTION * (arguments.train + arguments.heldout) + _EXTRA_TRIES
        dataset = build_task(arguments.task, arguments.task_option, arguments.seed, size)
        train, heldout = split(distinct_lines(dataset, arguments), arguments.heldout, arguments.seed)
        folder = Path(arguments.out)
        made_from = {
            "task": arguments.task,
            "task_options": sorted(arguments.task_option),
            "prompt_template": arguments.prompt_template,
            "keep": arguments.keep.pattern,
            "seed": arguments.seed,
            "reasoning_gym": importlib.metadata.version("reasoning_gym"),
        }
        write_files(folder, train, heldout, made_from)
    return told("make_prompts", folder, f"{len(train)} train and {len(heldout)} held-out prompts, no question in both")


if __name__ == "__main__":
    # Some tasks iterate over sets of strings, whose order depends on the hash seed.
    if os.environ.get("PYTHONHASHSEED") != "0":
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, "PYTHONHASHSEED": "0"})
    sys.exit(main(sys.argv[1:]))
