"""Environments and agents: at any speed, over rounds, with turns that samples share."""

from tests.helpers.pages.combinations import RECURRENT
from tests.laws.features.feature import (
    ALL_AHEAD,
    GRPO,
    OWN_EXPERTS,
    PARTIAL,
    ROLLOUT_APART,
    SUMS,
    TP2,
    TURNS,
    TWO,
    Feature,
    Layout,
)

AGENTS, ENVIRONMENTS = "--environment tests.helpers.envs.agents:", "--environment tests.helpers.envs.sum_environments:"
EPISODES = f"--advantage rloo --kl-coefficient 0 {TURNS} --rollout-max-requests 64"
LATE, LATE_CACHED = (
    f"{ENVIRONMENTS}LateSums",
    f"{ENVIRONMENTS}LateSums --rollout-prefix-caching --rollout-max-requests 4",
)
BRANCHING = (f"{EPISODES} {AGENTS}branching --max-turns 8 --max-response-length 80 --max-prompt-length 20"
             " --max-tokens-per-microbatch 400")  # fmt: skip
LATE_BRANCHING = (2, f"{AGENTS}late_branching --rollout-max-requests 4")
SHARED = (
    f"{EPISODES} --branch-turns 2 --branch-samples 2 --prompts-per-step 4 --samples-per-prompt 5 --minibatch-size 20"
)
SHARED_LATER = f"{SHARED} {PARTIAL} --max-response-length 60 --max-turn-length 16 --max-tokens-per-microbatch 300"
OVER = (f"{GRPO} --lr 1e-4 --temperature 1 {TURNS} --max-response-length 60 --max-turn-length 16"
        " --max-tokens-per-microbatch 300 --prompts-per-step 4 --minibatch-size 4 --over-sampling 2"
        " --rollout-max-requests 64")  # fmt: skip
CARRIED_TURNS = f"{OVER} --partial-rollouts --rollout-correction tis"
CARRIED_AGENT = (f"{CARRIED_TURNS} --max-prompt-length 20 --max-response-length 100 --max-turns 6 --max-turn-length 12"
                 " --max-tokens-per-microbatch 500")  # fmt: skip
REPLICAS = "--role-map actor=0;reward=0;rollout=1-2"  # so that updates round alike whatever the rollout's replicas


def _played(flags: str, *layouts: Layout, ranks: int = 1) -> Feature:
    return Feature(
        flags,
        ranks,
        steps=2,
        resumed=1,
        texts=2,
        layouts=layouts,
        warm_start=not ("experts" in flags or RECURRENT in flags),
    )


def _carried(flags: str, *layouts: Layout, moved: tuple[Layout, ...] = (), resumed: int = 2) -> Feature:
    return Feature(f"{flags} {ROLLOUT_APART}", 2, steps=4, texts=4, tolerance=0, warm_start=False, resumed=resumed,
                   layouts=layouts, moved=moved)  # fmt: skip


