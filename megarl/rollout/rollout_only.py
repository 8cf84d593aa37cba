"""What `--debug-rollout-only` has instead of training: the responses of each step are scored and measured."""

import torch

from megarl.comm.step_batch import StepBatch
from megarl.roles.loss_mask import valid_sequences
from megarl.rollout.batcher import RolloutBatcher


class ScoringBatcher(RolloutBatcher):
    """Generates the batch of each step and scores it; hands nothing on, so that nothing is trained."""

    def generate(self, step: int) -> None:
        """Generates a step's batch and sets its metrics `rollout/…` and `reward/…`. Collective."""
        version = self.partial_rollouts.version
        batch = super().generate(step)
        self.partial_rollouts.version = version  # the policy stays the same
        if batch is not None:
            batch.dispatch(self.reward.name)
            self.reward.score(batch)
            self.metrics |= self._batch_metrics(batch)

    def _batch_metrics(self, step_batch: StepBatch) -> dict[str, float]:
        """Metrics of the step's batch, named as in training; {} outside the reward role, whose collective it is."""
        batch, role_groups = step_batch[self.reward.name], self.mesh[self.reward.name]
        if not role_groups.is_member:
            return {}
        valid = valid_sequences(batch, self.settings)
        scores = batch.scores.double()[valid]
        counts = batch.response_mask.sum(), batch.finished[valid].sum(), batch.correct[valid].sum(), batch.lengths.sum()
        sums = torch.stack([valid.sum(), scores.sum(), scores.square().sum(), *counts]).double()
        sequences, total, squares, generated, finished, correct, tokens = role_groups.dp_all_reduce(sums).tolist()
        n = max(sequences, 1.0)  # 0: every episode failed
        return {
            "reward/mean": total / n,
            "reward/std": max(squares / n - (total / n) ** 2, 0.0) ** 0.5,
            "reward/accuracy": correct / n,
            "rollout/response_length_mean": generated / n,
            "rollout/finished_fraction": finished / n,
            "perf/tokens": int(tokens),
        }
