"""Walks `--exact-rollout`: rollouts and updates of tiny models, by the kernels whose rows stand alone."""

import functools

import torch

from tests.cuda_walk import rollout, training
from tests.cuda_walk.device import Walk

EXACT = "--exact-rollout --qk-layernorm"
EXPERTS = f"{EXACT} --num-experts 4 --moe-router-topk 2 --moe-router-dtype fp32"
EXPERTS += " --moe-shared-expert-intermediate-size 32"


def _take_16_bits():
    """Lets log-probs be taken of logits in 16 bits alone: a kernel sums those of another type in another order."""
    from megarl.mcore.kernels.cuda import head_rows

    for name in ("sample_rows", "row_logprobs"):
        setattr(head_rows, name, _of_16_bits(getattr(head_rows, name)))


def _of_16_bits(function):
    @functools.wraps(function)
    def call(logits, *args):
        assert logits.dtype is torch.bfloat16 and logits.is_contiguous()
        return function(logits, *args)

    return call


def _count_rows():
    """Gives each expert rows: the host reads their number, and nothing has a number here."""
    from megarl.mcore.moe import layer

    real = layer.grouped_swiglu

    def call(rows, gates, counts, *args):
        counts = [(len(rows) + number) // len(counts) for number in range(len(counts))]
        return real(rows, gates, counts, *args)

    layer.grouped_swiglu = call


def _generate(flags: str, walk: Walk, **settings) -> list:
    _take_16_bits()
    _count_rows()
    return rollout.generate(walk, flags, program="rl", **settings)


def _update(flags: str, walk: Walk) -> dict:
    _take_16_bits()
    _count_rows()
    return training.update(walk, f"--bf16 {flags}", program="rl")


SCENARIOS = {  # name -> (what walks, ranks)
    "exact rollout": (functools.partial(_generate, EXACT), 1),
    "exact rollout, graphs": (functools.partial(_generate, EXACT, **rollout.GRAPHS), 1),
    "exact rollout, experts": (functools.partial(_generate, EXPERTS, routes=True, has_graphs=False), 1),
    "exact rollout, restricted": (functools.partial(_generate, EXACT, sampling={"top_k": 3}), 1),
    "exact rollout, speculative": (functools.partial(_generate, EXACT, speculative=True), 1),
    "exact rollout, prompts in parts": (functools.partial(_generate, EXACT, prefix_caching=True, **rollout.SPLIT), 1),
    "exact update": (functools.partial(_update, EXACT), 1),
    "exact update, experts": (functools.partial(_update, EXPERTS), 1),
}
