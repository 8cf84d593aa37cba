"""The critic: values of states, learnt by the clipped value loss."""

import functools

import torch

from megarl.algorithms.aggregation import masked_sum, token_mean
from megarl.algorithms.statistics import explained_variance, explained_variance_moments
from megarl.algorithms.value_loss import clipped_value_loss
from megarl.arguments import RoleSettings, Settings
from megarl.mcore import passes
from megarl.observe.timers import Timers
from megarl.roles import microbatches as mb
from megarl.roles.flow import Flow
from megarl.roles.learner import Learner
from megarl.world import Place


class Critic:
    """A transformer with a scalar head; a run whose advantages need no values has none."""

    name = "critic"

    def __init__(self, settings: Settings, role: RoleSettings | None, place: Place, vocab_size: int, timers: Timers):
        self.settings, self.place, self.timers = settings, place, timers
        self.learner = None
        self.metrics: dict[str, float] = {}
        if place.is_member:
            self.learner = Learner(role, place, vocab_size, settings.updates_per_step, value_head=True)
            self.learner.offload.timed = functools.partial(timers.phase, self.name, "offload")

    def values(self, flow: Flow):
        """Fills `values`: V of the state before each token, as it was when the text was written."""
        batch = flow.lacking(self.name, "values")
        if batch is None:
            return
        with self.timers.phase(self.name, "values"):
            parts = self.learner.microbatches(batch, torch.arange(len(batch)))
            mb.write_back(batch, "values", self.learner.evaluate(parts, self._forward))

    def _forward(self, network, part) -> torch.Tensor:
        return passes.token_values(network, part.tokens, part.on_host.lengths, part.routing, part.on_host.shared)

    def update(self, flow: Flow, step: int):
        """Learns `returns` for `--ppo-epochs` epochs of mini-batches."""
        if not self.place.is_member:
            return
        with self.timers.phase(self.name, "update"):
            batch = flow[self.name]
            moments = explained_variance_moments(batch.values, batch.returns, batch.response_mask)
            self.metrics = {"critic/explained_variance": explained_variance(self.place.sum_over_lanes(moments))}
            results = []
            with self.learner.learning():
                for epoch in range(self.settings.ppo_epochs):
                    for ids in mb.minibatches_of_step(self.settings, flow.count, step, epoch):
                        results.append(self._update(batch, mb.members(batch, ids)))
            self._summarize(results)

    def _update(self, batch, places):
        mask = batch.select(places).response_mask
        count = self.place.sum_over_lanes(mask.sum().double())

        def loss(values, part):
            terms = clipped_value_loss(values, part.values, part.returns, self.settings.value_clip_range)
            value = token_mean(terms.loss, part.response_mask, count)
            clipped = masked_sum(terms.clipped.double(), part.response_mask) / count.clamp(min=1)
            return value, torch.stack([value.detach().double(), clipped])

        parts = self.learner.microbatches(batch, places)
        sums, applied, norm = self.learner.update(parts, self._forward, loss)
        return self.place.sum_over_lanes(torch.stack(sums).sum(0)), applied, norm

    def _summarize(self, results):
        means = torch.stack([sums for sums, _, _ in results]).mean(0).tolist()
        self.metrics |= {
            "critic/loss": means[0],
            "critic/clip_fraction": means[1],
            "critic/grad_norm": sum(norm for _, _, norm in results) / len(results),
            "critic/learning_rate": self.learner.learning_rate(),
            "critic/updates_skipped": sum(not applied for _, applied, _ in results),
            **self.learner.routes.metrics("critic/router"),
            **self.learner.offload.metrics(self.name),
        }
