"""The critic: state values, trained with the clipped value loss."""

import functools

import torch

from megarl.algorithms.aggregation import masked_sum, token_mean
from megarl.algorithms.statistics import explained_variance, explained_variance_moments
from megarl.algorithms.value_loss import clipped_value_loss
from megarl.arguments import RoleSettings, Settings
from megarl.batch import Batch
from megarl.comm import microbatches as mb
from megarl.comm.role_mesh import RoleGroups
from megarl.comm.step_batch import StepBatch
from megarl.mcore.model import forward_pass
from megarl.observe.alarms import UpdateCheck
from megarl.observe.timers import Timers
from megarl.roles.loss_mask import is_all_masked, loss_mask
from megarl.roles.trainable_model import TrainableModel

METRIC_NAMES = ("critic/loss", "critic/clip_fraction")


class Critic:
    """A transformer with a scalar head; only for advantage estimators that need values."""

    name = "critic"
    outputs: tuple[str, ...] = ("values",)
    targets: tuple[str, ...] = ("returns",)

    def __init__(
        self, settings: Settings, role: RoleSettings | None, role_groups: RoleGroups, vocab_size: int, timers: Timers
    ):
        self.settings, self.role_groups, self.timers = settings, role_groups, timers
        self.trainable_model, self.update_check = None, UpdateCheck(settings.alarms, self.name)
        self.metrics: dict[str, float] = {}
        if role_groups.is_member:
            self.trainable_model = TrainableModel(
                role, role_groups, vocab_size, settings.updates_per_step, value_head=True
            )
            self.trainable_model.offload.timed = functools.partial(timers.phase, self.name, "offload")

    def values(self, step_batch: StepBatch):
        """Fills `values` (V_old): the value of the state before each token, before this step's updates."""
        batch = step_batch[self.name]
        if batch is None:
            return
        with self.timers.phase(self.name, "values"):
            microbatches = self.trainable_model.microbatches(batch, torch.arange(len(batch)))
            mb.write_back(batch, "values", self.trainable_model.forward_only(microbatches, self._forward))

    def _forward(self, chunk, microbatch: Batch) -> torch.Tensor:
        host = microbatch.host_metadata
        return forward_pass.token_values(chunk, microbatch.tokens, host.lengths, microbatch.routing, host.shared)

    def update(self, step_batch: StepBatch):
        """Trains on `returns` for `--ppo-epochs` epochs of mini-batches."""
        if not self.role_groups.is_member:
            return
        with self.timers.phase(self.name, "update"):
            batch = step_batch[self.name]
            moments = explained_variance_moments(batch.values, batch.returns, batch.response_mask)
            self.metrics = {"critic/explained_variance": explained_variance(self.role_groups.dp_all_reduce(moments))}
            results = []
            with self.trainable_model.present_for_updates():
                for epoch in range(self.settings.ppo_epochs):
                    for ids in mb.minibatches_of_step(self.settings, step_batch.count, step_batch.step, epoch):
                        results.append(self._update(batch, mb.positions_of(batch, ids)))
            self._summarize(results)

    def _update(self, batch: Batch, positions: torch.Tensor):
        """One update: (metric sums, whether it was skipped, gradient norm)."""
        count = self.role_groups.dp_all_reduce(loss_mask(batch.select(positions), self.settings).sum().double())
        has_loss = not is_all_masked(count, self.settings)

        def loss(values, microbatch):
            mask = loss_mask(microbatch, self.settings)
            terms = clipped_value_loss(values, microbatch.values, microbatch.returns, self.settings.value_clip_range)
            value = token_mean(terms.loss, mask, count)
            clipped = masked_sum(terms.clipped.double(), mask) / count.clamp(min=1)
            return value, torch.stack([value.detach().double(), clipped])

        sums = None

        def accepts(results: list, norm: float) -> bool:
            nonlocal sums
            sums = self.role_groups.dp_all_reduce(torch.stack(results).sum(0))
            metrics = dict(zip(METRIC_NAMES, sums.tolist(), strict=True)) | {"critic/grad_norm": norm}
            return has_loss and self.update_check.accepts(metrics["critic/loss"], metrics)

        microbatches = self.trainable_model.microbatches(batch, positions)
        _, applied, norm = self.trainable_model.update(microbatches, self._forward, loss, accepts)
        return sums, has_loss and not applied, norm

    def _summarize(self, results):
        means = torch.stack([sums for sums, _, _ in results]).mean(0).tolist()
        self.metrics |= dict(zip(METRIC_NAMES, means, strict=True))
        self.metrics |= {
            "critic/grad_norm": sum(norm for _, _, norm in results) / len(results),
            "critic/learning_rate": self.trainable_model.learning_rate(),
            "critic/updates_skipped": sum(skipped for _, skipped, _ in results),
            **self.trainable_model.router_state.metrics("critic/router"),
            **self.trainable_model.offload.metrics(self.name),
        }
