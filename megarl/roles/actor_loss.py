"""What the actor minimises: policy loss with rollout correction, entropy bonus and KL, over a whole mini-batch."""

import torch
from torch import Tensor

from megarl.algorithms.aggregation import aggregate, masked_sum
from megarl.algorithms.kl import kl_estimate
from megarl.algorithms.policy_loss import PolicyLoss, PolicyTokens
from megarl.algorithms.rollout_correction import CorrectionOptions, correction_weights
from megarl.arguments import Settings
from megarl.batch import Batch
from megarl.mcore.model.forward_pass import TokenScores

METRIC_NAMES = ("actor/loss", "actor/entropy", "actor/ppo_kl", "actor/clip_fraction", "actor/kl_loss")


class ActorLoss:
    """Loss and measures of a micro-batch, each this part's share of the whole mini-batch's."""

    def __init__(self, settings: Settings, policy_loss: PolicyLoss):
        s, self.settings, self.policy_loss = settings, settings, policy_loss
        self.correction = CorrectionOptions(
            s.rollout_correction, s.rollout_correction_level, s.rollout_correction_cap, s.rollout_correction_floor
        )
        self.norm = s.loss_norm_length or float(s.max_response_length)

    def __call__(
        self, scores: TokenScores, part: Batch, old_logprobs: Tensor, counts: Tensor, kl_coefficient: float
    ) -> tuple[Tensor, Tensor]:
        """(loss to be differentiated, float64 measures in the order of `NAMES`).

        Args:
            scores: of the policy that learns.
            old_logprobs: [T] of the policy that the step began with.
            counts: [2] of the whole mini-batch (`aggregation.local_counts`).
            kl_coefficient: β of a KL in the loss; not read where the KL is in the reward.
        """
        s, mask = self.settings, part.response_mask
        where = (mask, part.cu_seqlens)
        # What stands at tokens that the policy did not write must not reach a gradient, not even as 0 · inf.
        old, rollout, advantages = (
            x.masked_fill(~mask, 0.0) for x in (old_logprobs, part.rollout_logprobs, part.advantages)
        )

        def whole(losses: Tensor) -> Tensor:
            return aggregate(losses, *where, s.loss_aggregation, counts, self.norm)

        tokens = PolicyTokens(scores.logprobs, old, advantages, *where)
        terms = self.policy_loss.function(tokens, self.policy_loss.options)
        losses = terms.loss
        if self.correction.kind != "none":
            losses = losses * correction_weights(old, rollout, *where, self.correction)
        value, kl = whole(losses), losses.new_zeros(())
        if s.entropy_coefficient:  # else its gradient, which costs a pass over all logits, is not asked for
            value = value - s.entropy_coefficient * whole(scores.entropy)
        if s.kl_in == "loss" and kl_coefficient > 0:
            reference = part.reference_logprobs.masked_fill(~mask, 0.0)
            kl = whole(kl_estimate(scores.logprobs, reference, s.kl_estimator, log_ratio_limit=20.0))
            value = value + kl_coefficient * kl
        means = [
            masked_sum(x.detach().double(), mask) / counts[0].clamp(min=1)
            for x in (scores.entropy, terms.approx_kl, terms.clipped)
        ]
        return value, torch.stack([value.detach().double(), *means, kl.detach().to(means[0])])
