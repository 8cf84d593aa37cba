"""Multi-turn runs: nothing of them depends on when, where or how often an environment had to answer."""

import functools
import json
import os
import re
import signal
from collections import Counter
from pathlib import Path

import pytest
import torch

from tests.helpers.envs.sum_environments import EPISODES, FOLDER
from tests.helpers.evaluation import evaluate_argv, run_evaluate
from tests.helpers.forked_programs import accepted, refusal
from tests.helpers.programs import in_world, inputs, metrics, program, rl_argv, samples, timeless, train
from tests.helpers.rollout.engine_records import recorded, saved_fields
from tests.helpers.tiers import long
from tests.helpers.worlds import RankFailed, run_world

SUMS = "tests.helpers.envs.sum_environments"
GREETS = "tests.helpers.envs.greeting_environments:Greets"


def run(save: Path, environment: str, flags: str = "", size: int = 1) -> Path:
    argv = rl_argv(save, f"{EPISODES} --environment {SUMS}:{environment} {flags}", warm_start="experts" not in flags)
    train("rl", argv, size)
    return save


@functools.cache
def undisturbed() -> Path:
    """A run whose environments answer at once."""
    return run(inputs() / "sums", "Sums")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv(FOLDER, str(tmp_path))
    return tmp_path


def rows_of(run: Path) -> list[dict]:
    """The samples of the first step."""
    return list(map(json.loads, samples(run, 1).splitlines()))


def assert_same_text(found: Path, expected: Path):
    assert [samples(found, step) for step in (1, 2)] == [samples(expected, step) for step in (1, 2)]


def test_a_check_measures_prompts_with_what_their_environments_add(tmp_path):
    """Others are in tests/unit/trainers/test_environment_inputs.py."""
    flags = f"--environment {GREETS} --max-turns 2 --max-tokens-per-microbatch 500"
    (note,) = (line for line in accepted(rl_argv(tmp_path, f"{flags} --max-prompt-length 200")) if "at most" in line
               and "--environment" in line)  # fmt: skip
    longest = int(re.search(r"prompts have at most (\d+) tokens with the first message of --environment", note)[1])
    refused = refusal(rl_argv(tmp_path, f"{flags} --max-prompt-length {longest - 1}")).rstrip()
    said = f": the prompt has {longest} tokens with the first message of --environment {GREETS}; --max-prompt-length"
    assert refused.endswith(f"{said} allows {longest - 1}; --filter-long-prompts drops such lines")
    save = tmp_path / "run"
    train("rl", rl_argv(save, f"{flags} --max-prompt-length {longest} --train-iters 1 --reward format"))
    assert metrics(save)[1]["environment/failures"] == 0


def test_a_run_has_turns_with_rewards_and_no_gap():
    rows, found = rows_of(undisturbed()), metrics(undisturbed())[1]
    assert 1 < found["environment/turns_mean"] <= 3
    assert found["rollout/logprob_gap_max"] == 0.0
    assert found["environment/reward/sevens"] >= 0 and found["environment/failures"] == 0
    assert len({row["reward"] for row in rows}) > 1


def test_sequences_and_masks_are_those_that_a_spy_on_the_engine_rebuilds(tmp_path):
    from megarl import train_rl  # noqa: F401  imported once, before the fork

    flags = f"{EPISODES} --environment {SUMS}:LateSums --train-iters 1"
    parsed = program("rl", rl_argv(tmp_path / "run", flags), 1)
    run_world(recorded, 1, parsed, tmp_path / "seen.json")
    turns: dict[int, list] = {}
    for number, *turn in json.loads((tmp_path / "seen.json").read_text()):
        turns.setdefault(number, []).append(turn)
    (batch,) = saved_fields(tmp_path / "run")
    assert batch["sequence_ids"].tolist() == sorted(turns)
    fields = [batch[name].split(batch["lengths"].tolist()) for name in ("tokens", "response_mask", "rollout_logprobs")]
    for number, tokens, mask, logprobs in zip(sorted(turns), *fields, strict=True):
        prompt, written, _ = turns[number][-1]
        assert tokens.tolist() == prompt + written
        rebuilt_mask, rebuilt_logprobs = [False] * len(tokens), [0.0] * len(tokens)
        for before, written, of_turn in turns[number]:
            assert prompt[: len(before)] == before
            rebuilt_mask[len(before) : len(before) + len(written)] = [True] * len(written)
            rebuilt_logprobs[len(before) : len(before) + len(written)] = of_turn
        assert mask.tolist() == rebuilt_mask
        assert torch.equal(logprobs, torch.tensor(rebuilt_logprobs, dtype=torch.float32))
    assert max(map(len, turns.values())) > 1


