"""Files of finished responses: append-only records with a checksum each, in a plain format that holds no code.

A record is `MAGIC`, the size of its body (uint32), the body, and the body's BLAKE2b hash of 16 bytes. The body is the
identity of the request (16 bytes), its sequence id in the round (int64), whether the response ends with an end token
(uint8), the numbers of tokens, route rows, layers and experts per token (uint32), then tokens (int32), log-probs
(float32) and routes (int16). All numbers are little-endian.
"""

import hashlib
import os
import stat
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from megarl.errors import warn
from megarl.mcore.inference.generation import Completion

MAGIC = b"MRB1"
HASH_SIZE = 16
_SIZE = struct.Struct("<I")
_HEAD = struct.Struct("<16sqB4I")


class Entry(NamedTuple):
    """Where a record is, and whose it is."""

    path: Path
    offset: int  # of its body
    size: int
    identity: bytes
    number: int  # sequence id in the round that generated it


class DamagedRecord(Exception):
    """A record that is not what `pack` wrote."""


def hash_of(data: bytes) -> bytes:
    """The hash in records and identities."""
    return hashlib.blake2b(data, digest_size=HASH_SIZE).digest()


def pack(identity: bytes, number: int, completion: Completion) -> bytes:
    """The body of a record."""
    routes = None if completion.routes is None else completion.routes.cpu().numpy()
    shape = (0, 0, 0) if routes is None else routes.shape
    return b"".join((
        _HEAD.pack(identity, number, completion.finished, len(completion.tokens), *shape),
        np.array(completion.tokens, "<i4").tobytes(),
        np.array(completion.logprobs, "<f4").tobytes(),
        b"" if routes is None else routes.astype("<i2").tobytes(),
    ))  # fmt: skip


def unpack(body: bytes) -> tuple[bytes, int, Completion]:
    """(identity, number, completion) of a body; DamagedRecord if its sizes do not fit."""
    if len(body) < _HEAD.size:
        raise DamagedRecord("it is too short")
    identity, number, finished, count, *shape = _HEAD.unpack_from(body)
    routes_size = shape[0] * shape[1] * shape[2]
    if len(body) != _HEAD.size + 8 * count + 2 * routes_size:
        raise DamagedRecord("its sizes do not fit")
    tokens = np.frombuffer(body, "<i4", count, _HEAD.size).tolist()
    logprobs = np.frombuffer(body, "<f4", count, _HEAD.size + 4 * count).tolist()
    routes = None
    if shape[0]:
        flat = np.frombuffer(body, "<i2", routes_size, _HEAD.size + 8 * count)
        routes = torch.from_numpy(flat.astype(np.int16).reshape(shape))
    completion = Completion(tokens=tokens, logprobs=logprobs, finished=bool(finished), routes=routes)
    return identity, number, completion


def append(descriptor: int, body: bytes):
    """Writes a record with one call, so that a killed process leaves at most its last record incomplete."""
    record = memoryview(MAGIC + _SIZE.pack(len(body)) + body + hash_of(body))
    while record:
        record = record[os.write(descriptor, record) :]


def entries(path: Path) -> Iterator[Entry]:
    """The intact records of a file. Warns of damaged ones, and ignores an incomplete record at the end."""
    with _open(path) as file:
        end, position = os.fstat(file.fileno()).st_size, 0
        while end - position >= len(MAGIC) + _SIZE.size:
            file.seek(position)
            if file.read(len(MAGIC)) != MAGIC:
                _warn(path, position, "the rest of the file is ignored")
                return
            (size,) = _SIZE.unpack(file.read(_SIZE.size))
            offset = position + len(MAGIC) + _SIZE.size
            position = offset + size + HASH_SIZE
            if position > end:
                return
            try:
                identity, number, _ = unpack(_read(file, offset, size))
            except DamagedRecord as error:
                _warn(path, offset, f"{error}; its response is generated again")
                continue
            yield Entry(path=path, offset=offset, size=size, identity=identity, number=number)


def read(entry: Entry) -> bytes:
    """The body of a record; DamagedRecord if it has changed since."""
    with _open(entry.path) as file:
        return _read(file, entry.offset, entry.size)


def _read(file, offset: int, size: int) -> bytes:
    file.seek(offset)
    body, found = file.read(size), file.read(HASH_SIZE)
    if found != hash_of(body):
        raise DamagedRecord("its checksum is wrong")
    return body


def _open(path: Path):
    """Opens a regular file; OSError for links, pipes and devices."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(0, "not a regular file", str(path))
    return os.fdopen(descriptor, "rb")


def _warn(path: Path, position: int, reason: str):
    warn([f"--rollout-bank: {path}: the record at byte {position} is damaged: {reason}"])
