"""The actor's loss: policy loss with rollout correction, entropy bonus and KL, normalized over the mini-batch."""

import torch
from torch import Tensor

from megarl.algorithms.aggregation import aggregate, local_counts, masked_sum
from megarl.algorithms.kl import REFERENCE_LOG_RATIO_LIMIT, kl_estimate
from megarl.algorithms.packed import broadcast_to_tokens
from megarl.algorithms.policy_loss import PolicyLoss, PolicyTokens
from megarl.algorithms.rollout_correction import CorrectionOptions, correction_weights, off_policy_kept
from megarl.arguments import Settings
from megarl.batch import Batch
from megarl.flags.distillation import LOSS
from megarl.mcore.model.forward_pass import TokenScores
from megarl.roles.loss_mask import actor_mask
from megarl.roles.teacher import DISTILL_NAMES, masks_by_teacher, measured_apart, names_by_teacher, token_counts

PPO_KL = "actor/ppo_kl"
METRIC_NAMES = ("actor/loss", "actor/entropy", PPO_KL, "actor/clip_fraction", "actor/kl_loss")
SELECTED, OPSM, NLL = "actor/selected_fraction", "actor/opsm_fraction", "actor/positive_nll"


class ActorLoss:
    """Loss and metrics of a micro-batch. Those of the mini-batch are the sums over micro-batches and replicas."""

    def __init__(self, settings: Settings, policy_loss: PolicyLoss):
        self.settings, self.policy_loss = settings, policy_loss
        s = settings
        self.correction = CorrectionOptions(
            kind=s.rollout_correction,
            level=s.rollout_correction_level,
            cap=s.rollout_correction_cap,
            floor=s.rollout_correction_floor,
        )
        self.weight_mean = 1.0  # of the step's correction weights, which it divides
        self.norm = s.loss_norm_length or float(s.max_response_length)
        self.teachers: tuple[str, ...] = ()
        chosen = (
            (SELECTED, policy_loss.select is not None),
            (OPSM, s.opsm_threshold is not None),
            (NLL, bool(s.positive_nll_coefficient)),
        )
        self.options = tuple(name for name, is_chosen in chosen if is_chosen)
        self.names: tuple[str, ...] = METRIC_NAMES + self.options
        if s.distill == LOSS:
            self.teachers = measured_apart(s)
            self.names += DISTILL_NAMES + names_by_teacher(DISTILL_NAMES, self.teachers)

    def __call__(
        self,
        scores: TokenScores,
        microbatch: Batch,
        old_logprobs: Tensor,
        counts: Tensor,
        kl_coefficient: float,
    ) -> tuple[Tensor, Tensor]:
        """(differentiable loss, float64 metrics in the order of `names`).

        Args:
            scores: of the present policy.
            old_logprobs: [T] of the policy before the step.
            counts: [2 + K] of the whole mini-batch (`local_counts`), with K teachers that are measured apart; then, for
                the loss of correct responses, their tokens.
            kl_coefficient: β of a KL term in the loss; unused with the KL in the reward.
        """
        s, mask = self.settings, actor_mask(microbatch, self.settings)
        cu_seqlens, optional = microbatch.cu_seqlens, []
        tokens = self._policy_tokens(scores.logprobs, old_logprobs, microbatch, mask)

        def reduce(losses: Tensor) -> Tensor:
            return aggregate(losses, mask, cu_seqlens, s.loss_aggregation, counts[:2], self.norm)

        def token_mean(values: Tensor) -> Tensor:
            return masked_sum(values.detach().double(), mask) / counts[0].clamp(min=1)

        terms = self.policy_loss.function(tokens, self.policy_loss.options)
        losses = terms.loss
        if self.policy_loss.select is not None:
            optional.append(token_mean(microbatch.selected))
        if s.opsm_threshold is not None:
            is_kept = off_policy_kept(tokens, s.opsm_threshold)
            losses = torch.where(is_kept, losses, 0.0)
            optional.append(token_mean(~is_kept))
        if self.correction.kind != "none":
            losses = losses * self._weights(old_logprobs, microbatch)
        value, kl = reduce(losses), losses.new_zeros(())
        if s.positive_nll_coefficient:
            likelihood = masked_sum(scores.logprobs, self._correct(microbatch, mask)) / counts[-1].clamp(min=1)
            value = value - s.positive_nll_coefficient * likelihood
            optional.append(-likelihood.detach().double())
        if s.entropy_coefficient:  # its gradient costs a pass over all logits
            value = value - s.entropy_coefficient * reduce(scores.entropy)
        if s.kl_in == "loss" and kl_coefficient > 0:
            reference = microbatch.reference_logprobs.masked_fill(~mask, 0.0)
            limit, old = REFERENCE_LOG_RATIO_LIMIT, tokens.old_logprobs
            kl = reduce(kl_estimate(scores.logprobs, reference, s.kl_estimator, limit, old))
            value = value + kl_coefficient * kl
        compared = scores.distillation
        if compared:
            divergence = s.distill_coefficient * reduce(compared.divergence)
            value = divergence if s.only_distills else value + divergence
        means = [token_mean(x) for x in (scores.entropy, terms.approx_kl, terms.clipped)]
        of_teachers = [token_mean(x) for x in compared] + self._of_teachers(microbatch, mask, counts, compared)
        kl = kl.detach().to(means[0])
        return value, torch.stack([value.detach().double(), *means, kl, *optional, *of_teachers])

    def _policy_tokens(self, logprobs: Tensor, old_logprobs: Tensor, microbatch: Batch, mask: Tensor) -> PolicyTokens:
        # Values at tokens without a loss must not reach a gradient, not even as 0 · inf.
        old, rollout, advantages = (
            x.masked_fill(~mask, 0.0) for x in (old_logprobs, microbatch.rollout_logprobs, microbatch.advantages)
        )
        return PolicyTokens(
            logprobs=logprobs,
            old_logprobs=old,
            advantages=advantages,
            response_mask=mask,
            cu_seqlens=microbatch.cu_seqlens,
            rollout_logprobs=rollout,
            selected=microbatch.selected,
        )

    def _of_teachers(
        self, microbatch: Batch, mask: Tensor, counts: Tensor, compared: tuple[Tensor, ...]
    ) -> list[Tensor]:
        masks, tokens = masks_by_teacher(microbatch, mask, self.teachers), counts[2 : 2 + len(self.teachers)]
        return [
            masked_sum(x.detach().double(), of_teacher) / count.clamp(min=1)
            for of_teacher, count in zip(masks, tokens, strict=True)
            for x in compared
        ]

    def _correct(self, batch: Batch, mask: Tensor) -> Tensor:
        return mask & broadcast_to_tokens(batch.correct, batch.response_mask, batch.cu_seqlens)

    def _weights(self, old_logprobs: Tensor, microbatch: Batch) -> Tensor:
        """[T] of the rollout correction. Those of a response count all of its tokens, rejected ones, too."""
        rollout, mask = microbatch.rollout_logprobs, microbatch.response_mask
        weights = correction_weights(old_logprobs, rollout, mask, microbatch.cu_seqlens, self.correction)
        return weights / self.weight_mean

    def local_counts(self, minibatch: Batch, mask: Tensor) -> Tensor:
        """[2 + K] this replica's `aggregation.local_counts` of a mini-batch, and the tokens of each of K teachers; with
        the loss of correct responses their tokens, too."""
        counts = [local_counts(mask, minibatch.cu_seqlens), token_counts(minibatch, mask, self.teachers)]
        if NLL in self.options:
            counts.append(self._correct(minibatch, mask).sum().double().view(1))
        return torch.cat(counts)

    def metric_counts(self, counts: Tensor) -> Tensor:
        """[M] what each metric of a mini-batch is a mean over: tokens, or for losses sequences, too."""
        tokens, of_losses = counts[0], counts[0 if self.settings.loss_aggregation == "token-mean" else 1]
        optional = [counts[-1] if name == NLL else tokens for name in self.options]
        of_teachers = counts[2 : 2 + len(self.teachers)].repeat_interleave(len(DISTILL_NAMES))
        compared = [tokens] * (len(self.names) - len(METRIC_NAMES) - len(optional) - len(of_teachers))
        means = torch.stack([of_losses, tokens, tokens, tokens, of_losses, *optional, *compared])
        return torch.cat([means, of_teachers])
