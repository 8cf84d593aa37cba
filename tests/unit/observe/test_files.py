"""Atomic files and JSON lines."""

import os

import pytest
import torch

from megarl.observe.files import json_line, write_atomically
from tests.helpers.processes import max_file_size


def test_atomic_write_replaces_and_leaves_nothing_else(tmp_path):
    path = tmp_path / "file"
    write_atomically(path, "old")
    write_atomically(path, b"new\x00")
    assert path.read_bytes() == b"new\x00" and os.listdir(tmp_path) == ["file"]


def test_failed_atomic_write_keeps_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "file"
    write_atomically(path, "old")

    def fail(source, target):
        raise OSError("disk gone")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk gone"):
        write_atomically(path, "new")
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["file"]


def test_an_atomic_write_that_fails_names_its_file(tmp_path):
    with max_file_size(10), pytest.raises(OSError) as caught:
        write_atomically(tmp_path / "file", "x" * 100)
    assert str(caught.value) == f"[Errno 27] File too large: '{tmp_path}/file'" and not os.listdir(tmp_path)


def test_json_line_rejects_what_json_cannot_hold():
    with pytest.raises(TypeError, match=r"record.parts\[1\] is a object"):
        json_line({"parts": [1, object()]})
    with pytest.raises(TypeError, match="Tensor"):
        json_line({"loss": torch.zeros(2)})
