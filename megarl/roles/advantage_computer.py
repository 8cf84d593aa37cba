"""Computes advantages and returns on the actor's replicas, and controls the KL coefficient."""

import torch
from torch import Tensor

from megarl.algorithms.advantages import token_rewards
from megarl.algorithms.estimators import AdvantageOptions, Estimator, StepData
from megarl.algorithms.kl import REFERENCE_LOG_RATIO_LIMIT, AdaptiveKLController, FixedKLController, kl_estimate
from megarl.algorithms.packed import sums_by_sequence
from megarl.arguments import Settings
from megarl.batch import Batch
from megarl.comm.role_mesh import RoleGroups
from megarl.comm.step_batch import ACTOR, StepBatch
from megarl.observe.timers import Timers
from megarl.roles.loss_mask import masked_tokens


class AdvantageComputer:
    """Token rewards with a KL penalty, then advantages by the chosen estimator."""

    def __init__(self, settings: Settings, estimator: Estimator, role_groups: RoleGroups, timers: Timers):
        self.settings, self.estimator, self.role_groups, self.timers = settings, estimator, role_groups, timers
        s, self.metrics = settings, {}
        whiten = estimator.whiten if s.whiten_advantages is None else s.whiten_advantages
        self.options = AdvantageOptions(s.gamma, s.gae_lambda, s.group_std, whiten)
        self.controller: FixedKLController | AdaptiveKLController = FixedKLController(s.kl_coefficient)
        if s.kl_controller == "adaptive":
            self.controller = AdaptiveKLController(s.kl_coefficient, s.kl_target, s.kl_horizon)

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
            batch.advantages, returns = self.estimator.function(self._step_data(batch, step_batch.count), self.options)
            if returns is not None:
                batch.returns = returns

    def _step_data(self, batch: Batch, count: int) -> StepData:
        """The estimator's inputs; per-sequence sums come from all replicas, exactly: each is summed with zeros."""
        rewards = self._token_rewards(batch)
        baselines = torch.zeros_like(batch.scores) if batch.baseline_scores is None else batch.baseline_scores
        step_sums = torch.zeros(count, 4, dtype=torch.float64, device=rewards.device)
        totals = sums_by_sequence(rewards.double(), batch.response_mask, batch.cu_seqlens)
        lengths = batch.response_lengths.double()
        raw_scores = torch.where(lengths > 0, batch.scores.to(rewards).double(), 0.0)  # as `token_rewards` reads them
        step_sums[batch.sequence_ids] = torch.stack([totals, raw_scores, lengths, baselines.double()], dim=1)
        step_sums = self.role_groups.dp_all_reduce(step_sums)
        return StepData(
            scores=step_sums[:, 0],
            raw_scores=step_sums[:, 1],
            groups=torch.arange(count, device=rewards.device) // self.settings.samples_per_prompt,
            response_lengths=step_sums[:, 2].long(),
            baselines=None if batch.baseline_scores is None else step_sums[:, 3],
            sequence_ids=batch.sequence_ids,
            token_rewards=rewards,
            values=batch.values,
            response_mask=batch.response_mask,
            cu_seqlens=batch.cu_seqlens,
            total=self.role_groups.dp_all_reduce,
        )

    def _token_rewards(self, batch: Batch) -> Tensor:
        beta, penalty = self.kl_coefficient, torch.zeros_like(batch.rollout_logprobs)
        if self.settings.kl_in == "reward" and beta > 0:
            logprobs = batch.logprobs, batch.reference_logprobs
            penalty = kl_estimate(*logprobs, self.settings.kl_estimator, REFERENCE_LOG_RATIO_LIMIT)
        return token_rewards(batch.scores, penalty, beta, batch.response_mask, batch.cu_seqlens)

    def update_kl_coefficient(self, step_batch: StepBatch):
        """Adapts β to the KL of the step and sets the step's metrics; called when all log-probs are known."""
        if not self.role_groups.is_member:
            return
        self.metrics, kl, sequences = self._step_metrics(step_batch)
        if kl is not None:
            self.controller.update(kl, sequences)

    def _step_metrics(self, step_batch: StepBatch) -> tuple[dict[str, float], float | None, int]:
        """(metrics, mean KL per response or None without a reference, sequences). A collective of the actor."""
        batch, scores = step_batch[ACTOR], step_batch[ACTOR].scores.double()
        mask, kl = batch.response_mask, torch.zeros_like(batch.logprobs)
        if batch.reference_logprobs is not None:
            kl = (batch.logprobs - batch.reference_logprobs).masked_fill(~mask, 0.0)
        sums = torch.stack([
            torch.tensor(len(batch), device=scores.device), scores.sum(), scores.square().sum(), kl.double().sum(),
            mask.sum(), batch.finished.sum(), batch.correct.sum(), batch.lengths.sum(),
            batch.entropy.double()[mask].sum(),
        ]).double()  # fmt: skip
        sums = self.role_groups.dp_all_reduce(sums).tolist()
        n, total, squares, kl_sum, generated, finished, correct, tokens, entropy = sums
        metrics = {
            "reward/mean": total / n,
            "reward/std": max(squares / n - (total / n) ** 2, 0.0) ** 0.5,
            "reward/accuracy": correct / n,
            "rollout/response_length_mean": generated / n,
            "rollout/finished_fraction": finished / n,
            "rollout/entropy": entropy / max(generated, 1.0),
            "perf/tokens": int(tokens),
        }
        if self.settings.mask_truncated_responses:
            masked = float(self.role_groups.dp_all_reduce(masked_tokens(batch, self.settings)))
            metrics["rollout/masked_fraction"] = masked / max(generated, 1.0)
        if batch.reference_logprobs is None:
            return metrics, None, int(n)
        metrics |= {"kl/reference": kl_sum / n, "kl/coefficient": self.kl_coefficient}
        return metrics, kl_sum / n, int(n)
