"""Turns what the roles computed into advantages and returns, on the actor's lanes (2203.02155, 1506.02438)."""

import torch

from megarl.algorithms.advantages import gae, token_rewards
from megarl.algorithms.kl import AdaptiveKLController, FixedKLController, kl_estimate
from megarl.algorithms.statistics import local_moments, whiten
from megarl.arguments import Settings
from megarl.batch import Batch
from megarl.observe.timers import Timers
from megarl.roles.flow import HOME, Flow
from megarl.world import Place


class Experience:
    """Token rewards with KL, GAE, whitening; owns the KL coefficient."""

    def __init__(self, settings: Settings, place: Place, timers: Timers):
        self.settings, self.place, self.timers = settings, place, timers
        self.metrics: dict[str, float] = {}
        beta = settings.kl_coefficient
        self.controller = FixedKLController(beta)
        if settings.kl_target is not None:
            self.controller = AdaptiveKLController(beta, settings.kl_target, settings.kl_horizon)

    def complete(self, flow: Flow):
        """Fills `advantages` and `returns` from scores, log-probs and values; moves the KL coefficient on."""
        if not self.place.is_member:
            return
        with self.timers.phase(HOME, "advantages"):
            batch, s = flow[HOME], self.settings
            kl = kl_estimate(batch.logprobs, batch.reference_logprobs, "k1").masked_fill(~batch.response_mask, 0.0)
            where = (batch.response_mask, batch.cu_seqlens)
            rewards = token_rewards(batch.scores, kl, self.controller.coefficient, *where)
            advantages, batch.returns = gae(rewards, batch.values, *where, s.gamma, s.gae_lambda)
            if s.whiten_advantages:
                moments = self.place.sum_over_lanes(local_moments(advantages, batch.response_mask))
                advantages = whiten(advantages, batch.response_mask, moments)
            batch.advantages = advantages
            self._measure(batch, kl)

    def _measure(self, batch: Batch, kl: torch.Tensor):
        scores = batch.scores.double()
        sums = torch.stack([
            torch.tensor(len(batch), device=scores.device), scores.sum(), scores.square().sum(), kl.double().sum(),
            batch.response_lengths.sum(), batch.finished.sum(), batch.correct.sum(), batch.lengths.sum(),
            batch.entropy.double()[batch.response_mask].sum(),
        ]).double()  # fmt: skip
        sums = self.place.sum_over_lanes(sums).tolist()
        n, total, squares, kl_sum, written, finished, correct, tokens, entropy = sums
        self.metrics = {
            "reward/mean": total / n,
            "reward/std": max(squares / n - (total / n) ** 2, 0.0) ** 0.5,
            "reward/accuracy": correct / n,
            "kl/reference": kl_sum / n,
            "kl/coefficient": self.controller.coefficient,
            "rollout/tokens": int(written),
            "rollout/response_length_mean": written / n,
            "rollout/finished_fraction": finished / n,
            "rollout/entropy": entropy / max(written, 1.0),
            "perf/tokens": int(tokens),
        }
        self.controller.update(kl_sum / n, int(n))
