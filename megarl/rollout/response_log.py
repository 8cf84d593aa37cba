"""The log of responses: the one form in which a run keeps what was generated.

* `--keep-responses`: of a running step, `responses/step_N/REPLICA-ATTEMPT.log` with finished responses, or turns of
  episodes.
* A checkpoint: `rollout_00000.log`, with the groups that wait, the batches of later steps, the unfinished groups, and
  the pools.
* `--save-rollouts`: of an ended step, `step_N/replica_00000.log` with the responses of its rounds, and its episodes.
* `--generation-schedule recorded`: `schedule/replica_00000.log`, with what was decided in each round.

A file is only appended to, by one writer. A record is `MAGIC`, the size of its body (uint64, little-endian), the body,
and the body's BLAKE2b hash of 16 bytes. The body is a safetensors archive, which holds no code: fields with the names
of `Batch`, and `facts`, the bytes of a JSON object with all else.

Damage: a record that does not have its hash does not count, and neither does one that a killed writer has not ended. A
reader that can do without it goes on (`intact`); one that cannot refuses the file (`whole`).
"""

import hashlib
import io
import json
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from safetensors.torch import load, save
from torch import Tensor

from megarl.plain_files import open_bytes, parse_json, reading, reason_of

MAGIC = b"MRL1"
HASH_SIZE = 16
SUFFIX = ".log"
_SIZE = struct.Struct("<Q")
_FACTS = "facts"


class Record(NamedTuple):
    """What a record holds."""

    facts: dict[str, Any]
    fields: dict[str, Tensor]


class Entry(NamedTuple):
    """Where a record is, and its facts."""

    path: Path
    offset: int  # of its body
    size: int
    facts: dict[str, Any]

    @property
    def end(self) -> int:
        """Where the next record begins."""
        return self.offset + self.size + HASH_SIZE

    def read(self) -> Record:
        """The record. ValueError if it has changed since; OSError."""
        with open_bytes(self.path) as file:
            return _read(file, self.offset, self.size)


def hash_of(data: bytes) -> bytes:
    """The hash of records, and of what identifies them."""
    return hashlib.blake2b(data, digest_size=HASH_SIZE).digest()


def packed(facts: Mapping[str, Any], fields: Mapping[str, Tensor]) -> bytes:
    """A record; fields are on the host."""
    text = torch.frombuffer(bytearray(json.dumps(facts), "utf-8"), dtype=torch.uint8)
    body = save({_FACTS: text, **{name: field.contiguous() for name, field in fields.items()}})
    return b"".join((MAGIC, _SIZE.pack(len(body)), body, hash_of(body)))


def unpacked(record: bytes) -> Record:
    """What a record holds. ValueError for bytes that are none."""
    start = len(MAGIC) + _SIZE.size
    if record[: len(MAGIC)] != MAGIC or len(record) < start + HASH_SIZE:
        raise ValueError("it is not what megarl writes")
    return _read(io.BytesIO(record), start, len(record) - start - HASH_SIZE)


def append(descriptor: int, record: bytes):
    """Writes a record with one call, so that a killed process leaves at most its last record incomplete."""
    rest = memoryview(record)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def intact(path: Path, damaged: Callable[[str], None]) -> Iterator[Entry]:
    """The records of a log that count. `damaged` is told of the others, but for one at the end that is incomplete.

    Raises:
        OSError: no regular file.
    """
    with open_bytes(path) as file:
        end, position = os.fstat(file.fileno()).st_size, 0
        while end - position >= len(MAGIC) + _SIZE.size:
            file.seek(position)
            where = f"the record at byte {position} is damaged"
            if file.read(len(MAGIC)) != MAGIC:
                damaged(f"{where}: the rest of the file is ignored")
                return
            (size,) = _SIZE.unpack(file.read(_SIZE.size))
            offset = position + len(MAGIC) + _SIZE.size
            position = offset + size + HASH_SIZE
            if position > end:
                return
            try:
                facts = _read(file, offset, size).facts
            except ValueError as error:
                damaged(f"{where}: {error}")
            else:
                yield Entry(path, offset, size, facts)


def whole(path: Path, where: str, has_ended: bool = True) -> list[Entry]:
    """The records of a log. UsageError, which begins with `where`, if one does not count. `has_ended`: also if the last
    one is incomplete."""
    with reading(where, "is damaged"):
        found = list(intact(path, _refuse))
        if has_ended and (found[-1].end if found else 0) != path.stat().st_size:
            _refuse("its last record is incomplete")
    return found


class Records:
    """The records of logs that have ended, by those facts of some names that they have."""

    def __init__(self, paths: Iterable[Path], flag: str, *names: str):
        """The logs count in the order of their names. UsageError, which begins with `flag`, if one is damaged."""
        self._found: dict[tuple, list[Entry]] = {}
        for entry in (entry for path in sorted(paths) for entry in whole(path, f"{flag} {path}")):
            key = tuple(entry.facts[name] for name in names if name in entry.facts)
            self._found.setdefault(key, []).append(entry)

    def entries(self, *facts: Any) -> list[Entry]:
        """Those with these facts."""
        return self._found.get(facts, [])

    def read(self, *facts: Any) -> Iterator[Record]:
        """The records of `entries`, one at a time."""
        return (entry.read() for entry in self._found.get(facts, ()))


def _refuse(problem: str):
    raise ValueError(problem)


def _read(file: BinaryIO, offset: int, size: int) -> Record:
    file.seek(offset)
    body, found = file.read(size), file.read(HASH_SIZE)
    if found != hash_of(body):
        raise ValueError("its checksum is wrong")
    try:
        fields = load(body)
        facts = parse_json(fields.pop(_FACTS).numpy().tobytes().decode())
    except Exception as error:  # whoever makes a record for harm can write its checksum, too
        raise ValueError(f"it is not what megarl writes ({reason_of(error)})") from None
    if not isinstance(facts, dict):
        raise ValueError("it is not what megarl writes")
    return Record(facts, fields)
