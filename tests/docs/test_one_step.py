"""docs/one_step.md: a step of a small model through the real functions fills what the page says, with these shapes."""

import ast
import re
from pathlib import Path

import torch

from tests.helpers.pages import documents
from tests.helpers.programs import ROOT, in_world, program, rl_argv, rows_of
from tests.helpers.worlds import run_world

TEXT = documents.text_of(ROOT / "docs" / "one_step.md")
SIZES = "--prompts-per-step 2 --samples-per-prompt 2 --minibatch-size 2"
FLAGS = f"{SIZES} --train-iters 1 --reward exact-match --save-interval 1"
ROWS = re.compile(r"^\| `([\w.]+)\(.*?\)` \| `([\w.]+)` in `(megarl/\w+/)` \| (.*) \|$", re.MULTILINE)
WIDTH = 26  # letters of the first column


def calls() -> dict[str, tuple[type, str]]:
    """Call of the loop -> the class and the name of its function."""
    from megarl.comm.step_batch import StepBatch
    from megarl.roles.actor import Actor
    from megarl.roles.advantage_computer import AdvantageComputer
    from megarl.roles.critic import Critic
    from megarl.roles.reference import Reference
    from megarl.roles.reward import Reward
    from megarl.rollout.batcher import RolloutBatcher
    from megarl.trainers.rl_trainer import RLTrainer

    return {
        "batcher.generate": (RolloutBatcher, "generate"), "run.dispatch": (RLTrainer, "dispatch"),
        "reward.score": (Reward, "score"), "reference.logprobs": (Reference, "logprobs"),
        "critic.values": (Critic, "values"), "actor.old_logprobs": (Actor, "old_logprobs"),
        "batch.gather": (StepBatch, "gather"), "advantages.compute": (AdvantageComputer, "compute"),
        "batch.scatter": (StepBatch, "scatter"), "critic.update": (Critic, "update"),
        "actor.update": (Actor, "update"),
    }  # fmt: skip


def shape_text(value: torch.Tensor, sequences: int, tokens: int) -> str:
    """A field's shape in N sequences and T tokens, and its type."""
    sizes = ["T" if size == tokens else "N" if size == sequences else str(size) for size in value.shape]
    return f"[{', '.join(sizes)}] {str(value.dtype).removeprefix('torch.')}"


class Recorder:
    """What each call of the loop adds to the batches of the roles."""

    def __init__(self):
        self.lines: list[str] = []
        self.batch = None
        self.seen: set[tuple[str, str]] = set()
        self.shown: set[str] = set()  # fields whose shape has been said

    def wrap(self, label: str, function):
        def recorded(*args, **named):
            result = function(*args, **named)
            self.batch = result if label == "batcher.generate" else self.batch
            news = [f"{roles}: {fields}" for roles, fields in self.news().items()] or ["the weights change"]
            self.lines += [f"{label if not number else '':{WIDTH}}{text}" for number, text in enumerate(news)]
            return result

        return recorded

    def news(self) -> dict[str, str]:
        """Roles whose batches have new fields since the last call -> these fields."""
        found: dict[str, list[str]] = {}
        for role in ("rollout", "actor", "reward", "reference", "critic"):
            batch = self.batch[role]
            fields = [] if batch is None else [n for n in batch.present() if (role, n) not in self.seen]
            self.seen |= {(role, name) for name in fields}
            if fields:
                found.setdefault(", ".join(self.text(name, batch) for name in fields), []).append(role)
        return {", ".join(roles): fields for fields, roles in found.items()}

    def text(self, name: str, batch) -> str:
        """A field's name, and when it is new to the run its shape."""
        is_new = name not in self.shown
        self.shown.add(name)
        return f"{name} {shape_text(getattr(batch, name), len(batch), len(batch.tokens))}" if is_new else name


def recorded_step(rank: int, parsed) -> list[str]:
    """Runs the program and returns what its calls added."""
    recorder = Recorder()
    for label, (owner, name) in calls().items():
        setattr(owner, name, recorder.wrap(label, getattr(owner, name)))
    in_world(rank, "rl", parsed)
    return recorder.lines


def folded(lines: list[str]) -> str:
    """The lines as the page has them: at most 118 letters, with the rest below the field names."""
    found = []
    for line in lines:
        while len(line) > 118:
            cut = line.rindex(", ", 0, 118) + 1
            found.append(line[:cut])
            line = " " * (WIDTH + 2) + line[cut:].strip()
        found.append(line)
    return "\n".join(found) + "\n"


def test_a_step_fills_what_the_page_says(tmp_path):
    import megarl.trainers.rl_trainer  # noqa: F401  before the fork

    (lines,) = run_world(recorded_step, 1, program("rl", rl_argv(tmp_path, FLAGS), 1))
    (block,) = (block.text for block in documents.blocks(TEXT) if "batcher.generate" in block.text)
    assert block == folded(lines), f"the page should have:\n{folded(lines)}"
    rows = rows_of(tmp_path, 1)
    named = set(re.findall(r"`(\w+)`", TEXT.partition("A row of `samples/` has")[2].partition(".")[0]))
    assert len(rows) == 4 and named and named <= set(rows[0])
    for name in re.findall(r"^\| `SAVE/([\w./]+)`", TEXT, re.MULTILINE):
        assert (tmp_path / name).exists() or name.startswith("report"), name  # the report is not drawn here


def defined(folder: Path) -> set[str]:
    """Names `function` and `Class.function` of a folder."""
    names = set()
    for path in folder.rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                names.add(node.name)
                inner = node.body if isinstance(node, ast.ClassDef) else []
                names |= {f"{node.name}.{each.name}" for each in inner if isinstance(each, ast.FunctionDef)}
    return names


def test_the_functions_that_the_page_names_are_there():
    rows = ROWS.findall(TEXT)
    assert [call for call, *_ in rows if call in calls()] == list(calls())
    for _, name, folder, _ in rows:
        assert name in defined(ROOT / folder), f"{folder}: {name}"
    others = re.findall(r"`(\w+(?:\.\w+)?)` \(`(megarl/\w+/(?:\w+/)?)`\)", TEXT)
    assert len(others) > 8
    for name, folder in others:
        assert name in defined(ROOT / folder), f"{folder}: {name}"
