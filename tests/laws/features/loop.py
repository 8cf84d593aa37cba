"""The loop of reinforcement learning: how responses are drawn, kept, filtered and generated ahead."""

import functools

from tests.helpers.pages.combinations import EXPERTS
from tests.helpers.programs import GRADED
from tests.helpers.rollout.thinkers import FLAGS as THOUGHTS
from tests.helpers.rollout.thinkers import TURNS as THINKING_TURNS
from tests.laws.features.feature import (
    AHEAD,
    COARSE,
    CP2,
    DISJOINT,
    DYNAMIC,
    EP2,
    EVALUATED,
    FILTER,
    FOUR,
    GRPO,
    OWN_EXPERTS,
    PP2,
    SHARDED,
    SMALL,
    TP2,
    TP2_APART,
    TURNS,
    TWO,
    Feature,
)
from tests.laws.plug_ins import check_rollout

PPO = f"{GRADED} --lr 1e-4 --critic-lr 1e-3 --lr-decay-iters 9"
SLOW = f"{GRADED} --lr 1e-4 --critic-lr 1e-3"  # rates at which Adam does not blow rounding up
EXACT = functools.partial(check_rollout, limit=0.0)
VP2 = f"{PP2[1]} --num-layers-per-virtual-pipeline-stage 1 --verify-weights"
LONG = (f"{GRPO} --lr 1e-4 --temperature 1 --max-response-length 60 --max-tokens-per-microbatch 200"
        " --prompts-per-step 4 --minibatch-size 4 --over-sampling 2")  # fmt: skip
OF_THINKERS = "--prompts {thinkers}/train.jsonl --tokenizer-model {thinkers}/tokenizer.model"
LOOP = {
    "ppo": Feature(PPO, layouts=(
        TWO, FOUR, TP2, (4, "--tensor-model-parallel-size 4"), CP2, DISJOINT,  # of four, two ranks share a query group
        (2, f"{PP2[1]} --critic-max-tokens-per-microbatch 20"),
        (3, "--role-map actor=0-1;critic=1-2;reward=2;reference=0-2"),
        (1, "--max-tokens-per-microbatch 1000 --rollout-max-requests 3"))),
    "a rollout in a layout of its own": Feature(SLOW, resumed=0, check=check_rollout, layouts=tuple(
        (ranks, f"{flags} --verify-weights") for ranks, flags in (
            (2, f"--rollout{TP2[1][1:]}"), (2, f"{TP2[1]} --rollout-tensor-model-parallel-size 1"),
            (2, f"--rollout{PP2[1][1:]}"), (2, f"{PP2[1]} --rollout-pipeline-model-parallel-size 1"),
            (4, f"{CP2[1]} --rollout{TP2[1][1:]}"), (3, "--role-map actor=0;critic=1;reward=2;reference=2;rollout=2"),
            (4, "--role-map actor=0-1;critic=0-1;reward=2;reference=3;rollout=2-3 --actor-tensor-model-parallel-size 2"
             " --rollout-tensor-model-parallel-size 1"),
            (3, "--role-map actor=0-1;critic=0-1;reward=2;reference=2;rollout=1-2 --actor-use-distributed-optimizer"
             " --rollout-tensor-model-parallel-size 2")))),
    "virtual stages": Feature(f"{SLOW} --num-layers 4", resumed=0, steps=2, warm_start=False, check=EXACT,
                              layouts=((2, VP2), (2, f"{VP2} --rollout-pipeline-model-parallel-size 1"))),
    "sharded beside a whole rollout": Feature(
        f"{SLOW} --untie-embeddings-and-output-weights", resumed=0, steps=2, warm_start=False, check=EXACT,
        layouts=((2, "--actor-use-torch-fsdp2 --verify-weights"),)),
    "experts beside a rollout of others": Feature(
        f"{SLOW} {EXPERTS}", resumed=0, steps=2, warm_start=False, check=check_rollout, layouts=(
            (2, "--rollout-expert-model-parallel-size 2 --verify-weights"),
            (4, f"{TP2[1]} --sequence-parallel {EP2} --rollout-tensor-model-parallel-size 1 --verify-weights"))),
    "replicas without sequences": Feature(  # of four most generate nothing, and half have no training data
        f"{SLOW} --prompts-per-step 1 --minibatch-size 1", resumed=0, steps=2, layouts=(
            FOUR, (4, "--role-map actor=0-2;critic=1-3;reward=3;reference=2-3;rollout=0-3"))),
    "adaptive kl, epochs": Feature(  # the second half of more than one epoch of the prompts
        f"{GRADED} --kl-controller adaptive --kl-target 0.01 --kl-horizon 50 --weight-decay 0.05 --prompts {{epochs}}"
        " --prompts-per-step 12 --minibatch-size 5 --samples-per-prompt 1",
        steps=4, moved=(TP2, DISJOINT, (4, "--tensor-model-parallel-size 4"))),
    "critic warm-up": Feature(f"--critic-warmup-steps 2 {GRADED}", resumed=1),
    "critic warm-up, sharded": Feature(f"--critic-warmup-steps 2 {GRADED} {SHARDED[1]}", 2, resumed=1),
    "greedy baselines": Feature(f"--advantage remax --greedy-baseline --kl-coefficient 0 --lr 1e-4 {COARSE}",
                                layouts=(TWO,)),
    "failing verifier": Feature(
        "--reward tests.laws.plug_ins:picky --reward-max-failures 1",
        layouts=((2, "--role-map actor=0;critic=1;reward=1;reference=0"),)),
    "parts of a reward": Feature(
        f"{GRPO} --advantage gdpo --samples-per-prompt 4 --minibatch-size 24 --ppo-epochs 1 --lr 1e-4"
        " --reward tests.helpers.programs:graded_reward+0.5*tests.helpers.programs:digit_reward+0*exact-match",
        layouts=((2, SMALL),)),
    "preferences of groups": Feature(
        "--advantage preference --policy-loss reinforce --loss-aggregation seq-mean-token-sum --kl-coefficient 0"
        f" --minibatch-size 24 --ppo-epochs 1 --samples-per-prompt 4 --entropy-coefficient 0 --lr 1e-4 {COARSE}",
        layouts=(TWO, (1, SMALL), (3, "--role-map actor=0-1;reward=2;reference=2"
                                   " --actor-tensor-model-parallel-size 2"))),
    "no pass for old log-probs": Feature(
        f"{GRPO} --lr 1e-4 --policy-loss dppo-tv --kl-coefficient 0 --old-logprobs rollout --ppo-epochs 2 {GRADED}",
        layouts=(TWO, TP2)),
    "dynamic sampling": Feature(f"{GRPO} --lr 1e-4 {DYNAMIC}", layouts=(TWO, FOUR, TP2_APART)),
    "thoughts": Feature(f"{THOUGHTS} {OF_THINKERS}", warm_start=False),
    "thoughts in turns": Feature(f"{THOUGHTS} {OF_THINKERS} {THINKING_TURNS}", warm_start=False),
    "waiting groups": Feature(f"{GRPO} --lr 1e-4 {DYNAMIC} --max-sampling-rounds 1", steps=4, resumed=1,
                              moved=(TP2_APART,)),
    "waiting groups with routes": Feature(
        f"{GRPO} --lr 1e-4 {DYNAMIC} --max-sampling-rounds 1 {OWN_EXPERTS} --num-layers 4 --moe-layer-freq [0,1,1,1]",
        steps=4, resumed=1, warm_start=False, moved=(PP2,)),
    "over-sampling": Feature(
        f"{LONG} --rollout-max-requests 6", warm_start=False, numbers=1,
        layouts=(TWO, (2, "--rollout-dispatch static"),
                 (2, "--tensor-model-parallel-size 2 --rollout-prefix-caching"))),
    "partial rollouts": Feature(f"{LONG} --partial-rollouts --rollout-correction tis", warm_start=False, resumed=1,
                                moved=(TWO,)),
    "routes ahead": Feature(
        f"{GRADED} --role-map actor=0;critic=0;reward=1;reference=1;rollout=1 {AHEAD} {OWN_EXPERTS}", 2,
        warm_start=False),
    "routes of two stages": Feature(f"{GRADED} {PP2[1]} {OWN_EXPERTS}", 2, warm_start=False),
    "greedy baselines, a filter": Feature(f"--advantage remax --greedy-baseline --kl-coefficient 0 {FILTER}"),
    "partial rollouts, a filter": Feature(
        f"{LONG} --partial-rollouts --rollout-correction tis {DYNAMIC} --max-sampling-rounds 1", warm_start=False,
        resumed=1),
}  # fmt: skip

