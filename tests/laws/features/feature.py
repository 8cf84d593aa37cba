"""What a row of the table of features says, and the flags that several rows share."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.helpers.pages.combinations import EXPERTS

Layout = tuple[int, str]  # ranks, and flags that say how they are used


@dataclass(frozen=True)
class Feature:
    """A small run.

    `flags` come after those of the program's small run; {NAME} in them is what `files.MAKERS` makes. Without a warm
    start a policy of train_rl begins with random weights. `check` holds for the run and for each that must be like it.
    """

    flags: str
    ranks: int = 1
    program: str = "rl"
    warm_start: bool = True
    steps: int = 3
    resumed: int = 2  # the step after which another run goes on; 0: none does
    layouts: tuple[Layout, ...] = ()  # in which the whole run is the same
    moved: tuple[Layout, ...] = ()  # in which the run goes on after `resumed` with the same responses
    texts: int = 1  # first steps whose responses have the same bytes in other layouts; rounding may change later ones
    numbers: int = 9  # first steps whose metrics are the same in other layouts
    tolerance: float = 2e-5  # of these metrics; 0: the bytes
    needs: str = ""  # a package that is not always installed
    check: Callable[[Path], None] | None = None


TP2, TP2_SEQUENCE = (2, "--tensor-model-parallel-size 2"), (2, "--tensor-model-parallel-size 2 --sequence-parallel")
PP2, CP2, TWO, FOUR = (2, "--pipeline-model-parallel-size 2"), (2, "--context-parallel-size 2"), (2, ""), (4, "")
SHARDED, SMALL = (2, "--use-distributed-optimizer"), "--max-tokens-per-microbatch 20"
DISJOINT = (4, "--role-map actor=0-1;critic=2;reward=3;reference=3 --actor-tensor-model-parallel-size 2")
TP2_APART = (3, "--role-map actor=0-1;reward=2 --actor-tensor-model-parallel-size 2")
MANY_REWARDS = (3, "--role-map actor=0;reward=0-2")
FREE_REWARD = (3, "--role-map actor=0;reward=1;rollout=1-2")
GRPO = "--advantage grpo --kl-coefficient 0"
COARSE = "--reward tests.helpers.programs:coarse_reward"
FILTER = f"{COARSE} --group-filter reward"
DYNAMIC = f"{FILTER} --dynamic-sampling"
PARTIAL = "--over-sampling 2 --partial-rollouts --rollout-correction tis"
AHEAD = "--generation-lag 1 --rollout-correction tis"
ROLLOUT_APART = "--role-map actor=0;reward=0;rollout=1"
ALL_AHEAD = f"--role-map actor=0;reward=1;rollout=1 {AHEAD}"
OWN_EXPERTS = f"{EXPERTS} --router-replay rollout"
BALANCED = (f"{EXPERTS} --moe-router-load-balancing-type none --moe-router-score-function sigmoid"
            " --moe-router-enable-expert-bias --moe-router-bias-update-rate 0.1")  # fmt: skip
FACTORS = "--lora-rank 4 --lora-targets q_proj,up_proj"
SUMS = "--environment tests.helpers.envs.sum_environments:Sums"
TURN_LENGTHS = "--max-turns 3 --max-turn-length 4 --max-response-length 18 --max-tokens-per-microbatch 100"
TURNS = f"{SUMS} {TURN_LENGTHS} --environment-timeout 60"
EVALUATED = "--eval-prompts {heldout} --eval-interval 2 --eval-samples 4"
EP2 = "--expert-model-parallel-size 2"
