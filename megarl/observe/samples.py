"""Sampled responses, one file per step, for people to read: whole in samples/, some token by token in tokens/."""

from pathlib import Path

from megarl.observe.files import json_line, step_name, write_atomically


def write_samples(directory: Path, step: int, rows: list[dict]) -> None:
    """Write the rows of a step to `directory/samples/step_%08d.jsonl`, those with `tokens` to tokens/; rank 0 only.

    A row of samples/ holds `prompt` and `response` (text), `reward` (number), `reward_parts` (name -> number),
    `correct` (bool or null), `length` (response tokens), `finished` (bool; false when the length limit cut it);
    with an environment also `turns` (as `Sample.turns`), and `failed` (true) if the environment failed.
    For a row of tokens/ see `megarl.trainers.token_samples`.
    Text is UTF-8, not escaped; NaN and infinities are null. The writes are atomic.
    """
    for folder, has_tokens in (("samples", False), ("tokens", True)):
        found = [row for row in rows if ("tokens" in row) == has_tokens]
        if found:
            path = Path(directory) / folder / f"{step_name(step)}.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, "".join(json_line(row) + "\n" for row in found))
