"""The files that the flags of features name, each made once, when a run first needs it."""

import functools
import json
import string
from collections.abc import Callable
from pathlib import Path

from tests.helpers.envs.judges import judge_flags, write
from tests.helpers.models.teacher_runs import hinted_prompts, one_teacher, prompts_of_teachers, teachers
from tests.helpers.programs import addition, inputs, preferences, write_lines
from tests.helpers.rollout.thinkers import thinkers
from tests.helpers.worlds import run_world
from tests.laws.plug_ins import REWARDS, SHORT


@functools.cache
def folder() -> Path:
    """Of what is made here; removed with the inputs of all small runs."""
    (inputs() / "laws").mkdir()
    return inputs() / "laws"


def _mixture(name: str, **files: str) -> Path:
    """A mixture of prompt files; {file: its entry}."""
    path = folder() / f"{name}.yaml"
    path.write_text("".join(f"{file}:\n  prompts: {entry}\n" for file, entry in files.items()))
    return path


def _few(count: int) -> Path:
    return write_lines(folder() / f"few-{count}.jsonl", [addition(35, n) for n in range(count)])


def _rewards() -> Path:
    """Three files; the answers of `free` and `shaped` are missing, and only `free` has metadata."""
    rows: dict[str, list] = {"known": [addition(n, 3) for n in range(9)]}
    for name, first in (("free", 30), ("shaped", 40)):
        rows[name] = [{"prompt": addition(first + n, 4)["prompt"]} for n in range(5)]
    rows["free"] = [row | {"metadata": {"file": "free"}} for row in rows["free"]]
    paths = {name: write_lines(folder() / f"{name}.jsonl", lines) for name, lines in rows.items()}
    own = {name: f"\n  reward: {REWARDS[name]}" for name in ("free", "shaped")}
    return _mixture("rewards", **{name: f"{path}{own.get(name, '')}\n  weight: 2" for name, path in paths.items()})


def _labelled() -> Path:
    """Labelled responses. The same one is desirable after every prompt, so that it also becomes more likely where it is
    mismatched."""
    lines = [json.loads(line) for line in (preferences() / "preferences.jsonl").read_text().splitlines()]
    rows = [{"prompt": line["prompt"], "completion": text, "label": text == "4"}
            for line in lines for text in ("4", line["rejected"], "4")]  # fmt: skip
    return write_lines(folder() / "labelled.jsonl", rows)


def _judge(mode: str, places: str) -> str:
    """Flags of a judge of responses alone, or of pairs or groups, that reads `places`."""
    compared = {"mode": mode, "messages": [{"role": "user", "content": places}]} if mode else {}
    number = {"number": {"regex": "[0-9]"}} if mode == "group" else {}
    return judge_flags(write(folder() / f"judge-{mode}.yaml", **compared, **number))


def _template() -> Path:
    """What a teacher reads before a question: the response of a sibling."""
    (folder() / "template.txt").write_text("{response}={question}\n")
    return folder() / "template.txt"


def _of_transformers(kind: str) -> Path:
    """A small folder of a type of transformers, made in a world: transformers starts threads."""
    run_world(save_type, 1, kind, folder() / kind)
    return folder() / kind


def save_type(rank: int, kind: str, path: Path):
    """Writes a small folder of a type of transformers, on a rank."""
    from tests.helpers.folders import any_types

    any_types.save(kind, path, **{"num_hidden_layers": 2} if kind == "gemma2" else {})  # with a window and without


OF_TRANSFORMERS = "gemma2", "gemma4_text", "qwen3_moe", "lfm2_moe", "bamba"


def _pictures(family: str) -> str:
    """Flags of a model with a vision tower and of prompts with pictures, made as of `_of_transformers`."""
    from tests.helpers.folders import vision_folders

    place = folder() / f"pictures-{family}"
    if not place.exists():
        run_world(vision_folders.write_program_folder, 1, place, family)
    tokens = f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model {place / 'model'}"
    flags = f"--hf-model {place / 'model'} {tokens} --prompts {place / 'pictures.jsonl'}"
    return f"{flags} {vision_folders.source_of(family)}"


MAKERS: dict[str, Callable[[], Path | str]] = {
    "heldout": lambda: inputs() / "heldout.jsonl",
    "heldout_pairs": lambda: preferences() / "heldout-preferences.jsonl",
    "mixture": lambda: _mixture("mixture", many=f"{inputs()}/train.jsonl\n  weight: 3",
                                few=f"{_few(5)}\n  max-response-length: {SHORT}"),
    "plain_mixture": lambda: _mixture("plain", many=f"{inputs()}/train.jsonl\n  weight: 3", few=f"{_few(5)}"),
    "short_prompts": lambda: _mixture("own", few=f"{_few(5)}\n  max-prompt-length: 4"),
    # Few prompts, so that a run has more than one epoch, or several.
    "epochs": lambda: write_lines(folder() / "epochs.jsonl", [addition(n, 7) for n in range(44)]),
    "pool": lambda: write_lines(folder() / "pool.jsonl", [addition(n, 3) for n in range(4, 15)]),
    "sizes": lambda: _mixture("sizes", many=f"{inputs()}/train.jsonl", few=f"{_few(6)}\n  samples-per-prompt: 2"),
    "one": lambda: _mixture("one", many=f"{inputs()}/train.jsonl", few=f"{_few(6)}\n  samples-per-prompt: 1"),
    "eight": lambda: _mixture("eight", many=f"{inputs()}/train.jsonl", few=f"{_few(6)}\n  samples-per-prompt: 8"),
    "rewards": _rewards, "labelled": _labelled, "hinted": hinted_prompts, "teacher": one_teacher,
    "teachers": lambda: f"--prompts {prompts_of_teachers('math', None, 'default')}"
                        f" {teachers(math='math', default='code')}",
    **{kind: functools.partial(_of_transformers, kind) for kind in OF_TRANSFORMERS},
    "pictures": lambda: _pictures("qwen3_vl"),
    "module_pictures": lambda: _pictures("llava"),  # read by a module of transformers
    "judge": functools.partial(_judge, "pair", "{first}{second}="), "judge_alone": functools.partial(_judge, "", ""),
    "judge_of_groups": functools.partial(_judge, "group", "{responses}="), "template": _template, "thinkers": thinkers,
}  # fmt: skip


@functools.cache
def _made(name: str) -> str:
    return str(MAKERS[name]())


def named(flags: str, **own: object) -> str:
    """Flags with what {NAME} stands for: `own`, or what is made for all runs."""
    names = {name for _, name, _, _ in string.Formatter().parse(flags) if name}
    return flags.format(**{name: own[name] if name in own else _made(name) for name in names})
