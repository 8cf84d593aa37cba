"""Supervised training, preferences, reward models, teachers."""

from tests.helpers.pages.combinations import EXPERTS
from tests.helpers.programs import GRADED
from tests.laws.features.feature import (
    AHEAD,
    CP2,
    EP2,
    FOUR,
    GRPO,
    PP2,
    SHARDED,
    SMALL,
    TP2,
    TP2_SEQUENCE,
    TWO,
    Feature,
)
from tests.laws.features.models import CHOICE

PAIRS = "--global-batch-size 3 --preference-loss rpo --eval-prompts {heldout_pairs} --eval-interval 3"
KTO = ("--preference-loss kto --preference-beta 0.5 --prompts {labelled} --eval-prompts {heldout_pairs}"
       " --eval-interval 2 --lr-decay-iters 9")  # fmt: skip
# With a small epsilon Adam makes whole steps of gradients that are rounding alone, which differs by layout.
LABELLED = f"{KTO} --lr 0.2 --adam-eps 1 --global-batch-size 5"
REWARD_TRAINING = ("--global-batch-size 3 --preference-margin 0.3 --centring-coefficient 0.1"
                   " --eval-prompts {heldout_pairs} --eval-interval 3")  # fmt: skip
DISTILLED = ("--advantage none --kl-coefficient 0 --entropy-coefficient 0 --reward none --ppo-epochs 1"
             " --minibatch-size 12 --temperature 0.9")  # fmt: skip
OWN_TEACHER = "--role-map actor=0-1;reward=0;teacher=2-3"
TEACHER_APART, PAIR_OF_TP = (2, "--role-map actor=0;reward=0;teacher=1"), "--actor-tensor-model-parallel-size 2"
TEACHER_TP1 = (2, f"{TP2[1]} --teacher-tensor-model-parallel-size 1")
TEACHER_TP2 = (4, f"{OWN_TEACHER} --teacher-tensor-model-parallel-size 2")
CONTEXT = (f"{GRPO} {GRADED} --ppo-epochs 1 --minibatch-size 6 --teacher-context sibling"
           " --teacher-max-prompt-length 12 --samples-per-prompt 4 --prompts-per-step 3"
           " --teacher-context-template {template}")  # fmt: skip
SIBLINGS = f"{CONTEXT} --teacher self"
SIBLINGS_APART = (2, "--role-map actor=0;reward=1;reference=0;teacher=1")
SFT_DISTILLED = ("--distill loss --distill-divergence forward --distill-sft-coefficient 0.3 --eval-interval 3"
                 " --eval-prompts {heldout}")  # fmt: skip


def _supervised(program: str, flags: str = "", **more) -> Feature:
    return Feature(flags, program=program, tolerance=1e-5, **more)


