"""The actor's loss: policy loss with rollout correction, entropy bonus and KL, normalized over the mini-batch."""

import torch
from torch import Tensor

from megarl.algorithms.aggregation import aggregate, local_counts, masked_sum
from megarl.algorithms.kl import REFERENCE_LOG_RATIO_LIMIT, kl_estimate
from megarl.algorithms.policy_loss import PolicyLoss, PolicyTokens
from megarl.algorithms.rollout_correction import CorrectionOptions, correction_weights
from megarl.arguments import Settings
from megarl.batch import Batch
from megarl.flags.distill_settings import LOSS
from megarl.mcore.model.forward_pass import TaughtScores, TokenScores
from megarl.roles.loss_mask import loss_mask
from megarl.roles.teacher_metrics import (
    DISTILL_NAMES,
    masks_by_teacher,
    measured_apart,
    names_by_teacher,
    token_counts,
)

PPO_KL = "actor/ppo_kl"
METRIC_NAMES = ("actor/loss", "actor/entropy", PPO_KL, "actor/clip_fraction", "actor/kl_loss")


class ActorLoss:
    """Loss and metrics of a micro-batch. Those of the mini-batch are the sums over micro-batches and replicas."""

    def __init__(self, settings: Settings, policy_loss: PolicyLoss):
        self.settings, self.policy_loss = settings, policy_loss
        s = settings
        self.correction = CorrectionOptions(
            kind=s.rollout_correction, level=s.rollout_correction_level, cap=s.rollout_correction_cap,
            floor=s.rollout_correction_floor,
        )  # fmt: skip
        self.norm = s.loss_norm_length or float(s.max_response_length)
        self.teachers: tuple[str, ...] = ()
        self.names: tuple[str, ...] = METRIC_NAMES
        if s.distill == LOSS:
            self.teachers = measured_apart(s)
            self.names += DISTILL_NAMES + names_by_teacher(DISTILL_NAMES, self.teachers)

    def __call__(
        self,
        scores: TokenScores | TaughtScores,
        microbatch: Batch,
        old_logprobs: Tensor,
        counts: Tensor,
        kl_coefficient: float,
    ) -> tuple[Tensor, Tensor]:
        """(differentiable loss, float64 metrics in the order of `names`).

        Args:
            scores: of the present policy.
            old_logprobs: [T] of the policy before the step.
            counts: [2 + K] of the whole mini-batch (`local_counts`), with K teachers that are measured apart.
            kl_coefficient: β of a KL term in the loss; unused with the KL in the reward.
        """
        s, mask = self.settings, loss_mask(microbatch, self.settings)
        layout = (mask, microbatch.cu_seqlens)
        # Values at tokens without a loss must not reach a gradient, not even as 0 · inf.
        old, rollout, advantages = (
            x.masked_fill(~mask, 0.0) for x in (old_logprobs, microbatch.rollout_logprobs, microbatch.advantages)
        )

        def reduce(losses: Tensor) -> Tensor:
            return aggregate(losses, *layout, s.loss_aggregation, counts[:2], self.norm)

        tokens = PolicyTokens(
            logprobs=scores.logprobs, old_logprobs=old, advantages=advantages, response_mask=mask,
            cu_seqlens=microbatch.cu_seqlens,
        )  # fmt: skip
        terms = self.policy_loss.function(tokens, self.policy_loss.options)
        losses = terms.loss
        if self.correction.kind != "none":
            losses = losses * correction_weights(old, rollout, *layout, self.correction)
        value, kl = reduce(losses), losses.new_zeros(())
        if s.entropy_coefficient:  # its gradient costs a pass over all logits
            value = value - s.entropy_coefficient * reduce(scores.entropy)
        if s.kl_in == "loss" and kl_coefficient > 0:
            reference = microbatch.reference_logprobs.masked_fill(~mask, 0.0)
            kl = reduce(kl_estimate(scores.logprobs, reference, s.kl_estimator, REFERENCE_LOG_RATIO_LIMIT))
            value = value + kl_coefficient * kl
        compared: tuple[Tensor, ...] = ()
        if isinstance(scores, TaughtScores):
            compared = scores.distillation
            divergence = s.distill_coefficient * reduce(scores.distillation.divergence)
            value = divergence if s.only_distills else value + divergence
        means = [
            masked_sum(x.detach().double(), mask) / counts[0].clamp(min=1)
            for x in (scores.entropy, terms.approx_kl, terms.clipped, *compared)
        ]
        means += [
            masked_sum(x.detach().double(), of_teacher) / count.clamp(min=1)
            for of_teacher, count in zip(masks_by_teacher(microbatch, mask, self.teachers), counts[2:], strict=True)
            for x in compared
        ]
        return value, torch.stack([value.detach().double(), *means[:3], kl.detach().to(means[0]), *means[3:]])

    def local_counts(self, minibatch: Batch, mask: Tensor) -> Tensor:
        """[2 + K] this replica's `aggregation.local_counts` of a mini-batch, and the tokens of each of K teachers."""
        return torch.cat([local_counts(mask, minibatch.cu_seqlens), token_counts(minibatch, mask, self.teachers)])

    def metric_counts(self, counts: Tensor) -> Tensor:
        """[M] what each metric of a mini-batch is a mean over: tokens, or for losses sequences, too."""
        tokens, of_losses = counts[0], counts[0 if self.settings.loss_aggregation == "token-mean" else 1]
        of_teachers = counts[2:].repeat_interleave(len(DISTILL_NAMES))
        compared = [tokens] * (len(self.names) - len(METRIC_NAMES) - len(of_teachers))
        return torch.cat([torch.stack([of_losses, tokens, tokens, tokens, of_losses, *compared]), of_teachers])
