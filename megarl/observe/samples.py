"""Sampled responses, one file per step, for people to read: whole in samples/, some token by token in tokens/."""

from pathlib import Path

from megarl.observe.files import json_line, step_name, write_atomically


class SamplesWriter:
    """Writes `directory/<folder>/step_%08d.jsonl`; one process only (rank 0)."""

    def __init__(self, directory: Path, folder: str = "samples"):
        self._directory = Path(directory) / folder

    def write(self, step: int, rows: list[dict]) -> Path:
        """Write the samples of one step, one JSON object per line, and return the file's path.

        A row of samples/ holds `prompt` and `response` (text), `reward` (number), `reward_parts` (name -> number),
        `correct` (bool or null), `length` (response tokens), `finished` (bool; false when the length limit cut it);
        with an environment also `turns` (as `Sample.turns`), and `failed` (true) if the environment failed.
        For a row of tokens/ see `megarl.trainers.token_samples`.
        Text is UTF-8, not escaped; NaN and infinities are null. The write is atomic.
        """
        self._directory.mkdir(parents=True, exist_ok=True)
        path = self._directory / f"{step_name(step)}.jsonl"
        write_atomically(path, "".join(json_line(row) + "\n" for row in rows))
        return path


def write_samples(directory: Path, step: int, rows: list[dict]) -> None:
    """Write the rows of a step to samples/, those with `tokens` to tokens/."""
    for folder, has_tokens in (("samples", False), ("tokens", True)):
        found = [row for row in rows if ("tokens" in row) == has_tokens]
        if found:
            SamplesWriter(directory, folder).write(step, found)
