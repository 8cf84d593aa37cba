"""settings.yaml: its text and what it leaves out."""

import argparse
import dataclasses
import enum
import re
import sys
from pathlib import Path

import pytest
import torch
import yaml

import megarl
from megarl.extras.report import settings_table
from megarl.observe import settings_file
from megarl.observe.settings_file import environment, processor, write_settings


def _settings(**more) -> dict:
    roles = {
        name: {"ranks": "0-1", "megatron": {"lr": lr, "bf16": False}} for name, lr in (("actor", 1), ("critic", 2))
    }
    return {"megarl": {"seed": 1, "load": None, "tags": ["a"]}, "world_size": 4, "roles": roles} | more


def test_a_file_has_the_flags_of_the_first_role_and_what_differs_from_them():
    flags = {name: role["megatron"] for name, role in _settings()["roles"].items()}
    short = settings_file.without_repeats(flags)
    assert short == {"actor": flags["actor"], "critic": {"lr": 2}}
    roles = {name: {"ranks": "0-1", "megatron": of_role} for name, of_role in reversed(short.items())}
    assert settings_file.whole(_settings(roles=roles)) == _settings()
    assert settings_table(_settings(roles=roles), _settings()) == settings_table(_settings(), _settings())
    for damaged in ({}, {"roles": {}}, {"roles": 3}, {"roles": {"actor": 3}}, {"roles": {"actor": {"megatron": []}}}):
        assert settings_file.whole(damaged) == damaged


def test_environment_names_what_ran(tmp_path):
    found = environment("a device")
    assert found["device"] == "a device" and found["torch"] == torch.__version__.partition("+")[0]
    assert found["python"].split(".") == [str(part) for part in sys.version_info[:3]]
    assert found["megatron_core"] and processor()
    if (Path(megarl.__file__).parents[1] / ".git").exists():
        assert re.fullmatch("[0-9a-f]{40}(-dirty)?", found["git_commit"])


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
