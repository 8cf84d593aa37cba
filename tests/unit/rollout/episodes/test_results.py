"""Episodes as a packed batch: what the policy has chosen, what a thinking budget has, and where rewards are."""

import functools
import json
import os
import re
import signal
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from megarl.mcore.inference.generation import Completion, GenerationRequest
from megarl.roles.scored import turns_of
from megarl.rollout.episodes.episode import EnvironmentResult, Episode, EpisodeLimits
from megarl.rollout.episodes.results import episodes_to_batch
from megarl.rollout.group_buffer import forced_responses
from megarl.rollout.waiting_groups import UNFINISHED, kept_records
from tests.helpers.envs.sum_environments import FOLDER
from tests.helpers.programs import in_world, inputs, metrics, program, rl_argv, samples, timeless, train
from tests.helpers.texts.character_tokenizer import CharacterTokenizer
from tests.helpers.tiers import long
from tests.helpers.worlds import RankFailed, run_world
from tools import record_runs


class _Rule(NamedTuple):
    """Forces two tokens after three of a turn that follows an even token."""

    limit = 3

    def forced(self, prompt, response):
        return range(3, 5) if len(response) >= 3 and prompt[-1] % 2 == 0 else range(0)


def test_forced_tokens_of_turns_are_not_the_policys_but_within_their_turns():
    """The third turn is cut within its forced tokens: then its reward is at the last token before them."""
    limits = EpisodeLimits(turns=9, turn=9, response=60, thinking=_Rule())
    episode = Episode(0, GenerationRequest([1, 2], 7, 0), line=3, limits=limits, key="1/3/0")
    episode.apply(EnvironmentResult(0, [1, 2, 4]))
    for turn, tokens in enumerate(([10, 11, 12, 0, 0, 13], [20, 21, 22, 23], [30, 31, 32, 0])):
        assert episode.next_request().start == len(episode.tokens)
        episode.add_turn(Completion(tokens, [-1.0] * len(tokens), finished=True))
        episode.apply(EnvironmentResult(0, [51 - turn % 2] if turn < 2 else [], 0.5 + turn, done=turn == 2))
    # Prompt, turn, observation 51, turn, observation 50, turn.
    forced = [0] * 3 + [0, 0, 0, 1, 1, 0] + [0] + [0] * 4 + [0] + [0, 0, 0, 1]
    chosen = [0] * 3 + [1, 1, 1, 0, 0, 1] + [0] + [1] * 4 + [0] + [1, 1, 1, 0]
    batch = episodes_to_batch([episode], has_forced=True)
    assert batch.forced.int().tolist() == forced and batch.response_mask.int().tolist() == chosen
    assert batch.turn_rewards.nonzero().flatten().tolist() == [8, 13, 17]
    turns = turns_of(batch, CharacterTokenizer().decode)[0]
    assert [turn["reward"] for turn in turns] == [0.5, 1.5, 2.5] and len(turns[0]["text"]) == 4  # 0 has no text
    assert forced_responses(batch) == 1


def test_tokens_of_earlier_rounds_keep_their_versions():
    """Of an episode that has failed and lost its turns, those of its prompt."""
    episodes = []
    for number, known in enumerate(([(0, [3, 3, 4])], [(1, [2, 2]), (3, [5])], [(0, [3, 3, 4, 4, 4]), (0, [1])], [])):
        episode = Episode(number, GenerationRequest([1], 7, 0), line=3, limits=EpisodeLimits(1, 1, 1))
        episode.tokens, episode.prompt_length, episode.known_versions = [1, 2, 3, 4], 1, known
        episodes.append(episode)
    batch = episodes_to_batch(reversed(episodes), version=7)
    rows = [row.tolist() for row in batch.versions.split(batch.lengths.tolist())]
    assert rows == [[3, 3, 4, 7], [7, 2, 2, 5], [1, 7, 7, 7], [7] * 4] and batch.versions.dtype == torch.int32
    assert episodes_to_batch(episodes).versions is None


SUMS = "tests.helpers.envs.sum_environments"
STEPS = 4
OVER = (
    f"--advantage grpo --kl-coefficient 0 --lr 1e-4 --temperature 1 --train-iters {STEPS} --save-interval 1"
    " --max-response-length 60 --max-turns 3 --max-turn-length 16 --max-tokens-per-microbatch 300"
    " --prompts-per-step 4 --minibatch-size 4 --over-sampling 2 --rollout-max-requests 64 --environment-timeout 60"
)
PARTIAL = f"{OVER} --partial-rollouts --rollout-correction tis"
APART = "--role-map actor=0;reward=0;rollout={}"  # so that updates round alike whatever the rollout's replicas


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv(FOLDER, str(tmp_path))
    return tmp_path


def argv(save: Path, flags: str, environment: str = "Sums", replicas: int = 1) -> list[str]:
    roles = APART.format("1" if replicas == 1 else f"1-{replicas}")
    return rl_argv(save, f"{flags} {roles} --environment {SUMS}:{environment}", warm_start=False)


def run(save: Path, flags: str = PARTIAL, environment: str = "Sums", replicas: int = 1) -> Path:
    train("rl", argv(save, flags, environment, replicas), 1 + replicas)
    return save


@functools.cache
def undisturbed(flags: str = PARTIAL) -> Path:
    """A run whose environments answer at once."""
    save = inputs() / f"carried-{len(list(inputs().glob('carried-*')))}"
    return run(save, flags)


