"""Files of finished responses: what is written is read, and damaged records are left out."""

import os
import pickle

import pytest
import torch

from megarl.mcore.inference.generation import Completion
from megarl.rollout import bank_file
from megarl.rollout.bank_file import DamagedRecord

ROUTES = torch.arange(5 * 2 * 3, dtype=torch.int16).view(5, 2, 3) - 1
COMPLETIONS = [
    Completion([1, 2, 3], [-0.5, -1 / 3, 0.0], True),
    Completion([7], [-2.0], False, ROUTES),
    Completion([4, 4], [-1e-30, -100.0], True),
]


def written(path) -> bytes:
    """A file with one record of each completion."""
    descriptor = os.open(path, os.O_CREAT | os.O_WRONLY)
    for number, completion in enumerate(COMPLETIONS):
        bank_file.append(descriptor, bank_file.pack(bank_file.hash_of(bytes([number])), number, completion))
    os.close(descriptor)
    return path.read_bytes()


def contents(path) -> list[tuple]:
    """(identity, number, completion) of each intact record, its routes as a list."""
    found = []
    for entry in bank_file.entries(path):
        identity, number, c = bank_file.unpack(bank_file.read(entry))
        assert (identity, number) == (entry.identity, entry.number)
        found.append((identity, number, c, None if c.routes is None else c.routes.tolist()))
    return found


@pytest.fixture
def path(tmp_path):
    return tmp_path / "00000-000.bank"


def test_records_are_read_as_they_were_written(path, capsys):
    written(path)
    expected = [
        (bank_file.hash_of(bytes([i])), i, Completion(c.tokens, torch.tensor(c.logprobs).tolist(), c.finished),
         None if c.routes is None else c.routes.tolist())
        for i, c in enumerate(COMPLETIONS)
    ]  # fmt: skip
    assert contents(path) == expected
    assert capsys.readouterr().err == ""


def test_an_incomplete_last_record_is_ignored(path, capsys):
    whole = written(path)
    ends = [sum(entry.size + 24 for entry in list(bank_file.entries(path))[:n]) for n in range(4)]
    assert ends[-1] == len(whole)
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        assert len(contents(path)) == sum(size >= end for end in ends[1:]), size
    assert capsys.readouterr().err == ""


def test_every_flipped_byte_is_detected(path, capsys):
    whole, entries = written(path), list(bank_file.entries(path))
    intact = contents(path)
    for position in range(len(whole)):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 64]) + whole[position + 1 :])
        found = contents(path)
        hit = next(e.number for e in entries if e.offset - 8 <= position < e.offset + e.size + 16)
        assert all(record in intact and record[1] != hit for record in found), position
        # A size that reaches beyond the file looks like a record that was being written.
        is_size = entries[hit].offset - 4 <= position < entries[hit].offset
        assert is_size or "is damaged" in capsys.readouterr().err


def test_a_record_that_changes_after_it_was_found_is_refused(path):
    whole = written(path)
    first = next(iter(bank_file.entries(path)))
    path.write_bytes(whole[:20] + b"x" + whole[21:])
    with pytest.raises(DamagedRecord):
        bank_file.read(first)


class Bomb:
    def __reduce__(self):
        return os.mkdir, ("exploded",)


def test_other_files_are_ignored(path, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for data in (b"", b"MRB", pickle.dumps(Bomb()), b"MRB1" + b"\xff" * 40, b"MRB1\0\0\0\0" + bank_file.hash_of(b"")):
        path.write_bytes(data)
        assert contents(path) == []
    assert not (tmp_path / "exploded").exists()
    assert "damaged" in capsys.readouterr().err
    body = bytearray(bank_file.pack(b"i" * 16, 0, COMPLETIONS[0]))
    body[25:29] = (2**31).to_bytes(4, "little")  # a number of tokens that the file does not have
    with pytest.raises(DamagedRecord, match="sizes"):
        bank_file.unpack(bytes(body))
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(OSError, match="not a regular file"):
        contents(path)
