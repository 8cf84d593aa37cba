"""The critic: state values, trained with the clipped value loss."""

import functools

import torch

from megarl.algorithms.advantages import clipped_value_loss, explained_variance, explained_variance_moments
from megarl.algorithms.aggregation import masked_sum, token_mean
from megarl.arguments import RoleSettings, Settings
from megarl.batch import Batch
from megarl.comm import microbatches as mb
from megarl.comm.role_mesh import RoleGroups
from megarl.comm.step_batch import StepBatch
from megarl.observe.alarms import update_check
from megarl.observe.timers import Timers
from megarl.roles.loss_mask import is_all_masked, loss_mask
from megarl.roles.passes import token_values
from megarl.roles.trainable_model import TrainableModel, Update

METRIC_NAMES = ("critic/loss", "critic/clip_fraction")


class Critic:
    """A transformer with a scalar head; only for advantage estimators that need values."""

    name = "critic"

    def __init__(
        self, settings: Settings, role: RoleSettings | None, role_groups: RoleGroups, vocab_size: int, timers: Timers
    ):
        self.settings, self.role_groups = settings, role_groups
        self.timers, self.accepts = timers, update_check(settings.alarms, self.name)
        self.trainable_model = None
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
            mb.write_back(batch, "values", self.trainable_model.forward_only(microbatches, token_values))

    def update(self, step_batch: StepBatch):
        """Trains on `returns` for `--ppo-epochs` epochs of mini-batches."""
        if not self.role_groups.is_member:
            return
        with self.timers.phase(self.name, "update"):
            batch = step_batch[self.name]
            values, returns = batch.need("values"), batch.need("returns")
            moments = explained_variance_moments(values, returns, batch.response_mask)
            self.metrics = {"critic/explained_variance": explained_variance(self.role_groups.dp_all_reduce(moments))}
            passes = mb.updates_of_step(self.settings, batch, step_batch.groups, step_batch.step)
            with self.trainable_model.present_for_updates():
                updates = [self._update(batch, positions) for positions in passes]
            self.metrics |= self.trainable_model.update_metrics(updates, METRIC_NAMES, self.name)
            self.metrics |= self.trainable_model.router_state.metrics("critic/router")
            self.metrics |= self.trainable_model.offload.metrics(self.name)

    def _update(self, batch: Batch, positions: torch.Tensor) -> Update:
        minibatch = batch.only("response_mask", "finished").select(positions)
        count = self.role_groups.dp_all_reduce(loss_mask(minibatch, self.settings).sum().double())
        has_loss = not is_all_masked(count, self.settings)

        def loss(values, microbatch):
            mask = loss_mask(microbatch, self.settings)
            clip_range, targets = self.settings.value_clip_range, microbatch.returns
            losses, is_clipped = clipped_value_loss(values, microbatch.values, targets, clip_range)
            value = token_mean(losses, mask, count)
            clipped = masked_sum(is_clipped.double(), mask) / count.clamp(min=1)
            return value, (torch.stack([value.detach().double(), clipped]),)

        microbatches = self.trainable_model.microbatches(batch, positions)
        _, update = self.trainable_model.checked_update(
            microbatches, token_values, loss, METRIC_NAMES, count, self.accepts, has_loss
        )
        return update
