"""Finished steps of environments on disk, so that a run that was killed does not call tools again.

A run that goes on from its last checkpoint writes the same turns again, and takes what was answered to them from here.
Each replica appends to a file of its own; after a checkpoint, which has what came of the steps, the files are removed.
"""

import dataclasses
import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from megarl.environments.protocol import Observation, Turn

RESET = -1  # number of the turn that a reset answers


class JournalEntry(NamedTuple):
    """An answer of an environment."""

    observation: Observation
    tools: list[dict]  # of a reset


class Journal:
    """The answers of all replicas before a kill, and those of this replica since."""

    def __init__(self, folder: Path, replica: int, replicas: int):
        """Reads the files of all replicas, since the layout may have changed. A line that a kill cut is left out.

        Args:
            folder: of the files; made if it is missing.
            replica, replicas: number of this replica, and how many there are.
        """
        self.path = folder / f"replica_{replica:05d}.jsonl"
        self._known: dict[str, JournalEntry] = {}
        self._new: list[dict] = []  # not written yet
        own = {f"replica_{number:05d}.jsonl" for number in range(replicas)}
        others = [path for path in folder.glob("replica_*.jsonl") if path.name not in own]
        self._of_earlier_layout = [] if replica else others  # files that no replica of this run writes
        folder.mkdir(parents=True, exist_ok=True)
        for path in sorted(folder.glob("replica_*.jsonl")):
            self._read(path)
        self._cut_torn_line()

    def find(self, key: str, turns: Sequence[Turn]) -> JournalEntry | None:
        """The answer to the last of these turns, or to the reset, of the episode `key`; None if there is none."""
        return self._known.get(_place(key, turns))

    def add(self, key: str, turns: Sequence[Turn], entry: JournalEntry):
        """Adds an answer; `flush` writes it."""
        place = _place(key, turns)
        self._known[place] = entry
        self._new.append({"place": place, "observation": dataclasses.asdict(entry.observation), "tools": entry.tools})

    def flush(self):
        """Writes what was added; it survives a crash of the machine."""
        if not self._new:
            return
        lines = "".join(json.dumps(record) + "\n" for record in self._new)
        self._new = []
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(lines)
            file.flush()
            os.fsync(file.fileno())

    def discard(self):
        """Forgets everything of this replica, and what earlier layouts left."""
        self._known, self._new = {}, []
        for path in (self.path, *self._of_earlier_layout):
            path.unlink(missing_ok=True)
        self._of_earlier_layout = []

    def _read(self, path: Path):
        for line in path.read_bytes().splitlines():
            try:
                record = json.loads(line)
                entry = JournalEntry(Observation(**record["observation"]), record["tools"])
                self._known.setdefault(record["place"], entry)
            except (ValueError, KeyError, TypeError):
                continue

    def _cut_torn_line(self):
        """Removes the end of the own file after its last newline, so that appended lines are whole."""
        if not self.path.exists():
            return
        content = self.path.read_bytes()
        if content and not content.endswith(b"\n"):
            os.truncate(self.path, content.rfind(b"\n") + 1)


def _place(key: str, turns: Sequence[Turn]) -> str:
    """Episode, turn, and digest of all that the policy has written in it."""
    digest = hashlib.blake2b(digest_size=16)
    for turn in turns:
        text = turn.text.encode()
        digest.update(len(text).to_bytes(8, "little") + text)
    return f"{key} {len(turns) - 1} {digest.hexdigest()}"