LAG = f"--rollout-correction tis --generation-lag 2 --lr-decay-iters 9 {EVALUATED} --save-interval 3"
APART = "--role-map actor=0;critic=0;reward=1;reference=1;rollout=1"
LAG_OF_GROUPS = f"{GRPO} --lr 1e-4 {COARSE} {LAG}"
CARRIED = "--over-sampling 1.5 --partial-rollouts"


def _ahead(flags: str, ranks: int = 2, **more) -> Feature:
    return Feature(flags, ranks, steps=5, resumed=3, texts=5, tolerance=0, **more)


LAGS = {
    "lag": _ahead(f"{GRADED} {LAG} {APART}", layouts=(
        (2, "--role-map actor=1;critic=1;reward=0;reference=0;rollout=0"),
        (4, "--role-map actor=0;critic=0;reward=1;reference=2;rollout=3"))),
    "lag, reward of the trained ranks": _ahead(
        f"{GRADED} {LAG} --role-map actor=0;critic=0;reward=0;reference=1;rollout=1"),
    "lag, waiting groups": _ahead(
        f"{LAG_OF_GROUPS} --group-filter reward --dynamic-sampling --max-sampling-rounds 1"
        " --role-map actor=0;reward=1;rollout=2", 3),
    "lag, partial rollouts": _ahead(
        f"{LAG_OF_GROUPS} --group-filter reward --dynamic-sampling {CARRIED}"
        " --role-map actor=0;reward=1-2;rollout=1-2", 3),
    "lag, replicas": _ahead(
        f"{GRADED} {LAG} --role-map actor=0-1;critic=0-1;reward=2;reference=3;rollout=2-3", 4),
    "lag, critic warm-up": _ahead(f"{GRADED} {LAG} {APART} --critic-warmup-steps 2"),
    "lag, factors": _ahead(f"{GRADED} {LAG} {APART} --lora-rank 4 --verify-weights"),
    "lag, experts": _ahead(f"{GRADED} {LAG} {APART} {OWN_EXPERTS}", warm_start=False),
    "lag, greedy baselines": _ahead(
        f"--advantage remax --kl-coefficient 0 {GRADED} --greedy-baseline {LAG} --role-map actor=0;reward=1;rollout=1"),
    "lag, turns": _ahead(f"{GRPO} {TURNS} --rollout-max-requests 64 --group-filter reward {LAG}"
                         " --role-map actor=0;reward=1;rollout=1-2", 3),
    "lag, carried turns": _ahead(
        f"{GRPO} --lr 1e-4 --reward environment {TURNS} --rollout-max-requests 64 {LAG} {CARRIED}"
        " --role-map actor=0;reward=1;rollout=1-2", 3),
}  # fmt: skip
