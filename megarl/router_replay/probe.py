"""Measures the log-prob gap between training and rollout with and without replayed routes, on a few sequences."""

import dataclasses

import torch

from megarl.batch import Batch
from megarl.comm import microbatches as mb

PROBED_SEQUENCES = 64  # the first of the step


def probed_ids() -> torch.Tensor:
    """Ids of the probed sequences; a step may have fewer."""
    return torch.arange(PROBED_SEQUENCES)


def logprob_gaps(trainable_model, batch: Batch, forward) -> dict[str, float]:
    """Mean log-prob gap |rollout − recomputed| of the probed tokens, with replay and with live routers. Collective.

    `trainable_model` is the actor's `TrainableModel`. Resets the statistics of its routers.
    """
    state, positions = trainable_model.router_state, mb.positions_of(batch, probed_ids())
    table, gaps = state.replayed_routes, {}
    for name, routes in (("replayed", table), ("live", None)):
        state.replayed_routes = routes
        results = trainable_model.forward_only(trainable_model.microbatches(batch, positions), forward)
        scored = dataclasses.replace(batch)
        mb.write_back(scored, "logprobs", [(scores.logprobs, at) for scores, at in results])
        probed = scored.select(positions)
        gap = (probed.rollout_logprobs - probed.logprobs).abs().masked_fill(~probed.response_mask, 0.0).double()
        total, count = trainable_model.role_groups.dp_all_reduce(
            torch.stack([gap.sum(), probed.response_mask.sum().double()])
        )
        gaps[f"router/gap_{name}"] = float(total / count.clamp(min=1))
    state.begin_step()
    state.replayed_routes = table
    return gaps