EPISODES_OF = {
    "turns": _played(EPISODES, TP2, *(
        (size, f"{LATE} --rollout-dispatch {dispatch} --rollout-max-requests {requests}{cache}")
        for dispatch in ("static", "dynamic") for size in (1, 2) for requests in (64, 2)
        for cache in ("", " --rollout-prefix-caching"))),
    "opening turns": _played(f"{EPISODES} {ENVIRONMENTS}OpeningSums --max-prompt-length 8 --samples-per-prompt 4", TWO),
    "opening turns of two stages": _played(
        f"{EPISODES} {ENVIRONMENTS}OpeningSums --max-prompt-length 8 {TP2[1]} --stop 3", ranks=2),
    "turns ahead": _played(f"{EPISODES} {ALL_AHEAD}", ranks=2),
    "turns of factors": _played(f"{EPISODES} --lora-rank 4"),
    "turns of experts": _played(f"{EPISODES} {OWN_EXPERTS}", (1, LATE_CACHED)),
    "turns of recurrent states": _played(
        f"{EPISODES} {RECURRENT} --rollout-buffer-gb 0.01 --max-turn-length 16 --max-response-length 80"
        " --max-tokens-per-microbatch 200", (1, f"{LATE} --rollout-prefix-caching"),
        (1, f"{SUMS} --rollout-prefix-caching --rollout-state-snapshots 3 --speculative-rollout"),
        (2, f"{TP2[1]} --rollout-prefix-caching --rollout-chunked-prefill")),
    "credit of turns": _played(f"{EPISODES} --group-filter reward --dynamic-sampling --credit turns", (1, LATE_CACHED)),
    "turns, drafts": _played(f"{EPISODES} --speculative-rollout", (1, LATE_CACHED)),
    "turns, a critic": _played(f"{EPISODES} --advantage gae --critic-lr 1e-3 --gamma 0.9", (1, LATE_CACHED)),
    "turns, greedy": _played(f"{EPISODES} --advantage remax --greedy-baseline", (1, LATE_CACHED)),
    "an agent's turns": _played(  # the agents are the same environment
        f"{EPISODES} {AGENTS}LastSums", (1, f"{AGENTS}sums"), (1, f"{AGENTS}late_sums --environment-workers 2"),
        (2, f"{AGENTS}late_sums --rollout-max-requests 2 --rollout-dispatch dynamic"), (1, f"{AGENTS}program")),
    "branching agent": _played(BRANCHING, LATE_BRANCHING),
    "branching agent, cached": _played(f"{BRANCHING} --rollout-prefix-caching", LATE_BRANCHING),
    "branching agent of experts": _played(f"{BRANCHING} {OWN_EXPERTS}", LATE_BRANCHING),
    "branching agent, a critic": _played(f"{BRANCHING} --advantage gae --critic-lr 1e-3", LATE_BRANCHING),
    "branching agent, drafts": _played(f"{BRANCHING} --speculative-rollout", LATE_BRANCHING),
    "branching agent, greedy": _played(f"{BRANCHING} --advantage remax --greedy-baseline", LATE_BRANCHING),
    "branching agent, a filter": _played(f"{BRANCHING} --group-filter reward --dynamic-sampling", LATE_BRANCHING),
    "branching agent, factors": _played(f"{BRANCHING} --lora-rank 4", LATE_BRANCHING),
    "branching agent, means": _played(f"{BRANCHING} --loss-aggregation seq-mean-token-mean", LATE_BRANCHING),
    "branching agent, kl": _played(f"{BRANCHING} --kl-coefficient 0.1 --kl-in loss", LATE_BRANCHING),
    "shared turns": _played(
        SHARED, (1, LATE), (1, f"{SUMS} --rollout-prefix-caching --speculative-rollout"),
        (2, f"{LATE} --rollout-dispatch dynamic --rollout-max-requests 3"),
        (2, f"{LATE} --rollout-dispatch static {TP2[1]}")),
    "shared turns of an agent": _played(
        f"{SHARED} {AGENTS}LastSums", (1, f"{AGENTS}late_sums"), (1, f"{AGENTS}program"),
        (2, f"{AGENTS}late_sums --rollout-dispatch dynamic --rollout-max-requests 2")),
    "shared turns over rounds": Feature(SHARED_LATER),
    "shared turns over rounds, late": Feature(f"{SHARED_LATER} {LATE}"),
    "shared turns of an agent over rounds": Feature(f"{SHARED_LATER} {AGENTS}late_sums"),
    "carried turns": _carried(
        CARRIED_TURNS, (2, LATE), (3, f"{REPLICAS} {LATE} --rollout-max-requests 5"),
        (3, f"{REPLICAS} --rollout-dispatch static --rollout-max-requests 4"),
        (3, f"{REPLICAS} {LATE} --rollout-pipeline-model-parallel-size 2"),  # one replica of two ranks
        (3, f"{REPLICAS} {LATE_CACHED} --environment-workers 2"), moved=((3, REPLICAS),)),
    "carried turns, from the first": _carried(CARRIED_TURNS, resumed=1),
    "carried turns, from the third": _carried(CARRIED_TURNS, resumed=3),
    "over-sampled turns": _carried(OVER, (3, f"{REPLICAS} {LATE}")),
    "over-sampled turns, a filter": _carried(f"{OVER} --group-filter reward --dynamic-sampling",
                                             (3, f"{REPLICAS} {LATE}")),
    "failing turns": _carried(
        f"{CARRIED_TURNS} --environment-max-failures 1 {ENVIRONMENTS}FailingSums",
        (3, f"{REPLICAS} --rollout-max-requests 4")),
    "carried turns of experts": _carried(
        f"{CARRIED_TURNS} {OWN_EXPERTS}", (3, f"{REPLICAS} {LATE} --rollout-max-requests 4")),
    "carried turns, a filter": _carried(
        f"{CARRIED_TURNS} --group-filter reward --dynamic-sampling --max-sampling-rounds 3",
        (3, f"{REPLICAS} {LATE} --rollout-max-requests 4")),
    "carried turns, drafts": _carried(f"{CARRIED_TURNS} --speculative-rollout",
                                      (3, f"{REPLICAS} {LATE} --rollout-max-requests 4")),
    "carried turns, credit": _carried(f"{CARRIED_TURNS} --advantage rloo --credit turns",
                                      (3, f"{REPLICAS} {LATE} --rollout-max-requests 4")),
    "carried turns, greedy": _carried(f"{CARRIED_TURNS} --advantage remax --greedy-baseline",
                                      (3, f"{REPLICAS} {LATE} --rollout-max-requests 4")),
    "carried sums": _carried(
        f"{CARRIED_AGENT} {AGENTS}LastSums", (2, f"{AGENTS}sums"),
        (3, f"{REPLICAS} {AGENTS}late_sums --rollout-max-requests 4")),
    "carried agent": _carried(
        f"{CARRIED_AGENT} {AGENTS}wandering", (2, f"{AGENTS}late_wandering --environment-workers 2"),
        (3, f"{REPLICAS} {AGENTS}late_wandering --rollout-max-requests 4"),
        (3, f"{REPLICAS} {AGENTS}late_wandering --rollout-pipeline-model-parallel-size 2"),
        (2, "--rollout-prefix-caching --rollout-dispatch static"), moved=((3, REPLICAS),)),
    "carried agent, from the first": _carried(f"{CARRIED_AGENT} {AGENTS}late_wandering", resumed=1),
    "carried agent, from the third": _carried(f"{CARRIED_AGENT} {AGENTS}late_wandering", resumed=3),
}  # fmt: skip
