"""Atomic files, samples, settings and the progress line."""

import argparse
import dataclasses
import enum
import json
import math
import os
import re
import sys
from pathlib import Path

import pytest
import torch
import yaml

import megarl
from megarl.observe import samples
from megarl.observe.files import json_line, write_atomically
from megarl.observe.progress import Progress, format_duration
from megarl.observe.samples import write_samples
from megarl.observe.settings_file import environment, processor, write_settings
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


def test_rows_with_tokens_have_files_of_their_own(tmp_path):
    whole, by_token = {"sequence": 0, "response": "a"}, {"sequence": 0, "tokens": ["a"], "values": [0.1, math.nan]}
    write_samples(tmp_path, 3, [whole, by_token])
    write_samples(tmp_path, 4, [whole])
    found = {str(p.relative_to(tmp_path)): json.loads(p.read_text()) for p in tmp_path.rglob("*.jsonl")}
    assert found == {
        "samples/step_00000003.jsonl": whole,
        "samples/step_00000004.jsonl": whole,
        "tokens/step_00000003.jsonl": by_token | {"values": [0.1, None]},
    }


def test_each_rank_that_fails_keeps_its_own_samples(tmp_path, monkeypatch):
    monkeypatch.setattr(samples, "_running", None)
    assert samples.write_failed(0, 3) is None
    samples.keep_for_failure(tmp_path, list)
    assert samples.write_failed(0, 3) is None and not os.listdir(tmp_path)
    text = '\u2028\udc80"}\n{"x": 1}'
    for rank in (0, 1):
        samples.keep_for_failure(tmp_path, [{"sequence": rank, "response": text, "reward": None}].copy)
        path = samples.write_failed(rank, 3)
        assert path == tmp_path / "samples" / f"failed_step_00000003_rank_{rank}.jsonl"
        (line,) = path.read_text().removesuffix("\n").split("\n")
        assert json.loads(line) == {"sequence": rank, "response": text, "reward": None}
    assert len(os.listdir(tmp_path / "samples")) == 2


def test_environment_names_what_ran(tmp_path):
    found = environment("a device")
    assert found["device"] == "a device" and found["torch"] == torch.__version__.partition("+")[0]
    assert found["python"].split(".") == [str(part) for part in sys.version_info[:3]]
    assert found["megatron_core"] and processor()
    if (Path(megarl.__file__).parents[1] / ".git").exists():
        assert re.fullmatch("[0-9a-f]{40}(-dirty)?", found["git_commit"])


def test_samples_round_trip(tmp_path):
    rows = [
        {
            "prompt": "3 + 4 = ?\n\u2028", "response": "sieben ✓ \udc80", "reward": 1.0,
            "reward_parts": {"exact": 1.0, "model": float("nan")}, "correct": True, "length": 3, "finished": False,
        },
        {"prompt": "", "response": "", "reward": torch.tensor(0.5), "correct": None, "length": 0, "finished": True},
    ]  # fmt: skip
    write_samples(tmp_path, 12, rows)
    path = tmp_path / "samples" / "step_00000012.jsonl"
    assert path == tmp_path / "samples" / "step_00000012.jsonl"
    raw = path.read_bytes()
    assert "sieben ✓".encode() in raw and os.listdir(path.parent) == [path.name]
    first, second, end = raw.split(b"\n")
    assert end == b""
    assert json.loads(first) == {**rows[0], "reward_parts": {"exact": 1.0, "model": None}}
    assert json.loads(second) == {**rows[1], "reward": 0.5}


class _Backend(enum.Enum):
    LOCAL = 1


@dataclasses.dataclass(frozen=True)
class _Role:
    ranks: tuple
    dtype: torch.dtype


def test_settings_round_trip_in_sorted_order(tmp_path):
    settings = {
        "role-map": "actor=0-1;critic=2",
        "actor": _Role((0, 1), torch.bfloat16),
        "critic": argparse.Namespace(lr=1e-5, load=None, path=Path("a/b"), names={"b", "a"}),
        "backend": _Backend.LOCAL,
        "activation": torch.nn.functional.silu,
        "device": torch.device("cpu"),
        "text": "ü: '#",
        "ranks": range(2),
    }
    path = write_settings(tmp_path / "run", settings)
    assert yaml.safe_load(path.read_text(encoding="utf-8")) == {
        "role-map": "actor=0-1;critic=2",
        "actor": {"ranks": [0, 1], "dtype": "torch.bfloat16"},
        "critic": {"lr": 1e-5, "load": None, "path": "a/b", "names": ["a", "b"]},
        "backend": "LOCAL",
        "activation": "torch.nn.functional.silu",
        "device": "cpu",
        "text": "ü: '#",
        "ranks": [0, 1],
    }
    keys = [line.split(":")[0] for line in path.read_text(encoding="utf-8").splitlines() if line[0] not in " -"]
    assert keys == sorted(settings)
    first = path.read_bytes()
    write_settings(tmp_path / "run", dict(reversed(settings.items())))
    assert path.read_bytes() == first


