"""Samples that share their first turns (`--branch-turns`): who shares what, computed once, with the bytes of a run that
computes every turn."""

import functools
import json
from pathlib import Path

import pytest

from megarl.rollout.episodes.episode_source import SharedTurns
from tests.helpers.envs.sum_environments import FOLDER
from tests.helpers.programs import inputs, metrics, program, rl_argv, samples, timeless, train
from tests.helpers.rollout.engine_records import generated, recorded, turn_spans
from tests.helpers.rollout.replays import played
from tests.helpers.tiers import long
from tests.helpers.worlds import run_world

SHAPE = (
    "--advantage rloo --kl-coefficient 0 --train-iters 2 --save-interval 1 --max-response-length 18 --max-turns 3"
    " --max-turn-length 4 --max-tokens-per-microbatch 100 --rollout-max-requests 64 --environment-timeout 60"
    " --save-rollouts --prompts-per-step 4 --samples-per-prompt 5 --minibatch-size 20 --branch-samples 2"
)
SUMS, LATE, OPENING = (
    f"--environment tests.helpers.envs.sum_environments:{name}"
    for name in ("Sums", "LateSums", "OpeningSums --max-prompt-length 8")
)
AGENT = "--environment tests.helpers.envs.agents:late_sums"
BRANCHES = [range(2), range(2, 4), range(4, 5)]  # of a group of five
PARTIAL = (
    "--over-sampling 2 --partial-rollouts --rollout-correction tis --max-response-length 60 --max-turn-length 16"
    " --max-tokens-per-microbatch 300"
)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv(FOLDER, str(tmp_path))


def run(save: Path, flags: str, size: int = 1) -> Path:
    train("rl", rl_argv(save, f"{SHAPE} {flags}"), size)
    return save


@functools.cache
def branched(flags: str) -> Path:
    """An undisturbed run on one rank."""
    return run(inputs() / f"branched-{abs(hash(flags))}", flags)


def turns_of(tokens, logprobs, mask, *_) -> list[tuple[list, list, list]]:
    """(tokens before it, its own, their log-probs) of each turn of a sequence."""
    return [(tokens[:start], tokens[start:end], logprobs[start:end]) for start, end in turn_spans(mask)]


@pytest.mark.parametrize("environment, count", [(SUMS, 2), long((SUMS, 1)), long((OPENING, 1))])
def test_the_samples_of_a_branch_share_that_many_turns_and_are_independent_after_them(environment, count):
    found = generated(branched(f"{environment} --branch-turns {count}"))
    groups = [[turns_of(*found[5 * group + sample]) for sample in range(5)] for group in range(4)]
    alike, others = [], []
    for group in groups:
        for branch in BRANCHES:
            for one in branch:
                assert group[one][:count] == group[branch.start][:count]
        first, second, third = (group[branch.start] for branch in BRANCHES)
        others += [first[:1] == second[:1], second[:1] == third[:1], first[:1] == third[:1]]
        alike += [group[one] == group[one + 1] for one in (0, 2) if len(group[one]) > count]
    assert not all(others) and alike and not all(alike)  # policies of the tests repeat themselves at times


def test_shared_turns_are_generated_once(tmp_path):
    from megarl import train_rl  # noqa: F401  imported once, before the fork

    flags = f"{SHAPE} {LATE} --branch-turns 2 --train-iters 1"
    run_world(recorded, 1, program("rl", rl_argv(tmp_path / "run", flags), 1), tmp_path / "seen.json")
    asked = [json.dumps([prompt, tokens]) for _, prompt, tokens, _ in json.loads((tmp_path / "seen.json").read_text())]
    found, taken = generated(tmp_path / "run"), 0
    written = [turns_of(*found[number]) for number in sorted(found)]
    for group in range(4):
        for branch in BRANCHES:
            of_branch = [written[5 * group + sample] for sample in branch]
            taken += sum(len(turns[:2]) for turns in of_branch[1:])
    assert taken and len(asked) == sum(map(len, written)) - taken
    assert {json.dumps([before, own]) for turns in written for before, own, _ in turns} == {*asked}
    row = metrics(tmp_path / "run")[1]
    assert row["environment/shared_turns"] == taken and row["rollout/logprob_gap_max"] == row["actor/ppo_kl_first"] == 0


@pytest.mark.parametrize("flags", [SUMS, long(AGENT), long(f"{SUMS} {PARTIAL}"), long(f"{AGENT} {PARTIAL}")])
def test_a_run_that_computes_every_turn_has_the_same_bytes(flags, tmp_path, monkeypatch):
    expected = branched(f"{flags} --branch-turns 2")
    monkeypatch.setattr(SharedTurns, "split", lambda _, requests: (list(requests), {}))
    found = run(tmp_path / "run", f"{flags} --branch-turns 2")
    for step in (1, 2):
        own, other = timeless(metrics(found)[step]), timeless(metrics(expected)[step])
        assert other.pop("environment/shared_turns") > 0 and "environment/shared_turns" not in own
        for of_engine in ("rollout/decode_steps", "rollout/prefill_tokens"):
            own.pop(of_engine, None), other.pop(of_engine, None)
        assert own == other
        assert samples(found, step) == samples(expected, step) and generated(found, step) == generated(expected, step)


@pytest.mark.long  # by default tests/unit/test_replay.py
@pytest.mark.parametrize("flags", [SUMS, AGENT])
@pytest.mark.parametrize("sample", [2, 3])
def test_a_sample_of_a_branch_is_played_again(flags, sample):
    status, text = played(branched(f"{flags} --branch-turns 2"), ["--step", "2", "--sample", str(sample)], 1)
    lines = [line for line in text.splitlines() if line.startswith("turn ")]
    assert status == 0 and lines and all(line.endswith("the same tokens and log-probs") for line in lines), text
