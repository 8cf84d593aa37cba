"""Computes advantages and returns on the actor's replicas, and controls the KL coefficient."""

import torch
from torch import Tensor

from megarl.algorithms import PREFERENCE_LOSSES
from megarl.algorithms.advantages import token_rewards
from megarl.algorithms.estimators import AdvantageOptions, Estimator, StepData
from megarl.algorithms.kl import REFERENCE_LOG_RATIO_LIMIT, KLController, kl_estimate
from megarl.algorithms.packed import sums_by_sequence
from megarl.arguments import Settings
from megarl.batch import Batch
from megarl.comm.role_mesh import RoleGroups
from megarl.comm.step_batch import ACTOR, StepBatch
from megarl.flags.distillation import REWARD
from megarl.flags.preferences import preference_options
from megarl.groups import PromptGroups
from megarl.observe.timers import Timers
from megarl.rewards import expression
from megarl.roles.loss_mask import masked_tokens
from megarl.roles.reward_metrics import step_metrics
from megarl.roles.teacher import masks_by_teacher, measured_apart


class AdvantageComputer:
    """Token rewards with a KL penalty, then advantages by the chosen estimator.

    What an environment gives for a turn is earned at the turn's last token, the rest of the score at the last token of
    the response. An episode whose environment failed is in a group of its own, so it is in no other episode's baseline.
    """

    def __init__(self, settings: Settings, estimator: Estimator, role_groups: RoleGroups, timers: Timers):
        self.settings, self.estimator = settings, estimator
        self.role_groups, self.timers = role_groups, timers
        s, self.metrics = settings, {}
        whiten = estimator.whiten if s.whiten_advantages is None else s.whiten_advantages
        credit_turns = s.max_turns if s.credit == "turns" else 0
        self.options = AdvantageOptions(
            gamma=s.gamma,
            lam=s.gae_lambda,
            length_alpha=s.gae_length_alpha,
            group_std=s.group_std,
            whiten=whiten,
            credit_turns=credit_turns,
            preference=(PREFERENCE_LOSSES[s.preference_loss], preference_options(s)),
        )
        weights = {term.name: term.weight for term in expression.terms_of_run(s) if term.weight}
        self._turn_weight = weights.get(expression.ENVIRONMENT, 0.0)
        self._has_other_rewards = bool(s.overlong_buffer or weights.keys() - {expression.ENVIRONMENT})
        target = s.kl_target if s.kl_controller == "adaptive" else None
        self.controller = KLController(s.kl_coefficient, target, s.kl_horizon)

    @property
    def kl_coefficient(self) -> float:
        """β of the present step."""
        return self.controller.coefficient

    def compute(self, step_batch: StepBatch):
        """Fills `advantages`, and with a critic `returns`, from scores, log-probs and values."""
        if not self.role_groups.is_member:
            return
        with self.timers.phase(ACTOR, "advantages"):
            batch = step_batch[ACTOR]
            step = self._step_data(batch, step_batch.groups)
            (batch.advantages, returns), metrics = self.estimator.run(step, self.options)
            self.metrics |= metrics
            if self.settings.distill == REWARD:  # minus a sample of the reverse KL, which is not whitened
                difference = (batch.teacher_logprobs - batch.logprobs).masked_fill(~batch.response_mask, 0.0)
                batch.advantages = batch.advantages + self.settings.distill_coefficient * difference
            if returns is not None:
                batch.returns = returns

    def _step_data(self, batch: Batch, step_groups: PromptGroups) -> StepData:
        """The estimator's inputs; per-sequence sums come from all replicas, exactly: each is summed with zeros."""
        rewards = self._token_rewards(batch, self.kl_coefficient)
        baselines = torch.zeros_like(batch.scores) if batch.baseline_scores is None else batch.baseline_scores
        totals = sums_by_sequence(rewards.double(), batch.response_mask, batch.cu_seqlens)
        lengths = batch.response_lengths.double()
        raw_scores = torch.where(lengths > 0, batch.scores.to(rewards).double(), 0.0)  # as `token_rewards` reads them
        columns = [totals, raw_scores, lengths, baselines.double()]
        if reads_logprobs := "logprobs" in self.estimator.needs:
            columns += [self._sums(batch, batch.logprobs), self._sums(batch, batch.reference_logprobs)]
        parts, first_part = self._parts(batch, raw_scores), len(columns)
        columns += parts
        step_sums = torch.zeros(step_groups.count, len(columns), dtype=torch.float64, device=rewards.device)
        step_sums[batch.sequence_ids] = torch.stack(columns, dim=1)
        step_sums = self.role_groups.dp_all_reduce(step_sums)
        # Filled on the device, where a copy would wait.
        weights = [step_sums.new_full((), weight) for weight in self.settings.part_weights or (1.0,)]
        return StepData(
            scores=step_sums[:, 0],
            raw_scores=step_sums[:, 1],
            groups=self._groups(step_groups, step_sums[:, 2]),
            response_lengths=step_sums[:, 2].long(),
            baselines=None if batch.baseline_scores is None else step_sums[:, 3],
            sequence_ids=batch.sequence_ids,
            token_rewards=rewards,
            values=batch.values,
            response_mask=batch.response_mask,
            cu_seqlens=batch.cu_seqlens,
            total=self.role_groups.dp_all_reduce,
            raw_token_rewards=self._token_rewards(batch, 0.0) if self.options.credit_turns else None,
            logprobs=step_sums[:, 4] if reads_logprobs else None,
            reference_logprobs=step_sums[:, 5] if reads_logprobs else None,
            parts=step_sums[:, first_part:] if parts else None,
            token_logprobs=batch.logprobs,
            squares=batch.squares,
            part_weights=torch.stack(weights) if parts else None,
        )

    def _parts(self, batch: Batch, raw_scores: Tensor) -> list[Tensor]:
        """[N] float64 of each part of the reward, if the estimator reads parts; of a single one the score."""
        if "parts" not in self.estimator.needs:
            return []
        if batch.reward_parts is None:
            return [raw_scores]
        has_tokens = batch.response_lengths > 0
        return [torch.where(has_tokens, part.double(), 0.0) for part in batch.reward_parts.unbind(1)]

    def _sums(self, batch: Batch, logprobs: Tensor | None) -> Tensor:
        if logprobs is None:
            return torch.zeros_like(batch.scores, dtype=torch.float64)
        return sums_by_sequence(logprobs.double(), batch.response_mask, batch.cu_seqlens)

    def _groups(self, step_groups: PromptGroups, response_lengths: Tensor) -> Tensor:
        """[S] int64: the prompt of each response; those without tokens are alone in groups after those."""
        responses = torch.arange(len(response_lengths), device=response_lengths.device)
        groups = step_groups.of(responses)
        if not self.settings.can_lose_responses:
            return groups
        return torch.where(response_lengths > 0, groups, len(responses) + responses)

    def _token_rewards(self, batch: Batch, beta: float) -> Tensor:
        """[T] reward of each token, with a KL penalty of `beta` if it is in the reward."""
        penalty = torch.zeros_like(batch.rollout_logprobs)
        if self.settings.kl_in == "reward" and beta > 0:
            logprobs, reference = batch.need("logprobs"), batch.need("reference_logprobs")
            penalty = kl_estimate(logprobs, reference, self.settings.kl_estimator, REFERENCE_LOG_RATIO_LIMIT)
        mask, cu_seqlens = batch.response_mask, batch.cu_seqlens
        if batch.turn_rewards is None:
            return token_rewards(batch.need("scores"), penalty, beta, mask, cu_seqlens)
        of_turns = (self._turn_weight * batch.turn_rewards).masked_fill(~mask, 0.0)
        return token_rewards(self._rest_of_scores(batch), penalty, beta, mask, cu_seqlens) + of_turns

    def _rest_of_scores(self, batch: Batch) -> Tensor:
        """[N] what a score has besides the environment's rewards; exactly 0 if that is nothing."""
        if not self._has_other_rewards:
            return torch.zeros_like(batch.scores)
        sums = sums_by_sequence(batch.turn_rewards.double(), batch.response_mask, batch.cu_seqlens)
        of_turns = self._turn_weight * sums
        return torch.where(of_turns.float() == batch.scores, 0.0, batch.scores.double() - of_turns).float()

    def update_kl_coefficient(self, step_batch: StepBatch):
        """Adapts β to the KL of the step and sets the step's metrics; called when all log-probs are known."""
        if not self.role_groups.is_member:
            return
        metrics, kl, sequences = self._step_metrics(step_batch)
        self.metrics |= metrics
        if kl is not None:
            self.controller.update(kl, sequences)

    def _teacher_metrics(self, batch: Batch) -> dict[str, float]:
        """Means over the step's response tokens, and over those of each of several teachers. A collective of the
        actor."""
        mask, teachers = batch.response_mask, measured_apart(self.settings)
        values = [x.double() for x in (batch.teacher_logprobs, batch.logprobs - batch.teacher_logprobs)]
        masks = mask, *masks_by_teacher(batch, mask, teachers)
        sums = [
            torch.stack([*(x.masked_fill(~of_teacher, 0.0).sum() for x in values), of_teacher.sum().double()])
            for of_teacher in masks
        ]
        totals = self.role_groups.dp_all_reduce(torch.stack(sums)).tolist()
        metrics = {}
        for suffix, (*found, count) in zip(("", *(f"/{name}" for name in teachers)), totals, strict=True):
            if count or not suffix:
                means = [total / max(count, 1.0) for total in found]
                metrics |= {f"teacher/logprob{suffix}": means[0], f"distill/reverse_kl{suffix}": means[1]}
        return metrics

    def _step_metrics(self, step_batch: StepBatch) -> tuple[dict[str, float], float | None, int]:
        """(metrics, mean KL per response or None without a reference, sequences). A collective of the actor."""
        batch, mask = step_batch[ACTOR], step_batch[ACTOR].response_mask
        kl = torch.zeros_like(batch.logprobs)
        if batch.reference_logprobs is not None:
            kl = (batch.logprobs - batch.reference_logprobs).masked_fill(~mask, 0.0)
        entropy = torch.zeros_like(kl) if batch.entropy is None else batch.entropy
        kl_sum, entropy_sum = kl.double().sum(), entropy.double()[mask].sum()
        metrics, sequences, of_all = step_metrics(
            batch, self.settings, self.role_groups, kl_sum, entropy_sum, mask.sum(), masked_tokens(batch, self.settings)
        )
        kl_sum, entropy, generated, masked = of_all
        if batch.entropy is not None:
            metrics["rollout/entropy"] = entropy / max(generated, 1.0)
        if batch.teacher_logprobs is not None:
            metrics |= self._teacher_metrics(batch)
        if self.settings.mask_truncated_responses:
            metrics["rollout/masked_fraction"] = masked / max(generated, 1.0)
        if batch.reference_logprobs is None:
            return metrics, None, sequences
        mean_kl = kl_sum / max(sequences, 1)
        metrics |= {"kl/reference": mean_kl, "kl/coefficient": self.kl_coefficient}
        return metrics, mean_kl, sequences
