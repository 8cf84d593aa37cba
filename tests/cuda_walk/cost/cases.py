"""Runs whose phases are walked for tests: a small one, and models of real sizes, whose launches have ceilings."""

from collections.abc import Iterator
from typing import NamedTuple

import torch.distributed as dist
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

from tests.cuda_walk.device import Walk

LAYERS, HIDDEN, FFN, VOCAB, CHANNELS, HEADS, GROUPS = 2, 512, 1536, 4096, 64, 8, 4
PROMPT, RESPONSE, SEQUENCES = 64, 64, 8
COMMON = (
    "--swiglu --normalization RMSNorm --disable-bias-linear --bf16 --use-distributed-optimizer --lr 1e-5"
    " --prompts none.jsonl --reward exact-match --samples-per-prompt 1 --advantage reinforce++ --kl-coefficient 0"
    " --group-query-attention --rollout-buffer-gb 1"
)
FLAGS = (
    f"{COMMON} --num-layers {LAYERS} --hidden-size {HIDDEN} --num-attention-heads {HEADS} --num-query-groups {GROUPS}"
    f" --ffn-hidden-size {FFN} --untie-embeddings-and-output-weights --max-prompt-length {PROMPT}"
    f" --max-response-length {RESPONSE} --prompts-per-step {SEQUENCES} --rollout-max-requests {SEQUENCES}"
    " --max-tokens-per-microbatch 512"
)


def predicted(walk: Walk) -> dict[str, dict]:
    """What is counted of each phase."""
    from tests.cuda_walk.cost.timeline import predict

    dist.destroy_process_group()  # each role has a world of its own
    phases = _phases(walk, FLAGS, VOCAB)
    return {phase.name: vars(predict(phase.events)) | {"calls": phase.calls} for phase in phases}


def _phases(walk: Walk, flags: str, vocab: int) -> Iterator:
    from megarl.planning.summary import Question
    from tests.cuda_walk.cost.phases import walk_all

    return walk_all(walk, Question(flags.split(), 1, None, vocab).price(), 1)


# -- ceilings ------------------------------------------------------------------------------------------------------


class Ceiling(NamedTuple):
    """The most kernels that one call of a phase launches, one by one or in a graph."""

    layers: int
    kind: str  # of the layers
    phase: str  # the beginning of its name
    kernels: int


UPDATE, STEP = "the last of an update of 4096", "decode step"
CEILINGS = [
    Ceiling(28, "dense", UPDATE, 896),
    Ceiling(48, "128 experts", UPDATE, 2234),
    Ceiling(28, "dense", STEP, 264),
    Ceiling(12, "128 experts", STEP, 180),
]
REAL = (
    f"{COMMON} --hidden-size 2048 --ffn-hidden-size 6144 --num-attention-heads 16 --num-query-groups 8"
    " --max-prompt-length 1024 --max-response-length 1024 --prompts-per-step 2 --rollout-max-requests 2"
    " --max-tokens-per-microbatch 4096"
)
KINDS = {  # no count depends on the number of experts: a model with 8 of them is built faster than one with 128
    "dense": "",
    "128 experts": (
        "--num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 768 --moe-router-dtype fp32"
        " --moe-router-load-balancing-type none --moe-grouped-gemm"
    ),
}


def launches(walk: Walk) -> list[tuple[Ceiling, int]]:
    """Each ceiling, and the kernels that are launched. Two depths are walked: all further layers launch as many kernels
    as the second one."""
    if dist.is_initialized():
        dist.destroy_process_group()
    walked, found = {kind: [_kernels(walk, kind, layers) for layers in (1, 2)] for kind in KINDS}, []
    for ceiling in CEILINGS:
        one, two = (next(n for name, n in each.items() if name.startswith(ceiling.phase))
                    for each in walked[ceiling.kind])  # fmt: skip
        found.append((ceiling, one + (ceiling.layers - 1) * (two - one)))
    return found


def _kernels(walk: Walk, kind: str, layers: int) -> dict[str, int]:
    from tests.cuda_walk.cost.timeline import predict

    MoEAuxLossAutoScaler.main_loss_backward_scale = None  # a later model of the process would copy to it
    kernels = {}
    for phase in _phases(walk, f"{REAL} {KINDS[kind]} --num-layers {layers}", 151936):
        found = predict(phase.events)
        kernels[phase.name] = found.eager + found.in_graph
        if phase.name.startswith(STEP):  # the last of them that has a ceiling
            break
    return kernels


SCENARIOS = {"cost": (predicted, 1), "launches": (launches, 1)}  # name -> (what walks, ranks)
