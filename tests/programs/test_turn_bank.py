"""Runs with environments and agents that are killed: turns in the bank are not generated again, and nothing changes."""

import os
import signal
from collections import Counter
from pathlib import Path

import pytest

from tests.helpers.programs import in_world, metrics, program, rl_argv, samples, timeless
from tests.helpers.rollout.engine_records import generated
from tests.helpers.tiers import by_default
from tests.helpers.worlds import RankFailed, run_world

AGENTS = "tests.helpers.envs.agents"
FLAGS = (
    "--advantage rloo --kl-coefficient 0 --train-iters 2 --save-interval 1 --max-response-length 18 --max-turns 3"
    " --max-turn-length 4 --max-tokens-per-microbatch 100 --rollout-max-requests 4 --environment-timeout 60"
    " --save-rollouts --rollout-dispatch static"
)
BRANCHES = "--max-turns 8 --max-response-length 80 --max-prompt-length 20 --max-tokens-per-microbatch 400"
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32 --router-replay rollout"
PARTIAL = (
    "--over-sampling 2 --partial-rollouts --rollout-correction tis --max-turn-length 6 --max-tokens-per-microbatch 200"
)


def counted(rank: int, parsed, killed_at: tuple[int, int, int] | None) -> Counter:
    """Runs train_rl; returns the turns that this rank's engine generated for the bank, by step.

    `killed_at`: (rank, step, turns) after which a rank is killed.
    """
    from megarl.rollout.bank import RolloutBank

    keep, counts = RolloutBank.keep, Counter()

    def watched(self, request, completion):
        keep(self, request, completion)
        counts[self._step] += 1
        if (rank, self._step, counts[self._step]) == killed_at:
            os.kill(os.getpid(), signal.SIGKILL)

    RolloutBank.keep = watched
    in_world(rank, "rl", parsed)
    return counts


def run(save: Path, environment: str, flags: str, size: int, killed_at: tuple[int, int, int] | None = None) -> Counter:
    """Runs train_rl; turns that all ranks have generated, by step."""
    from megarl import train_rl  # noqa: F401  imported once, before the fork

    flags = f"{FLAGS} --environment {AGENTS}:{environment} {flags}"
    argv = rl_argv(save, flags, warm_start="--num" not in flags)
    return sum(run_world(counted, size, program("rl", argv, size), killed_at), Counter())


CASES = {
    "an environment": ("LastSums", "", 1, (0, 2, 9)),
    "an environment and partial rollouts": ("LastSums", PARTIAL, 1, (0, 2, 9)),
    "routes of experts": ("LastSums", EXPERTS, 1, (0, 2, 9)),
    "two replicas": ("LastSums", "", 2, (1, 2, 5)),
    "an agent": ("late_branching", BRANCHES, 1, (0, 2, 20)),
    "an agent with its own stop strings": ("stopping", "", 1, (0, 2, 8)),
    "an agent of two replicas": ("late_branching", BRANCHES, 2, (1, 2, 20)),
}


@pytest.mark.parametrize("case", by_default(CASES, ("an environment",)))
def test_turns_of_a_killed_run_are_not_generated_again(case, tmp_path):
    environment, flags, size, killed_at = CASES[case]
    whole, save = tmp_path / "whole", tmp_path / "run"
    counts = run(whole, environment, flags, size)
    with pytest.raises(RankFailed, match="ended with exit code -9|[Cc]onnection"):
        run(save, environment, flags, size, killed_at)
    _, step, number = killed_at
    assert set(metrics(save)) == {1} and list(save.glob(f"responses/step_{step:08d}/*.log"))
    again = run(save, environment, f"{flags} --load {save}", size)
    assert 0 < again[step] <= counts[step] - number
    assert size > 1 or flags == PARTIAL or again[step] == counts[step] - number  # how far others come is the clock's
    assert generated(save, step) == generated(whole, step) and samples(save, step) == samples(whole, step)
    assert timeless(metrics(save)[step]) == timeless(metrics(whole)[step])
    assert not (save / "responses").exists(), "nothing is kept once a step has its checkpoint"
