"""What `--debug-rollout-only` has instead of training: the responses of each step are scored and measured."""

from megarl.roles.reward_metrics import step_metrics
from megarl.rollout.batcher import RolloutBatcher


class ScoringBatcher(RolloutBatcher):
    """Generates the batch of each step and scores it; hands nothing on, so that nothing is trained."""

    def generate(self, step: int) -> None:
        """Generates a step's batch and sets its metrics `rollout/…` and `reward/…`. Collective."""
        batch = super().generate(step)
        if batch is not None:
            batch.dispatch(self.reward.name)
            self.reward.score(batch)
            batch.wait_sends()
            if batch[self.reward.name] is not None:
                metrics, _, _ = step_metrics(batch[self.reward.name], self.settings, self.mesh[self.reward.name])
                self.metrics |= metrics
