"""Sampled responses, one file per step, for people to read."""

from pathlib import Path

from megarl.observe.files import json_line, write_atomically


class SamplesWriter:
    """Writes `directory/samples/step_%08d.jsonl`; one process only (rank 0)."""

    def __init__(self, directory: Path):
        self._directory = Path(directory) / "samples"

    def write(self, step: int, rows: list[dict]) -> Path:
        """Write the samples of one step, one JSON object per line, and return the file's path.

        A row holds `prompt` and `response` (text), `reward` (number), `reward_parts` (name -> number), `correct`
        (bool or null), `length` (response tokens), `finished` (bool; false when the length limit cut it).
        Text is UTF-8, not escaped; NaN and infinities are null. The write is atomic.
        """
        self._directory.mkdir(parents=True, exist_ok=True)
        path = self._directory / f"step_{step:08d}.jsonl"
        write_atomically(path, "".join(json_line(row) + "\n" for row in rows))
        return path
