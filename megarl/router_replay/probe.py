"""How far training and rollout are apart with the rollout's routes, and without: measured now and then on few texts."""

import dataclasses

import torch

from megarl.batch import Batch
from megarl.comm import microbatches as mb

PROBED_SEQUENCES = 64  # of a step, the first ones


def probed_ids() -> torch.Tensor:
    """Ids of the sequences that are looked at; a step may have fewer."""
    return torch.arange(PROBED_SEQUENCES)


def logprob_gaps(trainable_model, batch: Batch, forward) -> dict[str, float]:
    """Mean |rollout − recomputed| over the probed response tokens, with replay and with live routers. Collective.

    `trainable_model` is the actor's `TrainableModel`. What its routers have measured is reset afterwards.
    """
    table, places, found = trainable_model.routes.table, mb.positions_of(batch, probed_ids()), {}
    for name, routes in (("replayed", table), ("live", None)):
        trainable_model.routes.table = routes
        results = trainable_model.forward_only(trainable_model.microbatches(batch, places), forward)
        scored = dataclasses.replace(batch)
        mb.write_back(scored, "logprobs", [(scores.logprobs, where) for scores, where in results])
        chosen = scored.select(places)
        gaps = (chosen.rollout_logprobs - chosen.logprobs).abs().masked_fill(~chosen.response_mask, 0.0).double()
        total, count = trainable_model.role_groups.dp_all_reduce(
            torch.stack([gaps.sum(), chosen.response_mask.sum().double()])
        )
        found[f"router/gap_{name}"] = float(total / count.clamp(min=1))
    trainable_model.routes.begin()
    trainable_model.routes.table = table
    return found
