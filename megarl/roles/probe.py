"""How far training and rollout are apart with the rollout's routes, and without: measured now and then on few texts."""

import dataclasses

import torch

from megarl.batch import Batch
from megarl.roles import microbatches as mb
from megarl.roles.learner import Learner

SEQUENCES = 64  # of a step, the first ones


def probed() -> torch.Tensor:
    """Ids of the sequences that are looked at; a step may have fewer."""
    return torch.arange(SEQUENCES)


def logprob_gaps(learner: Learner, batch: Batch, forward) -> dict[str, float]:
    """Mean |rollout − recomputed| over the probed response tokens, with replay and with live routers. Collective.

    What passes measure begins anew behind it.
    """
    table, places, found = learner.routes.table, mb.members(batch, probed()), {}
    for name, routes in (("replayed", table), ("live", None)):
        learner.routes.table = routes
        results = learner.evaluate(learner.microbatches(batch, places), forward)
        scored = dataclasses.replace(batch)
        mb.write_back(scored, "logprobs", [(scores.logprobs, where) for scores, where in results])
        chosen = scored.select(places)
        gaps = (chosen.rollout_logprobs - chosen.logprobs).abs().masked_fill(~chosen.response_mask, 0.0).double()
        total, count = learner.place.sum_over_lanes(torch.stack([gaps.sum(), chosen.response_mask.sum().double()]))
        found[f"router/gap_{name}"] = float(total / count.clamp(min=1))
    learner.routes.begin()
    learner.routes.table = table
    return found
