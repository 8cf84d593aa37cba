"""Files that a user names: regular, of bounded size, in UTF-8; whatever is wrong is one line."""

import os

import pytest

from megarl.errors import UsageError
from megarl.plain_files import MAX_WRITTEN, is_absent, parse_named_paths, parse_record, read_json, read_records, reading


@pytest.mark.parametrize("content, says", [
    (b"\xff", "it is not UTF-8: byte 0"), (b"{", "Expecting property name"), (b"[" * 10**5, "it is nested too deeply"),
    (b'{"a": 1, "a": 2}', "'a' appears twice"), (b"1" * 301, "a number has 301 digits; allowed are 300"),
    (b" " * (MAX_WRITTEN + 1), "bytes; allowed are"),
])  # fmt: skip
def test_what_is_wrong_with_a_file_is_one_line(content, says, tmp_path):
    path = tmp_path / "a.json"
    path.write_bytes(content)
    with pytest.raises(UsageError) as caught, reading(f"--file {path}"):
        read_json(path, MAX_WRITTEN)
    assert str(caught.value).startswith(f"--file {path}: cannot be read (") and says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_pipe_is_refused_and_a_missing_file_has_words_of_its_own(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    os.symlink("nowhere", tmp_path / "link")
    assert is_absent(tmp_path / "none") and not is_absent(tmp_path / "link")
    for name, says in (("pipe", "is no regular file"), ("none", "--file: is not there")):
        with pytest.raises(UsageError, match=says), reading("--file", missing="is not there"):
            read_json(tmp_path / name)


def test_lines_end_with_a_newline_alone_and_numbers_are_finite(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes('\ufeff{"a": "x\u2028y"}\n{"b": NaN, "c": 1e999}\n\n'.encode())
    first, second = read_records(path)
    assert parse_record(first.removeprefix(b"\xef\xbb\xbf")) == {"a": "x\u2028y"}
    assert parse_record(second) == {"b": None, "c": None} and parse_record(b"[1]") is parse_record(b"{") is None


def test_named_paths():
    assert parse_named_paths("math=a b/c code=/d=e") == {"math": "a b/c", "code": "/d=e"}
    for text in ("math", "math=", "a=b a=c", "a b=c", "ä=b"):
        with pytest.raises(ValueError, match="."):
            parse_named_paths(text)