def assert_same_steps(found: Path, expected: Path, steps):
    """Metrics and samples of steps, but for what tells how many ranks there are."""
    rows, wanted = metrics(found), metrics(expected)
    for step in steps:
        one, other = (timeless(row[step]) | {"weights/sync_bytes": 0} for row in (rows, wanted))
        assert one == other and samples(found, step) == samples(expected, step)


def assert_same(found: Path, expected: Path):
    """As `assert_same_steps`, of all steps, and their checkpoints."""
    assert_same_steps(found, expected, range(1, STEPS + 1))
    one, other = (
        {key: value for key, value in record_runs.checkpoints_of(save).items() if not re.search("/rng/|manifest", key)}
        for save in (found, expected)
    )
    assert one == other and sum(key.endswith("/parts") for key in one) in (0, STEPS)


def unfinished(save: Path, step: int) -> list[dict]:
    """The episodes that the checkpoint of a step holds and that have not ended, with their number of turns."""
    found = []
    for facts, state in kept_records(save / "checkpoints" / f"step_{step:08d}").read(UNFINISHED):
        rows = state["response_mask"].split(state["lengths"].tolist()) if "lengths" in state else []
        for episode, row in zip(facts["episodes"], rows, strict=True):
            found += [] if episode["end"] else [episode | {"tokens": int(row.sum())}]
    return found


def test_episodes_are_carried_within_turns_and_between_them():
    rows = metrics(undisturbed())
    carried = [episode for step in range(1, STEPS) for episode in unfinished(undisturbed(), step)]
    assert any(e["is_open"] and e["observations"] for e in carried), "in the middle of a later turn"
    assert any(not e["is_open"] and e["observations"] for e in carried), "between turns"
    assert all(len(e["observations"]) == len(e["rewards"]) - e["is_open"] for e in carried)
    assert rows[1]["rollout/staleness_max"] == 0 < rows[2]["rollout/carried_fraction"] < 1
    assert max(rows[step]["rollout/staleness_max"] for step in rows) >= 2
    for step in range(1, STEPS + 1):
        assert rows[step]["actor/ppo_kl_first"] == 0 and rows[step]["environment/failures"] == 0
    lengths = [json.loads(line)["length"] for line in samples(undisturbed(), 1).splitlines()]
    assert len(lengths) == 8 and max(lengths) < 48


def test_limits_that_leave_no_room_are_rejected(tmp_path):
    start = undisturbed() / "checkpoints" / "step_00000001"
    assert any(episode["is_open"] for episode in unfinished(undisturbed(), 1))
    with pytest.raises(RankFailed, match="--load: the checkpoint holds an unfinished episode for which turns of 1 to"):
        run(tmp_path / "run", f"{PARTIAL} --max-turn-length 1 --load {start}")


def killed(rank: int, parsed, save: Path, answers: int | None):
    """Runs train_rl; kills the first rank of the rollout once the journal has so many answers of the second step."""
    from megarl.rollout.episodes.episode_source import EpisodeSource

    ended = EpisodeSource.turn_ended

    def watched(self, number, completion):
        ended(self, number, completion)
        if rank == 1 and answers is not None and len(journalled(save)) >= answers:
            os.kill(os.getpid(), signal.SIGKILL)

    EpisodeSource.turn_ended = watched
    in_world(rank, "rl", parsed)


def journalled(save: Path) -> list[str]:
    """Episodes of the first step, by key, whose turns were answered in the second one, as the journal has it."""
    lines = [line for path in save.glob("journal/*") for line in path.read_text().splitlines(keepends=True)]
    records = [json.loads(line) for line in lines if line.endswith("\n")]
    return [record["place"].split()[0] for record in records
            if record["step"] == 2 and record["place"].startswith("1/")]  # fmt: skip


@pytest.mark.parametrize("answers, replicas", [long((3, 1)), long((2, 2))])
def test_a_killed_run_takes_answers_to_carried_episodes_from_the_journal(answers, replicas, tmp_path):
    from megarl import train_rl  # noqa: F401  imported once, before the fork

    save = tmp_path / "run"
    common = f"{PARTIAL} --seed 9"  # carried episodes have several answers in the second step
    flags = f"{common} --rollout-max-requests 4 --rollout-dispatch static"
    parsed = program("rl", argv(save, flags, "CountedSums", replicas), 1 + replicas)
    with pytest.raises(RankFailed):
        run_world(killed, 1 + replicas, parsed, save, answers)
    before, finished = calls(tmp_path), len(journalled(save))
    assert finished >= answers
    parsed = program("rl", argv(save, f"{flags} --load {save}", "CountedSums"), 2)
    run_world(killed, 2, parsed, save, None)
    assert_same(save, undisturbed(common))
    assert metrics(save)[2]["environment/journalled_steps"] >= finished
    # A call whose answer was not in the journal yet may come again.
    assert sum(count > 1 for count in calls(tmp_path).values()) <= before.total() - finished
    assert not list(save.glob("journal/*"))


def calls(folder: Path) -> Counter:
    return Counter((folder / "calls").read_text().splitlines())


def test_stale_groups_and_environments_that_cannot_be_replayed_are_dropped(tmp_path):
    limited = metrics(run(tmp_path / "stale", f"{PARTIAL} --max-staleness 1"))
    assert max(row["rollout/staleness_max"] for row in limited.values()) == 1
    assert sum(row["rollout/dropped_groups"] for row in limited.values()) > 0
    found = run(tmp_path / "unreplayable", PARTIAL, "UnreplayableSums")
    rows = metrics(found)
    assert samples(found, 1) == samples(undisturbed(), 1) and rows[1]["rollout/dropped_groups"] > 0
    for step, row in rows.items():
        assert row["environment/failures"] == 0
        assert not unfinished(found, step)
