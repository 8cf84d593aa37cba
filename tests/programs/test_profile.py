"""Profiles of single steps: a trace and a table for each rank asked for, phases in them, and no bit changed."""

import gzip
import json
from pathlib import Path

import pytest

from megarl.checkpoint.earlier_run import FILES
from tests.helpers.forked_programs import refusal
from tests.helpers.programs import metrics, rl_argv, sft_argv, timeless, train

ROLES = "--train-iters 2 --role-map actor=0;critic=1;reward=1;reference=1"


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> tuple[Path, Path]:
    """A run that profiles its second step on both ranks, and the same run without."""
    folder = tmp_path_factory.mktemp("profile")
    for name, flags in (("profiled", "--profile-steps 2 --profile-memory"), ("plain", "")):
        train("rl", rl_argv(folder / name, f"{ROLES} {flags}"), 2)
    return folder / "profiled", folder / "plain"


def events(path: Path) -> list[dict]:
    with gzip.open(path, "rt") as file:
        return [event for event in json.load(file)["traceEvents"] if event.get("ph") == "X"]


@pytest.mark.long
def test_each_rank_has_a_trace_with_its_roles_phases_and_their_operators(runs):
    files = sorted(path.name for path in (runs[0] / "profile").iterdir())
    stems = ["step_2_rank_0_actor", "step_2_rank_1_critic-reward-reference"]
    assert files == sorted(f"{stem}.{kind}" for stem in stems for kind in ("json.gz", "txt"))
    for stem, phase, foreign in zip(stems, ("actor/update", "critic/update"), ("critic/", "actor/"), strict=True):
        found = events(runs[0] / "profile" / f"{stem}.json.gz")
        ranges = [event for event in found if event["name"] == phase]
        assert ranges and not any(event["name"] == f"{foreign}update" for event in found)
        first, last = ranges[0]["ts"], ranges[0]["ts"] + ranges[0]["dur"]
        inside = {event["name"] for event in found if first <= event["ts"] <= last}
        assert any(name.startswith("aten::") for name in inside)


@pytest.mark.long
def test_the_table_has_the_top_operators_of_each_phase(runs):
    text = (runs[0] / "profile" / "step_2_rank_0_actor.txt").read_text()
    blocks = {line.partition(": ")[0]: i for i, line in enumerate(text.splitlines()) if not line.startswith(" ")}
    assert {"actor/update", "actor/logprobs", "actor/rollout"} <= set(blocks)
    lines = text.splitlines()[blocks["actor/update"] :]
    assert lines[1].split() == ["CPU", "ms", "device", "ms", "calls", "MiB", "operator"]
    assert float(lines[2].split()[0]) >= float(lines[3].split()[0]) >= 0


@pytest.mark.long
def test_a_profile_changes_no_number(runs):
    profiled, plain = map(metrics, runs)
    assert {step: timeless(row) for step, row in profiled.items()} == {s: timeless(row) for s, row in plain.items()}
    assert not (runs[1] / "profile").exists()


def test_one_rank_of_a_supervised_run(tmp_path):
    train("sft", sft_argv(tmp_path, "--train-iters 3 --profile-steps 1-2 --profile-ranks 1"), 2)
    names = sorted(path.name for path in (tmp_path / "profile").glob("*.json.gz"))
    assert names == ["step_1_rank_1_actor.json.gz", "step_2_rank_1_actor.json.gz"]
    assert "profile" in FILES  # which a new run in the folder moves aside


@pytest.mark.parametrize("flags, message", [
    ("--profile-ranks 0", "--profile-ranks 0: needs --profile-steps"),
    *((f"--profile-steps={steps}", f"--profile-steps {steps}: allowed is a step or a range of steps, as 3-5")
      for steps in ("0", "3-2", "a", "1-2-3", "-1", "01")),
    ("--profile-steps 1 --profile-ranks 0 2", "--profile-ranks 0 2: allowed are ranks of the run, 0 to 1"),
    ("--profile-steps 1 --critic-profile-ranks 0", "--critic-profile-ranks: the ranks are those of the world"),
])  # fmt: skip
def test_what_is_refused(flags, message, tmp_path):
    assert message in refusal(rl_argv(tmp_path, f"{ROLES} {flags}"), size=2)
