"""Sampled responses, one file per step, for people to read: whole in samples/, some token by token in tokens/."""

from collections.abc import Callable, Sequence
from pathlib import Path

from megarl.observe.files import json_line, step_name, write_atomically

THUMBNAILS = "thumbnails"  # folder of small images of prompts, NAME.png each
# Per-token fields of a batch that a file of tokens/ has, in the order of the page's menu.
QUANTITIES = "advantages rollout_logprobs logprobs reference_logprobs values returns entropy".split()
# What `write_failed` writes: the folder of the run, and a function that returns the rows that this rank has by then.
_running: tuple[Path, Callable[[], Sequence[dict]]] | None = None


def write_samples(directory: Path, step: int, rows: list[dict]) -> None:
    """Write the rows of a step to `directory/samples/step_%08d.jsonl`, those with `tokens` to tokens/; rank 0 only.

    A row of samples/ holds `prompt` and `response` (text), `reward` (number), `reward_parts` (name -> number),
    `correct` (bool or null), `length` (response tokens), `finished` (bool; false when the length limit cut it);
    with an environment also `turns` (as `Sample.turns`), and `failed` (true) if the environment failed; with a judge
    `judgements`, each its `text` and `number` (null if it has none).
    For a row of tokens/ see `megarl.trainers.step_reports`.
    Text is UTF-8, not escaped; NaN and infinities are null. The writes are atomic.
    """
    for folder, has_tokens in (("samples", False), ("tokens", True)):
        found = [row for row in rows if ("tokens" in row) == has_tokens]
        if found:
            _write(Path(directory) / folder / f"{step_name(step)}.jsonl", found)


def keep_for_failure(directory: Path, rows: Callable[[], Sequence[dict]]) -> None:
    """Names the samples that `write_failed` writes; `rows()` has those of the running step that this rank holds."""
    global _running
    _running = Path(directory), rows


def write_failed(rank: int, step: int) -> Path | None:
    """Writes what this rank holds of a step that failed; each rank has a file of its own. No collective.

    `step`: 0 for an evaluation of a program that does not train.

    Rows are those of samples/; what is not known yet is null. Returns the file; None if there is nothing to write.
    Raises whatever the rows or the file system raise.
    """
    if _running is None or not (rows := _running[1]()):
        return None
    path = _running[0] / "samples" / f"failed_{step_name(step) if step else 'evaluation'}_rank_{rank}.jsonl"
    _write(path, rows)
    return path


def _write(path: Path, rows: Sequence[dict]):
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, "".join(json_line(row) + "\n" for row in rows))
