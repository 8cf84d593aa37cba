"""The log of responses: what is written is read, and damaged records are left out."""

import os
import pickle

import pytest
import torch

from megarl.errors import UsageError
from megarl.rollout import response_log
from megarl.rollout.response_log import Record

RECORDS = [
    Record({"number": 0, "name": "a"}, {"tokens": torch.tensor([1, 2, 3]), "finished": torch.tensor([True])}),
    Record({"number": 1, "text": "é\n"}, {"routes": torch.arange(30, dtype=torch.int16).view(5, 2, 3).transpose(0, 1)}),
    Record({"number": 2}, {"tokens": torch.zeros(0, dtype=torch.int32)}),
]


def written(path) -> bytes:
    """A file with the records."""
    descriptor = os.open(path, os.O_CREAT | os.O_WRONLY)
    for record in RECORDS:
        response_log.append(descriptor, response_log.packed(*record))
    os.close(descriptor)
    return path.read_bytes()


def read(path) -> tuple[list[Record], list[str]]:
    """(each record that counts, what is said of others)."""
    problems: list[str] = []
    entries = list(response_log.intact(path, problems.append))
    found = [entry.read() for entry in entries]
    assert [record.facts for record in found] == [entry.facts for entry in entries]
    return found, problems


def assert_same(found: list[Record], expected: list[Record]):
    assert [record.facts for record in found] == [record.facts for record in expected]
    for one, other in zip(found, expected, strict=True):
        assert one.fields.keys() == other.fields.keys()
        for name, field in one.fields.items():
            assert torch.equal(field, other.fields[name]) and field.dtype == other.fields[name].dtype


@pytest.fixture
def path(tmp_path):
    return tmp_path / "00000-000.log"


def test_records_are_read_as_they_were_written(path):
    written(path)
    found, problems = read(path)
    assert_same(found, RECORDS)
    assert not problems
    assert_same([entry.read() for entry in response_log.whole(path, "--load x")], RECORDS)


def test_an_incomplete_last_record_does_not_count(path):
    data = written(path)
    ends = [0, *(entry.offset + entry.size + response_log.HASH_SIZE for entry in response_log.intact(path, print))]
    assert ends[-1] == len(data)
    for size in range(len(data)):
        path.write_bytes(data[:size])
        found, problems = read(path)
        assert len(found) == sum(size >= end for end in ends[1:]) and not problems, size
        if size not in ends and size % 7 == 0:
            with pytest.raises(UsageError, match=r"^--load x: is damaged \(its last record is incomplete\)$"):
                response_log.whole(path, "--load x")


def test_every_flipped_byte_is_detected(path):
    data = written(path)
    entries = list(response_log.intact(path, print))
    for position in range(len(data)):
        path.write_bytes(data[:position] + bytes([data[position] ^ 64]) + data[position + 1 :])
        found, problems = read(path)
        hit = next(n for n, entry in enumerate(entries) if position < entry.offset + entry.size + 16)
        assert hit not in [record.facts["number"] for record in found], position
        assert_same(found, [RECORDS[record.facts["number"]] for record in found])
        # A size that reaches beyond the file looks like a record that was being written.
        is_size = entries[hit].offset - 8 <= position < entries[hit].offset
        assert is_size or "is damaged" in problems[0]
        if position % 7 == 0:
            with pytest.raises(UsageError, match="^--load x: is damaged"):
                response_log.whole(path, "--load x")


def test_a_record_that_changes_after_it_was_found_is_refused(path):
    data = written(path)
    first = next(response_log.intact(path, print))
    path.write_bytes(data[:40] + b"x" + data[41:])
    with pytest.raises(ValueError):
        first.read()


class Bomb:
    def __reduce__(self):
        return os.mkdir, ("exploded",)


def sealed(body: bytes) -> bytes:
    """A record with that body and its checksum."""
    return response_log.MAGIC + len(body).to_bytes(8, "little") + body + response_log.hash_of(body)


def test_other_files_hold_no_records_and_run_no_code(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    listed = response_log.packed({}, {"facts": torch.tensor([*b"[1]"], dtype=torch.uint8)})
    for data in (pickle.dumps(Bomb()), sealed(pickle.dumps(Bomb())), sealed(b""), sealed(b"\xff" * 40), listed):
        path.write_bytes(data)
        found, problems = read(path)
        assert not found and len(problems) == 1 and "is damaged" in problems[0]
        with pytest.raises(UsageError, match="^--load x: "):
            response_log.whole(path, "--load x")
    for data in (b"", b"MRL", response_log.MAGIC + b"\xff" * 40):
        path.write_bytes(data)
        assert read(path) == ([], [])
    assert not (tmp_path / "exploded").exists()
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(OSError, match="no regular file"):
        read(path)
