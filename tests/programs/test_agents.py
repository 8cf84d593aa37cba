"""Runs whose agents own the loop: the bytes of the same environment built in, at any speed and in every layout."""

import functools
import os
import signal
from pathlib import Path

import pytest

from tests.helpers.engine_records import asked_and_written, generated, recorded, turns_in_rows
from tests.helpers.programs import in_world, inputs, metrics, program, rl_argv, samples, timeless, train
from tests.helpers.tiers import long
from tests.helpers.worlds import RankFailed, run_world

AGENTS = "tests.helpers.agents"
FLAGS = (
    "--advantage rloo --kl-coefficient 0 --train-iters 2 --save-interval 1 --max-response-length 18 --max-turns 3"
    " --max-turn-length 4 --max-tokens-per-microbatch 100 --rollout-max-requests 64 --environment-timeout 60"
    " --save-rollouts"
)
BRANCHES = "--max-turns 8 --max-response-length 80 --max-prompt-length 20 --max-tokens-per-microbatch 400"
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32 --router-replay rollout"


def run(save: Path, agent: str, flags: str = "", size: int = 1) -> Path:
    argv = rl_argv(save, f"{FLAGS} --environment {AGENTS}:{agent} {flags}", warm_start=EXPERTS not in flags)
    train("rl", argv, size)
    return save


@functools.cache
def undisturbed(agent: str, flags: str = "") -> Path:
    """A run on one rank whose agent asks at once."""
    return run(inputs() / f"agent-{agent}-{abs(hash(flags))}", agent, flags)


def assert_same_bytes(found: Path, expected: Path, size: int = 1):
    """Tokens, log-probs, rewards and samples; metrics but for times and what agents alone have. With another number of
    replicas updates round otherwise, so only the first step has the same log-probs."""
    for step in (1, 2):
        assert samples(found, step) == samples(expected, step)
        assert generated(found, step) == generated(expected, step) or (size, step) == (2, 2)
        one, other = (
            {name: value for name, value in timeless(metrics(save)[step]).items() if not name.startswith("agent/")}
            for save in (found, expected)
        )
        assert one == other or size == 2


@pytest.mark.parametrize("agent, size, flags", [
    ("sums", 1, ""), long(("late_sums", 1, "--environment-workers 2")),
    long(("late_sums", 2, "--rollout-max-requests 2 --rollout-dispatch dynamic")), long(("program", 1, "")),
])  # fmt: skip
def test_an_agent_has_the_bytes_of_the_environment(agent, size, flags, tmp_path):
    found = run(tmp_path / "run", agent, flags, size)
    assert_same_bytes(found, undisturbed("LastSums"), size)
    rows = metrics(found)
    assert all(rows[step]["agent/rows_per_episode"] == 1 for step in rows)
    assert all(rows[step]["agent/rewritten_history"] == 0 for step in rows)
    assert 1 < rows[1]["environment/turns_mean"] <= 3 and rows[1]["environment/failures"] == 0


def test_every_turn_of_a_branching_agent_is_trained_on_once_as_the_engine_has_written_it(tmp_path):
    from megarl import train_rl  # noqa: F401  imported once, before the fork

    flags = f"{FLAGS} --environment {AGENTS}:late_branching {BRANCHES} --train-iters 1"
    parsed = program("rl", rl_argv(tmp_path / "run", flags), 1)
    run_world(recorded, 1, parsed, tmp_path / "seen.json")
    trained = [list(turn) for fields in generated(tmp_path / "run").values() for turn in turns_in_rows(*fields)]
    assert sorted(trained) == asked_and_written(tmp_path / "seen.json")
    row = metrics(tmp_path / "run")[1]
    assert row["agent/rows_per_episode"] == 4 and row["environment/turns_mean"] == 7
    assert row["rollout/logprob_gap_max"] == row["actor/ppo_kl_first"] == 0


OTHERS = ["", "--rollout-prefix-caching", EXPERTS, "--advantage gae --critic-lr 1e-3", "--speculative-rollout",
          "--advantage remax --greedy-baseline", "--group-filter reward --dynamic-sampling", "--lora-rank 4",
          "--loss-aggregation seq-mean-token-mean",
          "--kl-coefficient 0.1 --kl-in loss"]  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("flags", OTHERS, ids=str)
def test_branches_are_the_same_at_any_speed_with_other_features_and_without_gaps(flags, tmp_path):
    first = run(tmp_path / "first", "branching", f"{BRANCHES} {flags}")
    later = run(tmp_path / "later", "late_branching", f"{BRANCHES} {flags} --rollout-max-requests 4", 2)
    assert generated(later) == generated(first)
    assert [samples(later, step) for step in (1, 2)] == [samples(first, step) for step in (1, 2)]
    for row in (*metrics(first).values(), *metrics(later).values()):
        assert row["rollout/logprob_gap_max"] == 0 and row["agent/rows_per_episode"] == 4
        assert row["actor/ppo_kl_first"] == 0


def killed(rank: int, parsed, turns: int):
    """Runs train_rl and kills it after so many turns of agents."""
    from megarl.rollout.episodes.source import EpisodeSource

    ended, count = EpisodeSource.turn_ended, 0

    def watched(self, number, completion):
        nonlocal count
        ended(self, number, completion)
        count += 1
        if count == turns:
            os.kill(os.getpid(), signal.SIGKILL)

    EpisodeSource.turn_ended = watched
    in_world(rank, "rl", parsed)


@pytest.mark.long
@pytest.mark.parametrize("agent, flags", [("late_branching", BRANCHES), ("program", "")])
def test_a_killed_run_goes_on_with_the_same_bytes(agent, flags, tmp_path):
    from megarl import train_rl  # noqa: F401  imported once, before the fork

    save, expected = tmp_path / "run", undisturbed(agent.replace("late_", ""), flags)
    argv = rl_argv(save, f"{FLAGS} --environment {AGENTS}:{agent} {flags}")
    per_step = sum(len(turns_in_rows(*fields)) for fields in generated(expected).values())
    with pytest.raises(RankFailed):
        run_world(killed, 1, program("rl", argv, 1), per_step + 5)
    assert set(metrics(save)) == {1}
    train("rl", [*argv, "--load", str(save)], 1)
    assert_same_bytes(save, expected)


def groups_of(run: Path) -> list[list[tuple]]:
    """(tokens of the policy, tokens, log-probs) of each response of the first step, by group."""
    rows = [(sum(mask), tokens, logprobs) for _, (tokens, logprobs, mask, *_) in sorted(generated(run).items())]
    return [rows[i : i + 2] for i in range(0, len(rows), 2)]


@pytest.mark.long  # by default agents with partial rollouts are over-sampled, too (test_carried_agents.py)
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
    with pytest.raises(RankFailed, match=r"--credit turns: not with an agent, which tests.helpers.agents:sums is"):
        run(tmp_path / "run", "sums", "--credit turns")