OTHERS = {
    "sft": _supervised("sft", "--lr-decay-iters 6 --weight-decay 0.1 --eval-prompts {heldout} --eval-interval 5",
                       steps=5, layouts=(TWO, TP2, (4, TP2[1]), SHARDED, CP2, (1, "--max-tokens-per-microbatch 10"),
                                         (2, f"{PP2[1]} --actor-max-tokens-per-microbatch 20"))),
    "sft, sharded": Feature("--lr-decay-iters 6 --weight-decay 0.1 --use-distributed-optimizer", 2, "sft", steps=5),
    "pairs": _supervised("preference", PAIRS, layouts=(
        (1, SMALL), (2, f"{PP2[1]} {SMALL}"), (4, f"{TP2[1]} {PP2[1]} {SMALL}"), TP2_SEQUENCE, CP2, SHARDED)),
    "pairs, experts": _supervised("preference", f"{PAIRS} {EXPERTS}", warm_start=False, layouts=((2, EP2),)),
    "pairs, factors": _supervised("preference", f"{PAIRS} --lora-rank 4", layouts=(TWO,)),
    "labels": _supervised("preference", LABELLED, layouts=(
        (1, SMALL), (4, f"{TP2[1]} {SMALL}"), (4, PP2[1]), CP2)),
    "pairs without a reference": _supervised("preference", f"{PAIRS} --preference-loss simpo"),
    "reward": _supervised("reward", REWARD_TRAINING, layouts=(
        (1, SMALL), FOUR, TP2_SEQUENCE, CP2, (4, f"{TP2[1]} {PP2[1]} {SMALL}"))),
    "reward, chosen keys": _supervised("reward", f"{REWARD_TRAINING} {CHOICE}", layouts=(TP2_SEQUENCE, CP2)),
    "pairs, chosen keys": _supervised("preference", f"{PAIRS} {CHOICE}", warm_start=False, layouts=(CP2,)),
    "reward, experts": _supervised("reward", f"{REWARD_TRAINING} {EXPERTS}", layouts=((2, EP2),)),
    "distillation": Feature(f"{DISTILLED} --distill loss {{teacher}}", layouts=(
        TWO, TP2, CP2, TEACHER_TP1, (2, "--actor-pipeline-model-parallel-size 2"), (2, "--use-torch-fsdp2"),
        (2, f"{TEACHER_APART[1]} --offload"),
        (4, f"{OWN_TEACHER} {PAIR_OF_TP} --actor-sequence-parallel --teacher-pipeline-model-parallel-size 2"
         " --teacher-decoder-first-pipeline-num-layers 1"))),
    "distillation by rewards": Feature(f"{DISTILLED} --distill reward {{teacher}}", layouts=(TEACHER_APART, TP2)),
    "distillation beside rewards": Feature(
        f"{DISTILLED} --reward exact-match --advantage grpo --minibatch-size 6 --distill loss {{teacher}}", steps=4),
    "distillation with hints": Feature(
        f"{DISTILLED} --distill loss {{teacher}} --teacher-max-prompt-length 14 --prompts {{hinted}}",
        layouts=(TEACHER_TP2,)),
    "teacher of the average": Feature(
        f"{DISTILLED} {GRADED} --advantage grpo --distill loss --teacher ema --ema-decay 0.5 --teacher-temperature 0.9",
        layouts=((4, f"{OWN_TEACHER} --teacher-tensor-model-parallel-size 2 --offload"),)),
    "teachers": Feature(f"{DISTILLED} --distill loss {{teachers}}", layouts=(
        TWO, TEACHER_APART, CP2, (2, "--actor-pipeline-model-parallel-size 2"), (1, SMALL),
        (2, f"--role-map actor=0-1;reward=0;teacher=0-1 {PAIR_OF_TP} --actor-sequence-parallel"),
        (4, f"{TEACHER_TP2[1]} --actor-context-parallel-size 2"))),
    "teachers by rewards": Feature(f"{DISTILLED} --distill reward {{teachers}}", layouts=(TWO, TP2)),
    "siblings": Feature(f"{SIBLINGS} --distill loss", layouts=(
        (2, "--role-map actor=0-1;reward=0;reference=0;teacher=0-1 --actor-tensor-model-parallel-size 2"),
        SIBLINGS_APART, TP2, CP2, (3, ""),
        (4, "--role-map actor=0-1;reward=1;reference=0;teacher=2-3 --teacher-pipeline-model-parallel-size 2"))),
    "siblings of teachers": Feature(f"{CONTEXT} {{teachers}} --distill loss", layouts=(SIBLINGS_APART,)),
    "siblings by rewards": Feature(f"{SIBLINGS} --distill reward", layouts=(SIBLINGS_APART,)),
    "siblings, a filter": Feature(f"{SIBLINGS} --distill loss --group-filter reward --dynamic-sampling",
                                  layouts=(TWO,)),
    "siblings of the average": Feature(f"{SIBLINGS} --distill loss --teacher ema --ema-decay 0.5", steps=4),
    "siblings, failures": Feature(f"{SIBLINGS} --distill loss --reward-failure drop", steps=4),
    "siblings ahead": Feature(
        f"{SIBLINGS} --distill loss --role-map actor=0;reward=1;teacher=1;rollout=1 {AHEAD}", 2, steps=4, layouts=(
            (3, "--role-map actor=0;reward=1;teacher=2;rollout=1"),
            (4, "--role-map actor=0;reward=1;teacher=2;rollout=3"))),
    "sft of a teacher": _supervised("sft", f"{SFT_DISTILLED} {{teacher}}", layouts=(
        (2, PAIR_OF_TP), (2, "--teacher-tensor-model-parallel-size 2"),
        (2, "--actor-pipeline-model-parallel-size 2"), CP2)),
    "sft of teachers": _supervised("sft", f"{SFT_DISTILLED} {{teachers}}", layouts=((2, PAIR_OF_TP), TWO)),
}  # fmt: skip
