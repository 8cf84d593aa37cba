"""Activations of the plan against those that autograd keeps in a real update, beside exact weights and states."""

import pytest
import torch
import torch.distributed as dist

from megarl.planning import activations
from tests.helpers.models.planned_memory import build, check_weights, real_bytes
from tests.helpers.models.tiny_models import CHOOSING, VOCAB, ragged_tokens
from tests.helpers.tiers import long
from tests.helpers.worlds import run_world

MOE = "--num-experts 4 --moe-ffn-hidden-size 36 --moe-router-topk 2"
DENSE_FIRST = f"{MOE} --moe-layer-freq [0,1] --moe-shared-expert-intermediate-size 50"
TP2, PP2, EP2 = (f"--{kind}-model-parallel-size 2" for kind in ("tensor", "pipeline", "expert"))
SP2, CP2, DISTRIBUTED = f"{TP2} --sequence-parallel", "--context-parallel-size 2", "--use-distributed-optimizer"
VPP = f"{PP2} --num-layers 4 --num-layers-per-virtual-pipeline-stage 1"
FACTOR = 1.3  # measured over planned activations, or the inverse; experts are unevenly loaded, the rest is within 1.1
LENGTHS = [40, 40, 32, 48, 1, 47, 48]


class Meter:
    """Bytes that autograd keeps alive for backward, weights apart: now, and at most so far."""

    def __init__(self, stages):
        self.weights = {p.untyped_storage().data_ptr() for p in stages.parameters()}
        self.alive, self.now, self.peak = {}, 0, 0

    def hooks(self):
        """Context in which it counts."""
        return torch.autograd.graph.saved_tensors_hooks(lambda tensor: _Saved(tensor, self), lambda saved: saved.tensor)


class _Saved:
    def __init__(self, tensor, meter):
        self.tensor, self.meter, storage = tensor, meter, tensor.untyped_storage()
        self.key = storage.data_ptr()
        if self.key not in meter.weights:
            meter.alive[self.key] = meter.alive.get(self.key, 0) + 1
            if meter.alive[self.key] == 1:
                meter.now += storage.nbytes()
                meter.peak = max(meter.peak, meter.now)

    def __del__(self):
        meter = self.meter
        if self.key in meter.alive:
            meter.alive[self.key] -= 1
            if not meter.alive[self.key]:
                del meter.alive[self.key]
                meter.now -= self.tensor.untyped_storage().nbytes()


def as_on_a_device():
    """Has recurrences keep what they keep there."""
    from megarl.mcore import recurrence
    from megarl.mcore.kernels.cuda import recurrent_chunks
    from tests.helpers.models import reference_kernels

    recurrence.has_kernels, recurrence.runs.has_triton = lambda x: False, lambda x: True
    for name in ("convolve_runs", "convolve_runs_backward", "walk_chunks"):
        setattr(recurrent_chunks, name, getattr(reference_kernels, name))


def update_of_rank(rank: int, cases: list):
    """For each case: real and planned bytes of this rank, and real and planned peak of activations of an update."""
    from megarl.mcore.model import forward_pass
    from megarl.mcore.parallel import pipeline

    as_on_a_device()
    found = []
    for flags, shape, value_head, count in cases:
        args, pg_collection, stages, wrapped, optimizer = build(flags, shape, value_head)
        planned = check_weights(args, pg_collection, stages, value_head, rank, dist.get_world_size())
        exact = planned == real_bytes(stages, wrapped, optimizer)
        meter = Meter(stages)

        def forward(chunk, part, value_head=value_head):
            if value_head:
                return forward_pass.token_values(chunk, *part)
            return forward_pass.token_scores(chunk, *part, 1.0, VOCAB)

        def loss(out, part):
            return (out if torch.is_tensor(out) else out.logprobs).sum(), torch.zeros(1)

        parts = [ragged_tokens(LENGTHS, seed) for seed in range(count)]
        with meter.hooks():
            pipeline.run_microbatches(wrapped, parts, forward, loss, pg_collection, train=True)
        kind, stage = "value" if value_head else "train", dist.get_rank(pg_collection.pp)
        found.append((exact, meter.peak, activations.of_stage(args, stage, kind, sum(LENGTHS), count, fused=False)))
    return found


FULL = "--num-layers 6 --recompute-granularity full --recompute-method"
ALONE = [
    ("", "llama", False, 1), ("--bf16", "llama", False, 2), ("", "llama", True, 1), ("", "gpt2", False, 1),
    ("--num-layers 6 --ffn-hidden-size 64 --qk-layernorm", "llama", False, 1), (MOE, "llama", False, 1),
    (f"{DENSE_FIRST} --bf16", "llama", False, 1), (f"{MOE} --num-layers 4 --disable-bias-linear", "gpt2", False, 1),
    ("--num-layers 4 --recompute-activations", "llama", False, 1),
    (f"{FULL} uniform --recompute-num-layers 2", "llama", False, 1),
    (f"{FULL} block --recompute-num-layers 3", "llama", False, 1),
    ("", "recurrent", False, 1), ("--bf16", "recurrent", False, 1), ("--num-layers 4", "recurrent", False, 1),
    ("", "mamba", False, 1), ("--bf16", "mamba", False, 1), ("", "kimi", False, 1), ("--bf16", "ling", False, 1),
    ("", "latent", False, 1), ("--bf16", "latent", False, 1), ("--recompute-activations", "latent", False, 1),
    (CHOOSING, "latent", False, 1), (f"{CHOOSING} --recompute-activations", "latent", False, 1),
    (f"{CHOOSING} --bf16", "latent", False, 1),
]  # fmt: skip
PAIR = [
    (TP2, "llama", False, 1), (SP2, "llama", False, 1), (f"{SP2} {DISTRIBUTED}", "gpt2", True, 1),
    (f"{CP2} {DISTRIBUTED}", "llama", False, 1), (f"{MOE} {EP2}", "llama", False, 1),
    (TP2, "latent", False, 1), (SP2, "latent", False, 1), (CP2, "latent", False, 1),
    (f"{CHOOSING} {SP2}", "latent", False, 1),
    (f"{DENSE_FIRST} {SP2} {EP2}", "llama", False, 1), (f"{PP2} --num-layers 4", "llama", False, 1),
    (f"{PP2} --num-layers 4", "llama", False, 4), (f"{SP2} --num-query-groups 1 --qk-layernorm", "llama", False, 1),
    (f"{PP2} --num-layers 4 --bf16", "llama", True, 4), (VPP, "llama", False, 4), (VPP, "llama", False, 2),
]  # fmt: skip


@pytest.mark.parametrize("ranks, cases", [(1, ALONE[::2]), long((1, ALONE[1::2])), long((2, PAIR))])
def test_a_real_update_uses_the_planned_memory(ranks, cases):
    for rank, results in enumerate(run_world(update_of_rank, ranks, cases)):
        for case, (exact, peak, planned) in zip(cases, results, strict=True):
            assert exact, (rank, case)
            # Experts on a CPU keep less than Megatron's path, which the plan describes.
            # The compiled kernels keep values of latents with their own channels, other backends with the keys'.
            most = FACTOR * (1.2 if "--num-experts" in case[0] or case[1] == "latent" else 1)
            assert peak / FACTOR < planned < peak * most, (rank, case, peak, planned)
