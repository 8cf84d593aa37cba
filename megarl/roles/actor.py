"""The actor: recomputes the log-probs of what the policy wrote, and learns from the experience."""

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.algorithms.aggregation import masked_sum, token_mean
from megarl.algorithms.policy_loss import ppo_clip
from megarl.arguments import RoleSettings, Settings
from megarl.batch import Batch
from megarl.mcore import model
from megarl.observe.timers import Timers
from megarl.roles import microbatches as mb
from megarl.roles.flow import Flow
from megarl.roles.learner import Learner, updates_per_step
from megarl.world import Place


class Actor:
    """The policy."""

    name = "actor"

    def __init__(self, settings: Settings, role: RoleSettings, place: Place, vocab_size: int, timers: Timers):
        self.settings, self.place, self.timers, self.vocab_size = settings, place, timers, vocab_size
        self.learner = None
        self.metrics: dict[str, float] = {}
        if place.is_member:
            self.learner = Learner(role, place, vocab_size, updates_per_step(settings))

    def logprobs(self, flow: Flow, step: int):
        """Fills `logprobs` (π_old) and `entropy` by the training forward.

        It runs the very micro-batches of the first epoch, so that before any update each ratio is exactly 1.
        """
        if not self.place.is_member:
            return
        with self.timers.phase(self.name, "logprobs"):
            batch, results = flow[self.name], []
            for ids in mb.minibatches_of_step(self.settings, step, epoch=0):
                parts = self.learner.microbatches(batch, mb.members(batch, ids))
                results += self.learner.evaluate(parts, self._forward)
            mb.write_back(batch, "logprobs", [(scores.logprobs, places) for scores, places in results])
            mb.write_back(batch, "entropy", [(scores.entropy, places) for scores, places in results])
            self._measure_gap(batch)

    def _measure_gap(self, batch: Batch):
        gap = (batch.rollout_logprobs - batch.logprobs).abs().masked_fill(~batch.response_mask, 0.0)
        largest = gap.amax() if len(gap) else gap.sum()
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self.place.collection.dp)
        total, count = self.place.sum_over_lanes(torch.stack([gap.sum(), batch.response_mask.sum()]).double())
        self.metrics = {
            "rollout/logprob_gap_max": float(largest),
            "rollout/logprob_gap_mean": float(total / count.clamp(min=1)),
        }

    def _forward(self, network, part) -> model.TokenScores:
        return model.token_scores(network, part.tokens, part.lengths, self.settings.temperature, self.vocab_size)

    def update(self, flow: Flow, step: int):
        """Learns from `advantages` for `--ppo-epochs` epochs of mini-batches; rests while the critic warms up."""
        if not self.place.is_member or step <= self.settings.critic_warmup_steps:
            return
        with self.timers.phase(self.name, "update"):
            batch, results = flow[self.name], []
            for epoch in range(self.settings.ppo_epochs):
                for ids in mb.minibatches_of_step(self.settings, step, epoch):
                    results.append(self._update(batch, mb.members(batch, ids)))
            self._summarize(results)

    def _update(self, batch: Batch, places: Tensor):
        count = self.place.sum_over_lanes(batch.select(places).response_mask.sum().double())
        low = self.settings.clip_range
        high = self.settings.clip_range_high or low

        def loss(scores, part):
            mask = part.response_mask
            terms = ppo_clip(scores.logprobs, part.logprobs, part.advantages, low, high)
            policy, entropy = token_mean(terms.loss, mask, count), token_mean(scores.entropy, mask, count)
            value = policy - self.settings.entropy_coefficient * entropy
            others = [masked_sum(x.double(), mask) / count.clamp(min=1) for x in (terms.approx_kl, terms.clipped)]
            return value, torch.stack([value.detach().double(), entropy.detach().double(), *others]).detach()

        sums, applied, norm = self.learner.update(self.learner.microbatches(batch, places), self._forward, loss)
        return self.place.sum_over_lanes(torch.stack(sums).sum(0)), applied, norm

    def _summarize(self, results):
        means = torch.stack([sums for sums, _, _ in results]).mean(0).tolist()
        self.metrics |= {
            "actor/loss": means[0],
            "actor/entropy": means[1],
            "actor/ppo_kl": means[2],
            "actor/ppo_kl_first": results[0][0][2].item(),
            "actor/clip_fraction": means[3],
            "actor/grad_norm": sum(norm for _, _, norm in results) / len(results),
            "actor/learning_rate": self.learner.learning_rate(),
            "actor/updates_skipped": sum(not applied for _, applied, _ in results),
        }
