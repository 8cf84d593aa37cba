"""Runs whose agents own the loop: the bytes of the same environment built in, at any speed and in every layout."""

from pathlib import Path

import pytest

from tests.helpers.envs.sum_environments import EPISODES
from tests.helpers.programs import metrics, program, rl_argv, train
from tests.helpers.rollout.engine_records import asked_and_written, generated, recorded, turns_in_rows
from tests.helpers.worlds import RankFailed, run_world

AGENTS = "tests.helpers.envs.agents"
BRANCHES = "--max-turns 8 --max-response-length 80 --max-prompt-length 20 --max-tokens-per-microbatch 400"
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32 --router-replay rollout"


def run(save: Path, agent: str, flags: str = "", size: int = 1) -> Path:
    argv = rl_argv(save, f"{EPISODES} --environment {AGENTS}:{agent} {flags}", warm_start=EXPERTS not in flags)
    train("rl", argv, size)
    return save


def test_every_turn_of_a_branching_agent_is_trained_on_once_as_the_engine_has_written_it(tmp_path):
    from megarl import train_rl  # noqa: F401  imported once, before the fork

    flags = f"{EPISODES} --environment {AGENTS}:late_branching {BRANCHES} --train-iters 1"
    parsed = program("rl", rl_argv(tmp_path / "run", flags), 1)
    run_world(recorded, 1, parsed, tmp_path / "seen.json")
    trained = [list(turn) for fields in generated(tmp_path / "run").values() for turn in turns_in_rows(*fields)]
    assert sorted(trained) == asked_and_written(tmp_path / "seen.json")
    row = metrics(tmp_path / "run")[1]
    assert row["agent/rows_per_episode"] == 4 and row["environment/turns_mean"] == 7
    assert row["rollout/logprob_gap_max"] == row["actor/ppo_kl_first"] == 0


def groups_of(run: Path) -> list[list[tuple]]:
    """(tokens of the policy, tokens, log-probs) of each response of the first step, by group."""
    rows = [(sum(mask), tokens, logprobs) for _, (tokens, logprobs, mask, *_) in sorted(generated(run).items())]
    return [rows[i : i + 2] for i in range(0, len(rows), 2)]


@pytest.mark.long  # by default agents with partial rollouts are over-sampled, too (test_agent_episode.py)
@pytest.mark.parametrize("agent, late, flags", [
    ("branching", "late_branching", BRANCHES), ("sums", "late_sums", "--max-turn-length 6"),
])  # fmt: skip
def test_groups_whose_agents_need_the_fewest_tokens_are_taken_at_any_speed(agent, late, flags, tmp_path):
    flags = f"{flags} --train-iters 1 --max-tokens-per-microbatch 800"
    twice = f"{flags} --prompts-per-step 4 --minibatch-size 4 --over-sampling 2"
    everything = groups_of(run(tmp_path / "all", agent, f"{flags} --prompts-per-step 8 --minibatch-size 8"))
    longest = [max(length for length, *_ in group) for group in everything]
    order = sorted(range(8), key=lambda i: (longest[i], i))
    assert longest[order[3]] < longest[order[-1]], "some agents are stopped"
    expected = [everything[i] for i in sorted(order[:4])]
    assert groups_of(run(tmp_path / "taken", agent, twice)) == expected
    assert groups_of(run(tmp_path / "late", late, f"{twice} --rollout-max-requests 4", 2)) == expected
    counted = sum(length for group in expected for length, *_ in group)
    assert metrics(tmp_path / "taken")[1]["rollout/tokens"] == counted


def test_some_settings_are_refused_with_agents(tmp_path):
    with pytest.raises(RankFailed, match=r"--credit turns: not with an agent, which tests.helpers.envs.agents:sums is"):
        run(tmp_path / "run", "sums", "--credit turns")