def test_settings_hold_no_password(tmp_path):
    words = ["--reward-url=https://me:secret@host/a@b", "s3://bucket/a@b", "HTTP://secret@h:80", "--prompts", "a:b@c"]
    path = write_settings(tmp_path, {"command_line": words, "url": "https://:secret@host"})
    assert "secret" not in path.read_text()
    assert yaml.safe_load(path.read_text()) == {
        "command_line": ["--reward-url=https://***@host/a@b", words[1], "HTTP://***@h:80", *words[3:]],
        "url": "https://***@host",
    }


def test_settings_name_the_key_of_a_value_without_text_form(tmp_path):
    with pytest.raises(TypeError, match=r"setting actor.hooks\[1\] is a object"):
        write_settings(tmp_path, {"actor": {"hooks": [1, object()]}})
    assert not (tmp_path / "settings.yaml").exists()


def test_progress_line_full_and_partial(capsys):
    progress = Progress(200)
    metrics = {"reward/mean": 0.5321, "eval/accuracy": 0.61, "kl/reference": 0.01234, "perf/tokens_per_s": 15200.4}
    progress.line(12, metrics, 1.2127)
    progress.line(13, {"reward/mean": -1.0, "kl/reference": None}, 1.2127)
    printed = capsys.readouterr().out
    full, partial = printed.splitlines()
    assert full == ("step   12/200 | reward 0.532 | eval 0.610 | kl 0.0123 | 15,200 tokens/s | 1.21 s | ETA 3m48s")
    assert partial == "step   13/200 | reward -1.000 | 1.21 s | ETA 3m47s"
    assert printed.replace("\n", "").isprintable()


CALLS = {"time/reward/my:slow/calls_s": 6.0, "time/reward/format/calls_s": 2.0}  # in two threads


@pytest.mark.parametrize("metrics, seconds, said", [
    (CALLS | {"time/reward/score_s": 4.0}, 10.0, "rewards 4.0 s (my:slow 3.0 s)"),
    (CALLS | {"time/reward/score_s": 4.0, "time/reward/judge_s": 3.5}, 10.0, "rewards 7.5 s (judge 3.5 s)"),
    (CALLS | {"time/reward/score_s": 4.0, "time/reward/model_s": 2.5}, 10.0, "rewards 6.5 s (my:slow 3.0 s)"),
    (CALLS | {"time/reward/score_s": 4.0}, 17.0, None),  # little of the step
    (CALLS | {"time/reward/score_s": 0.9}, 1.0, None),
    ({"time/reward/score_s": 9.0, "time/reward/eval_score_s": 9.0}, 10.0, None),  # no call: of an environment
    ({}, 10.0, None),
])  # fmt: skip
def test_progress_names_a_slow_reward(metrics, seconds, said, capsys):
    Progress(1).line(1, metrics, seconds)
    columns = capsys.readouterr().out.split(" | ")
    assert columns[2:-1] == ([] if said is None else [said])


def test_progress_eta_is_a_moving_average(capsys):
    progress = Progress(1000)
    progress.line(1, {}, 5000.0)
    for step in range(2, 22):
        progress.line(step, {}, 2.0)
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].endswith(f"ETA {format_duration(2501.0 * 998)}")  # mean of 5000 s and 2 s
    assert lines[20].endswith(f"ETA {format_duration(2.0 * 979)}")  # 20 steps later the slow first one is forgotten


def test_progress_takes_other_fields(capsys):
    Progress(2, fields=(("loss", "loss", ".2f"),)).line(2, {"loss": 3.14159, "reward/mean": 1.0}, 0.5)
    assert capsys.readouterr().out == "step    2/2 | loss 3.14 | 0.50 s | ETA 0s\n"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0s"), (59.4, "59s"), (59.6, "1m00s"), (228, "3m48s"), (7500, "2h05m"), (97200, "1d03h"), (-3, "0s")],
)
def test_durations(seconds, text):
    assert format_duration(seconds) == text
