"""Finished steps of environments on disk, so that a run that was killed does not call tools again.

A resumed run generates the same turns again and takes the answers from here. Each replica appends to a file of its
own, until a checkpoint has what came of the steps. A step may continue an episode of an earlier one, so an answer
belongs to the step in which it was given.
"""

import dataclasses
import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path

from megarl.environments.protocol import Observation, Turn, checked
from megarl.observe.files import write_atomically
from megarl.plain_files import MAX_RECORDS, parse_record, read_bytes, reading
from megarl.plain_values import fits, is_count

_RECORD = {"place": str, "observation": dict, "tools": [dict], "step": is_count}  # kinds of a line's entries


JournalEntry = tuple[Observation, list[dict]]  # an answer of an environment; tools: of a reset


class Journal:
    """The answers of all replicas before a kill, and those of this replica since."""

    def __init__(self, folder: Path, replica: int, replicas: int):
        """Reads the files of all replicas, since the layout may have changed. A line that a kill cut is left out."""
        self.path = folder / f"replica_{replica:05d}.jsonl"
        self.step = 0  # of the run, to which new answers belong
        self._known: dict[str, tuple[JournalEntry, int]] = {}  # with the step
        self._new: list[dict] = []  # not written yet
        own = {f"replica_{number:05d}.jsonl" for number in range(replicas)}
        others = [path for path in folder.glob("replica_*.jsonl") if path.name not in own]
        self._of_earlier_layout = [] if replica else others  # files that no replica of this run writes
        folder.mkdir(parents=True, exist_ok=True)
        for path in sorted(folder.glob("replica_*.jsonl")):
            self._read(path, repairs=path == self.path or path in self._of_earlier_layout)

    def find(self, key: str, turns: Sequence[Turn]) -> JournalEntry | None:
        """The answer to the last of these turns, or to the reset, of the episode `key`; None if there is none."""
        return self._known.get(_place(key, turns), (None, 0))[0]

    def add(self, key: str, turns: Sequence[Turn], observation: Observation, tools: list[dict]):
        """Adds an answer; `flush` writes it."""
        place = _place(key, turns)
        self._known[place] = (observation, tools), self.step
        record = {"place": place, "observation": dataclasses.asdict(observation), "tools": tools}
        self._new.append({**record, "step": self.step})

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

    def discard(self, through: int):
        """Forgets the answers of the steps up to `through`, also in what earlier layouts left."""
        self.flush()
        self._known = {place: (entry, step) for place, (entry, step) in self._known.items() if step > through}
        for path in (self.path, *self._of_earlier_layout):
            _remove_lines(path, through)

    def _read(self, path: Path, repairs: bool):
        """`repairs`: lines that cannot be read, such as one that a kill cut, are removed, so others follow whole."""
        with reading(str(path)):
            content, whole = read_bytes(path, MAX_RECORDS), []
        for line in content.splitlines():
            if (found := _entry_of(line)) is not None:
                place, entry, step = found
                self._known.setdefault(place, (entry, step))
                whole.append(line + b"\n")
        if repairs and b"".join(whole) != content:
            write_atomically(path, b"".join(whole))


def _entry_of(line: bytes) -> tuple[str, JournalEntry, int] | None:
    """(place, entry, step) of a line; None if it is none."""
    record = parse_record(line)
    if record is None or not fits(record, _RECORD):
        return None
    try:
        observation = checked(Observation(**record["observation"]))
    except (ValueError, TypeError):
        return None
    return record["place"], (observation, record["tools"]), record["step"]


def _remove_lines(path: Path, through: int):
    """Removes the answers of the steps up to `through` from a file, and the file if nothing is left."""
    if not path.exists():
        return
    with reading(str(path)):
        found = ((line, _entry_of(line)) for line in read_bytes(path, MAX_RECORDS).splitlines())
    lines = [line for line, entry in found if entry is not None and entry[2] > through]
    if lines:
        write_atomically(path, b"\n".join(lines) + b"\n")
    else:
        path.unlink()


def _place(key: str, turns: Sequence[Turn]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for turn in turns:
        text = turn.text.encode()
        digest.update(len(text).to_bytes(8, "little") + text)
    return f"{key} {len(turns) - 1} {digest.hexdigest()}"
