"""The actor: recomputes the log-probs of what the policy wrote, and learns from the experience."""

import functools

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.algorithms.aggregation import local_counts
from megarl.algorithms.policy_loss import PolicyLoss
from megarl.algorithms.rollout_correction import correction_report, correction_sums
from megarl.arguments import RoleSettings, Settings
from megarl.batch import Batch
from megarl.comm import microbatches as mb
from megarl.comm.role_mesh import RoleGroups
from megarl.comm.step_batch import StepBatch
from megarl.mcore.model.forward_pass import TokenScores, token_scores
from megarl.observe.timers import Timers
from megarl.roles.actor_loss import METRIC_NAMES, ActorLoss
from megarl.roles.trainable_model import TrainableModel
from megarl.router_replay import probe


class Actor:
    """The policy."""

    name = "actor"

    def __init__(
        self, settings: Settings, role: RoleSettings, role_groups: RoleGroups, vocab_size: int, policy_loss: PolicyLoss,
        timers: Timers,
    ):  # fmt: skip
        self.settings, self.role_groups, self.timers, self.vocab_size = settings, role_groups, timers, vocab_size
        self.objective = ActorLoss(settings, policy_loss)
        self.trainable_model = None
        self.metrics: dict[str, float] = {}
        if role_groups.is_member:
            self.trainable_model = TrainableModel(role, role_groups, vocab_size, settings.updates_per_step)
            self.trainable_model.offload.timed = functools.partial(timers.phase, self.name, "offload")

    def old_logprobs(self, step_batch: StepBatch):
        """Fills `logprobs` (π_old) and `entropy` by the training forward.

        It runs the very micro-batches of the first epoch, so that before any update each ratio is exactly 1. Where the
        step's only update sees them anyhow, it gives them, and this pass is left out.
        """
        if not self.role_groups.is_member:
            return
        if self._probes(step_batch.step):
            with self.timers.phase(self.name, "probe"):
                self.metrics |= probe.logprob_gaps(self.trainable_model, step_batch[self.name], self._forward)
        if self._updates_on_policy(step_batch):
            return
        with self.timers.phase(self.name, "logprobs"):
            batch, results, passed = step_batch[self.name], [], []
            for ids in mb.minibatches_of_step(self.settings, step_batch.count, step_batch.step, epoch=0):
                parts = self.trainable_model.microbatches(batch, mb.positions_of(batch, ids))
                results += self.trainable_model.forward_only(parts, self._forward)
                passed += parts
            self._set_old_logprobs(batch, [(scores.logprobs, scores.entropy, places) for scores, places in results])
            if self.settings.router_replay == "old-logprob":
                self.trainable_model.routes.table = self.trainable_model.routes.record(batch, passed)

    def passes_of_step(self, step_batch: StepBatch) -> list[Tensor]:
        """Places in this lane's batch of the sequences of each pass of a step."""
        ids = [probe.probed_ids()] if self._probes(step_batch.step) else []
        for epoch in range(self.settings.ppo_epochs):
            ids += mb.minibatches_of_step(self.settings, step_batch.count, step_batch.step, epoch)
        return [mb.positions_of(step_batch[self.name], found) for found in ids]

    def _probes(self, step: int) -> bool:
        return self.settings.router_probe_interval > 0 and step % self.settings.router_probe_interval == 0

    def _updates_on_policy(self, step_batch: StepBatch) -> bool:
        """Whether the step's one update gives the log-probs of the policy that the step began with."""
        return self.settings.updates_on_policy(step_batch.count) and step_batch.step > self.settings.critic_warmup_steps

    def _set_old_logprobs(self, batch: Batch, results: list[tuple[Tensor, Tensor, Tensor]]):
        """Writes (log-probs, entropy, places) of the first pass down, and compares it with the rollout."""
        mb.write_back(batch, "logprobs", [(logprobs, places) for logprobs, _, places in results])
        mb.write_back(batch, "entropy", [(entropy, places) for _, entropy, places in results])
        gap = (batch.rollout_logprobs - batch.logprobs).abs().masked_fill(~batch.response_mask, 0.0).double()
        largest = gap.amax() if len(gap) else gap.sum()
        sums, maxima = correction_sums(
            batch.logprobs, batch.rollout_logprobs, batch.response_mask, batch.cu_seqlens, self.objective.correction
        )
        maxima = torch.cat([largest.view(1), maxima])
        dist.all_reduce(maxima, op=dist.ReduceOp.MAX, group=self.role_groups.pg_collection.dp)
        measured = torch.cat([torch.stack([gap.sum(), batch.response_mask.sum().double()]), sums])
        total, count, *_ = measured = self.role_groups.dp_all_reduce(measured)
        self.metrics |= {
            "rollout/logprob_gap_max": float(maxima[0]),
            "rollout/logprob_gap_mean": float(total / count.clamp(min=1)),
            **correction_report(measured[2:], maxima[1:]),
        }

    def _forward(self, network, part) -> TokenScores:
        return token_scores(
            network,
            part.tokens,
            part.host_metadata.lengths,
            self.settings.temperature,
            self.vocab_size,
            part.routing,
            part.host_metadata.response_mask,
            part.host_metadata.shared,
        )

    def update(self, step_batch: StepBatch, kl_coefficient: float):
        """Learns from `advantages` for `--ppo-epochs` epochs of mini-batches; rests while the critic warms up.

        `kl_coefficient` is β where the KL stands in the loss.
        """
        if not self.role_groups.is_member:
            return
        if step_batch.step > self.settings.critic_warmup_steps:
            self._run_epochs(step_batch, kl_coefficient)
        self.metrics |= self.trainable_model.routes.metrics("router", self.settings.router_replay != "none")
        self.metrics |= self.trainable_model.offload.metrics(self.name)

    def _run_epochs(self, step_batch: StepBatch, kl_coefficient: float):
        with self.timers.phase(self.name, "update"):
            batch, results, first = step_batch[self.name], [], self._updates_on_policy(step_batch)
            with self.trainable_model.on_device_for_updates():
                for epoch in range(self.settings.ppo_epochs):
                    for ids in mb.minibatches_of_step(self.settings, step_batch.count, step_batch.step, epoch):
                        results.append(self._update(batch, mb.positions_of(batch, ids), kl_coefficient, first))
            self._summarize(results)

    def _update(self, batch: Batch, places: Tensor, kl_coefficient: float, first: bool):
        """One update; `first`: no log-probs are known yet, it takes them down."""
        chosen = batch.select(places)
        counts = self.role_groups.dp_all_reduce(local_counts(chosen.response_mask, chosen.cu_seqlens))

        def loss(scores, part):
            old_logprobs = scores.logprobs.detach() if first else part.logprobs
            value, sums = self.objective(scores, part, old_logprobs, counts, kl_coefficient)
            return value, (sums, scores.logprobs.detach(), scores.entropy.detach()) if first else (sums,)

        parts = self.trainable_model.microbatches(batch, places)
        results, applied, norm = self.trainable_model.update(parts, self._forward, loss)
        if first:
            self._set_old_logprobs(
                batch, [(*found[1:], where) for found, (_, where) in zip(results, parts, strict=True)]
            )
        return self.role_groups.dp_all_reduce(torch.stack([found[0] for found in results]).sum(0)), applied, norm

    def _summarize(self, results):
        means = torch.stack([sums for sums, _, _ in results]).mean(0).tolist()
        self.metrics |= dict(zip(METRIC_NAMES, means, strict=True))
        if self.settings.kl_in == "reward":
            del self.metrics["actor/kl_loss"]
        self.metrics |= {
            "actor/ppo_kl_first": results[0][0][METRIC_NAMES.index("actor/ppo_kl")].item(),
            "actor/grad_norm": sum(norm for _, _, norm in results) / len(results),
            "actor/learning_rate": self.trainable_model.learning_rate(),
            "actor/updates_skipped": sum(not applied for _, applied, _ in results),
        }
