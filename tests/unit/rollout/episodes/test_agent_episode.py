"""Agents over rounds (`--partial-rollouts`): the bytes of an environment, at any speed and after a resume."""

import functools
from pathlib import Path

import pytest

from megarl.mcore.inference.generation import Completion, GenerationRequest
from megarl.rollout.episodes.agent_episode import AgentEpisode
from megarl.rollout.episodes.episode import EnvironmentResult, Episode, EpisodeLimits, TurnRequest
from megarl.rollout.waiting_groups import UNFINISHED, kept_records
from tests.helpers.programs import inputs, metrics, rl_argv, train
from tests.helpers.worlds import RankFailed

AGENTS = "tests.helpers.envs.agents"
STEPS = 4
PARTIAL = (
    f"--advantage grpo --kl-coefficient 0 --lr 1e-4 --temperature 1 --train-iters {STEPS} --save-interval 1"
    " --max-prompt-length 20 --max-response-length 100 --max-turns 6 --max-turn-length 12"
    " --max-tokens-per-microbatch 500 --prompts-per-step 4 --minibatch-size 4 --over-sampling 2 --partial-rollouts"
    " --rollout-correction tis --rollout-max-requests 64 --environment-timeout 60 --save-rollouts"
)
APART = "--role-map actor=0;reward=0;rollout={}"  # so that updates round alike whatever the rollout's replicas


def run(save: Path, agent: str, flags: str = "", replicas: int = 1) -> Path:
    roles = APART.format("1" if replicas == 1 else f"1-{replicas}")
    train(
        "rl", rl_argv(save, f"{PARTIAL} {roles} --environment {AGENTS}:{agent} {flags}", warm_start=False), 1 + replicas
    )
    return save


@functools.cache
def undisturbed(agent: str, flags: str = "") -> Path:
    return run(inputs() / f"carried-{agent}-{abs(hash(flags))}", agent, flags)


def carried(save: Path, step: int) -> list[dict]:
    """The episodes of agents that the checkpoint of a step holds and that have not ended."""
    found = []
    for facts, _ in kept_records(save / "checkpoints" / f"step_{step:08d}").read(UNFINISHED):
        found += [episode["agent"]["turns"] for episode in facts["episodes"] if not episode["end"]]
    return found


@pytest.mark.parametrize("failed", [False, True])
def test_an_episode_knows_how_each_of_its_turns_was_asked_for(failed):
    """The third turn has a row of its own, which is the first by its tokens."""
    limits = EpisodeLimits(turns=9, turn=9, response=60)
    episode = AgentEpisode(Episode(0, GenerationRequest([1, 2], 7, 0), line=3, limits=limits))
    asked = [(None, [1, 2], 5, 70, ("x",)), (0, [5], 4, 71), (None, [0], 3, 72, ("y", "z"))]
    for turn, (tokens, request) in enumerate(zip(([3, 4], [6], [7]), asked, strict=True)):
        episode.ask(TurnRequest(0, turn, *request))
        episode.write(turn, Completion(tokens, [-1.0] * len(tokens), finished=True))
    episode.settle(None)  # the round ends before the agent does
    episode = episode.continued(1, episode.request)
    episode.apply(EnvironmentResult(1, [], 1.0, done=True, failed=failed, turns=(0, 1, 2)))
    episode.settle(None)
    found = [(each["stream"], each["limit"], each["stops"]) for each in episode.asked]
    written = [(episode.before(turn), episode.turn_tokens(turn)) for turn in range(len(episode.turns))]
    assert found == ([] if failed else [(72, 3, ["y", "z"]), (70, 5, ["x"]), (71, 4, [])])
    assert written == ([] if failed else [([0], [7]), ([1, 2], [3, 4]), ([1, 2, 3, 4, 5], [6])])


@pytest.mark.long
def test_rows_of_agents_are_carried_within_turns_and_between_them():
    save = undisturbed("wandering")
    episodes = [turns for step in range(1, STEPS) for turns in carried(save, step)]
    assert any(turns[-1]["tokens"] and len(turns) > 2 for turns in episodes), "within a later turn"
    assert any(not turns[-1]["tokens"] and len(turns) > 1 for turns in episodes), "between turns"
    assert all(turn["is_open"] == (turn is turns[-1]) for turns in episodes for turn in turns)
    rows = metrics(save)
    assert rows[2]["rollout/staleness_max"] >= 1 and rows[STEPS]["agent/rows_per_episode"] == 3
    for row in rows.values():
        assert row["actor/ppo_kl_first"] == 0 and row["environment/failures"] == 0


@pytest.mark.long
def test_what_cannot_be_carried_is_said(tmp_path):
    with pytest.raises(RankFailed, match="with --partial-rollouts an agent asks for one turn at a time"):
        run(tmp_path / "run", "choices", "--environment-max-failures 0")
    start = undisturbed("wandering") / "checkpoints" / "step_00000001"
    with pytest.raises(RankFailed, match="--load: the checkpoint holds an unfinished episode for which turns of 3 to"):
        run(tmp_path / "other", "wandering", f"--max-turn-length 3 --load {start}")
    with pytest.raises(RankFailed, match=r"--partial-rollouts with --router-replay rollout: not with an agent"):
        run(tmp_path / "third", "wandering", "--num-experts 4 --moe-router-topk 2 --router-replay rollout")