@pytest.mark.long  # by default tests/unit/environments/test_pool.py
@pytest.mark.parametrize("how", ["kill", "hang", "crash"])
def test_an_environment_that_breaks_in_each_turn_changes_nothing(how, tmp_path):
    flags = "--environment-workers 2 --environment-retries 20" + " --environment-timeout 5" * (how == "hang")
    found = run(tmp_path / "run", how, flags)
    assert_same_text(found, undisturbed())
    assert {path.name for path in tmp_path.glob(f"{how}-*")} == {f"{how}-{turn}" for turn in range(3)}
    numbers = metrics(found)
    assert sum(numbers[step]["environment/restarts"] for step in (1, 2)) >= 3
    assert timeless(numbers[2]) == timeless(metrics(undisturbed())[2])


def test_a_checkpoint_is_evaluated_with_its_environment(tmp_path):
    flags = f"--environment {SUMS}:Sums --max-turns 3 --max-turn-length 4 --max-response-length 18 --eval-samples 8"
    command = evaluate_argv(tmp_path / "one", flags, load=undisturbed())
    assert "accuracy" in run_evaluate(command)[0]
    late = evaluate_argv(tmp_path / "two", flags.replace(":Sums", ":LateSums"), load=undisturbed())
    run_evaluate(late, 2)
    rows = [(tmp_path / name / "samples.jsonl").read_text() for name in ("one", "two")]
    assert rows[0] == rows[1] and len(json.loads(rows[0].splitlines()[0])["turns"]) >= 1


def counted(rank: int, parsed, save: Path, answers: int | None):
    """Runs train_rl; kills rank 0 in the second step, at the end of a turn, once the journal has so many answers."""
    from megarl.rollout.episodes.episode_source import EpisodeSource

    ended = EpisodeSource.turn_ended

    def watched(self, number, completion):
        ended(self, number, completion)
        if rank == 0 and answers is not None and journalled_calls(save) >= answers:
            os.kill(os.getpid(), signal.SIGKILL)

    EpisodeSource.turn_ended = watched
    in_world(rank, "rl", parsed)


COUNTED = f"{EPISODES} --environment {SUMS}:CountedSums --rollout-max-requests 4 --rollout-dispatch static"


@pytest.mark.parametrize("answers, size", [long((1, 1)), (12, 1), long((5, 2))])
def test_a_killed_run_goes_on_with_the_same_bits_and_calls_nothing_twice(answers, size, tmp_path):
    from megarl import train_rl  # noqa: F401  imported once, before the fork

    of_first_step = calls_of_first_step()
    save = tmp_path / "run"
    with pytest.raises(RankFailed):
        run_world(counted, size, program("rl", rl_argv(save, COUNTED), size), save, answers)
    before, finished = calls(tmp_path), journalled_calls(save)
    assert finished >= answers
    run_world(counted, 1, program("rl", rl_argv(save, f"{COUNTED} --load {save}"), 1), save, None)
    assert_same_text(save, undisturbed())
    found = metrics(save)[2]
    assert size > 1 or timeless(found) == timeless(metrics(undisturbed())[2])
    assert found["environment/journalled_steps"] >= finished  # resets count, too
    after = calls(tmp_path)
    # A call that was under way, or whose answer nobody had read, when the run was killed may come again; no other.
    assert set(before.values()) == {1} and set(after.values()) <= {1, 2}
    assert (after - before).total() == len(after) - len(of_first_step) - finished
    assert not list(save.glob("journal/*")), "nothing is kept once a step has its checkpoint"


@functools.cache
def calls_of_first_step() -> Counter:
    """The calls that environments got in the first step of a run."""
    folder = inputs() / "counted"
    folder.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FOLDER, str(folder))
        train("rl", rl_argv(folder / "run", f"{COUNTED} --train-iters 1"))
    return calls(folder)


def calls(folder: Path) -> Counter:
    return Counter((folder / "calls").read_text().splitlines())


def journalled_calls(save: Path) -> int:
    """How many turns of the second step have their answers in the journal. A kill may have cut a last line."""
    lines = [line for path in save.glob("journal/*") for line in path.read_text().splitlines(keepends=True)]
    places = [json.loads(line)["place"] for line in lines if line.endswith("\n")]
    turns = [int(place.split()[1]) for place in places if place.startswith("2/")]
    return sum(turn >= 0 for turn in turns)
