"""Runs whose weights change within a round, by a clock that is a seed or as a schedule says, and what they leave."""

import random
import time
from pathlib import Path

from megarl.rollout import response_log
from tests.helpers.programs import in_world, metrics, program, rl_argv, samples, timeless
from tests.helpers.rollout import seeded_clock
from tests.helpers.worlds import run_world
from tools.record_runs import checkpoints_of

STEPS, SAVED = 7, 4
RECORDED = "--generation-schedule recorded"
LAG = f"--rollout-correction tis --generation-lag 2 --train-iters {STEPS} --lr-decay-iters 9 --save-interval {SAVED}"
GRPO = (
    "--advantage grpo --kl-coefficient 0 --lr 1e-4 --reward tests.helpers.programs:coarse_reward --temperature 1"
    " --max-response-length 30 --max-tokens-per-microbatch 100"
)
ONE, TWO, REWARD_APART = "actor=0;reward=1;rollout=1", "actor=0;reward=1-2;rollout=1-2", "actor=0;reward=1;rollout=2-3"
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32"
TURNS = (
    "--environment tests.helpers.envs.sum_environments:Sums --max-turns 3 --max-turn-length 4 --max-response-length 18"
    " --rollout-max-requests 64 --environment-timeout 60"
)
RUNS = {  # flags but for the role map, role map, (role map, other flags) of replays
    "one replica": (GRPO, ONE, [(ONE, ""), (TWO, ""), (f"{TWO} --rollout-pipeline-model-parallel-size 2", "")]),
    "two replicas": (f"{GRPO} --verify-weights --rollout-dispatch static", TWO,
                     [(ONE, ""), (TWO, "--rollout-dispatch dynamic")]),
    "over-sampling": (f"{GRPO} --over-sampling 1.5", TWO, [(ONE, "")]),
    "partial rollouts": (f"{GRPO} --group-filter reward --dynamic-sampling --over-sampling 1.5 --partial-rollouts",
                         TWO, [(ONE, ""), (REWARD_APART, "")]),
    "steps without a batch": (f"{GRPO} --group-filter reward --dynamic-sampling --max-sampling-rounds 1", REWARD_APART,
                              [(ONE, "")]),
    "greedy baselines": (GRPO.replace("grpo", "remax --greedy-baseline"), TWO, [(ONE, "")]),
    "routes of experts": (f"{GRPO} {EXPERTS} --router-replay rollout --partial-rollouts --over-sampling 1.5", TWO,
                          [(ONE, ""), (TWO, "")]),
    "shared experts": (f"{GRPO} {EXPERTS}", f"{TWO} --rollout-expert-model-parallel-size 2", [(ONE, "")]),
    "tensor parallelism": (GRPO, f"{TWO} --rollout-tensor-model-parallel-size 2",
                           [(f"{TWO} --rollout-tensor-model-parallel-size 2", "")]),
    "factors": (f"{GRPO} --lora-rank 4 --verify-weights --rollout-prefix-caching", ONE, [(ONE, "")]),
    "turns": (f"{GRPO} {TURNS}", TWO, [(ONE, "")]),
}  # fmt: skip


def parsed_of(save: Path, roles: str, flags: str):
    """The command line of a run on as many ranks as its roles name."""
    size = 1 + int(max(c for c in roles.split(maxsplit=1)[0] if c.isdigit()))
    return program(
        "rl", rl_argv(save, f"{LAG} --role-map {roles} {flags}", warm_start=EXPERTS not in flags), size
    ), size


def clocked(rank: int, parsed, seed: int | None, sleeps: int):
    """Runs a program whose clock is a seed, with random sleeps."""
    from megarl.mcore.inference.generation_session import GenerationSession
    from megarl.roles.actor import Actor

    seeded_clock.install(rank, seed)
    generator = random.Random(100 * sleeps + rank)

    def slowed(method, longest: float):
        def slow(*args, **kwargs):
            time.sleep(generator.uniform(0, longest))
            return method(*args, **kwargs)

        return slow

    GenerationSession.step = slowed(GenerationSession.step, 0.004)
    Actor.update = slowed(Actor.update, 0.1)
    in_world(rank, "rl", parsed)


def run(save: Path, roles: str, flags: str, seed: int | None = None, sleeps: int = 0) -> Path:
    """Runs it; returns its folder."""
    parsed, size = parsed_of(save, roles, flags)
    run_world(clocked, size, parsed, seed, sleeps)
    return save


def facts_of(file: Path) -> list[dict]:
    """The records of one replica's schedule."""
    return [entry.facts for entry in response_log.intact(file, print)]


def records_of(save: Path) -> list[dict]:
    """The records of all replicas about rounds."""
    found = [facts for file in sorted((save / "schedule").glob("replica_*.log")) for facts in facts_of(file)]
    return [facts for facts in found if "run" not in facts]


def layout_free(save: Path) -> dict[int, dict]:
    """Rows of metrics without those of time and layout."""
    of_layout = ("weights/sync_bytes", "waiting_share")
    rows = {step: timeless(row) for step, row in metrics(save).items()}
    return {step: {n: v for n, v in row.items() if not n.endswith(of_layout)} for step, row in rows.items()}


def weights_of(save: Path) -> dict[str, str]:
    """Digests of checkpoints, without what each rank has for itself."""
    found = {key: value for key, value in checkpoints_of(save).items() if "/rng/" not in key}
    return {key: value for key, value in found.items() if not key.endswith("/manifest")}


def assert_same(found: Path, expected: Path, steps: int = STEPS):
    """Metrics, samples and checkpoints of both runs are equal."""
    rows, wanted = layout_free(found), layout_free(expected)
    for step in range(1, steps + 1):
        assert rows[step] == wanted[step]
        assert samples(found, step) == samples(expected, step)
    assert weights_of(found) == weights_of(expected)
