"""Walks an update of tiny models on a device without hardware: scores, forward, backward, optimizer."""

import functools

import torch

from tests.cuda_walk.device import CUDA, Walk
from tests.helpers.models.tiny_models import CHOOSING, VOCAB, join_actor

LENGTHS = [7, 2, 11, 1, 4, 9]
RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
FIELDS = ("logprobs", "rollout_logprobs", "reference_logprobs", "advantages", "values", "returns")


def host_batch():
    """A batch of the host with every field, whose last two prompts begin alike; and its prompts."""
    from megarl.batch import Batch
    from megarl.comm.microbatches import PromptPrefixes

    total = sum(LENGTHS)
    batch = Batch(sequence_ids=torch.arange(len(LENGTHS)), lengths=torch.tensor(LENGTHS),
                  response_mask=torch.arange(total) % 3 > 0, tokens=torch.arange(total) % VOCAB,
                  **{name: torch.linspace(-1, 1, total) for name in FIELDS})  # fmt: skip
    batch.tokens[25:27] = batch.tokens[21:23]
    batch.response_mask[25:28] = False
    return batch, PromptPrefixes(torch.tensor([0, 1, 2, 3, 4, 4]), torch.full((6,), 2))


def device_batch(part):
    """A batch of the host, on the device."""
    from megarl.batch import Batch

    there = Batch(**{name: getattr(part, name).to(CUDA) for name in part.present()})
    there.host_metadata = part.host_metadata
    return there


def update(
    walk: Walk, flags: str = "", value_head: bool = False, program: str = "sft", shape: str = "llama"
) -> dict:  # fmt: skip
    """What is counted while two micro-batches are scored and trained on, and in the optimizer's step."""
    from megarl.comm import microbatches
    from megarl.mcore.model import forward_pass, gpt
    from megarl.mcore.parallel import pipeline
    from megarl.mcore.training import optimizer
    from megarl.roles.passes import forward_only

    args, place = join_actor(flags, shape, program)
    stages = gpt.build_model(args, VOCAB, place.pg_collection, value_head)
    wrapped = optimizer.wrap_for_training(stages, args, place.pg_collection)
    adam = optimizer.build_optimizer(wrapped, args, place.pg_collection)
    groups, (batch, prefixes) = [torch.tensor([0, 2, 3]), torch.tensor([1, 4, 5])], host_batch()
    built = microbatches.build_microbatches(batch, groups, prefixes)
    parts = [(device_batch(part), places) for part, places in built]

    def scores(chunk, part):
        known = part.host_metadata
        if value_head:
            return forward_pass.token_values(chunk, part.tokens, known.lengths, shared=known.shared)
        return forward_pass.token_scores(
            chunk, part.tokens, known.lengths, 0.9, VOCAB, None, known.response_mask, known.shared
        )

    def loss(out, part):
        value = (out * part.returns).sum() if value_head else (out.logprobs * part.advantages + out.entropy).sum()
        return value, (out if value_head else out.logprobs).detach()

    found, walk.all_true = {}, CHOOSING in flags  # so that all queries are compared with their choice
    walk.clear()
    forward_only(stages, parts, scores, place.pg_collection)
    found["scores"] = walk.counts()
    walk.clear()
    pipeline.run_microbatches(
        wrapped, parts, lambda chunk, part: scores(chunk, part[0]), lambda out, part: loss(out, part[0]),
        place.pg_collection, True,
    )  # fmt: skip
    found["passes"] = walk.counts()
    walk.clear()
    optimizer.update(adam)
    found["optimizer"] = walk.counts()
    return found


_SETTINGS: dict[str, dict] = {
    "update fp32": {},
    "update bf16": {"flags": "--bf16"},
    "update distributed optimizer": {"flags": "--bf16 --use-distributed-optimizer"},
    "update recompute": {"flags": f"--bf16 {RECOMPUTE}"},
    "update experts": {"flags": "--bf16 --num-experts 4 --moe-router-topk 2 --moe-grouped-gemm"},
    "update critic": {"flags": "--bf16", "value_head": True},
    "update chosen keys": {"flags": f"--bf16 {CHOOSING}", "shape": "latent"},
}  # fmt: skip
SCENARIOS = {  # name -> (what walks, ranks)
    name: (functools.partial(update, **settings), 1) for name, settings in _SETTINGS.items()
}
