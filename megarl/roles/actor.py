"""The actor: recomputes the log-probs of responses, and trains the policy on advantages."""

import contextlib
import functools

import torch
from torch import Tensor

from megarl.algorithms.packed import token_sequences
from megarl.algorithms.policy_loss import PolicyLoss, PolicyTokens
from megarl.algorithms.rollout_correction import (
    correction_report,
    correction_sums,
    kept_tokens,
    parse_bounds,
    proximal_logprobs,
    rejection_report,
    rejection_sums,
    staleness_maxima,
    staleness_report,
    staleness_sums,
)
from megarl.algorithms.token_sampling import stream_keys, uniforms
from megarl.arguments import RoleSettings, Settings
from megarl.batch import Batch
from megarl.comm import microbatches as mb
from megarl.comm.role_mesh import RoleGroups
from megarl.comm.step_batch import StepBatch
from megarl.flags.algorithm import INTERPOLATE, RECOMPUTE
from megarl.groups import PromptGroups
from megarl.mcore.model.forward_pass import TokenScores
from megarl.observe.alarms import update_check
from megarl.observe.timers import Timers
from megarl.roles.actor_loss import PPO_KL, ActorLoss
from megarl.roles.loss_mask import actor_mask, is_all_masked
from megarl.roles.passes import policy_scores
from megarl.roles.teacher import TeacherOutput
from megarl.roles.trainable_model import TrainableModel, Update
from megarl.router_replay.router_state import logprob_gaps, probed_ids

FIRST_SELECTION = -2  # random stream of the first update's selection; that of the n-th one is n − 1 below


class Actor:
    """The policy that is trained. `trainable_model` is None on ranks outside the role, and if nothing is trained."""

    name = "actor"

    def __init__(
        self,
        settings: Settings,
        role: RoleSettings,
        role_groups: RoleGroups,
        vocab_size: int,
        policy_loss: PolicyLoss,
        timers: Timers,
    ):
        self.settings, self.role_groups = settings, role_groups
        self.timers, self.vocab_size = timers, vocab_size
        self.loss, self.accepts = ActorLoss(settings, policy_loss), update_check(settings.alarms, self.name)
        self.trainable_model: TrainableModel | None = None
        self.teacher_output: TeacherOutput | None = None  # with `--distill loss`
        self.metrics: dict[str, float] = {}
        if role_groups.is_member and not settings.debug_rollout_only:
            self.trainable_model = TrainableModel(role, role_groups, vocab_size, settings.updates_per_step)
            self.trainable_model.offload.timed = functools.partial(timers.phase, self.name, "offload")
            if settings.ema_decay is not None:
                self.trainable_model.keep_average(settings.ema_decay)

    def old_logprobs(self, step_batch: StepBatch):
        """Fills `logprobs` (π_old) and `entropy` by the training forward.

        It runs the same micro-batches as the first epoch, so that every ratio is exactly 1 before the first update. If
        the step has only one update, that update returns the log-probs, and this pass is skipped; so it is with
        `--old-logprobs`, which takes the rollout's instead.
        """
        if not self.role_groups.is_member:
            return
        if self._should_probe(step_batch.step):
            with self.timers.phase(self.name, "probe"):
                self.metrics |= logprob_gaps(self.trainable_model, step_batch[self.name], self._forward)
        batch = step_batch[self.name]
        if self.settings.old_logprobs != RECOMPUTE:
            batch.logprobs = batch.rollout_logprobs
            return
        if self._updates_on_policy(step_batch):
            return
        with self.timers.phase(self.name, "logprobs"):
            results, of_step = [], []
            forward = functools.partial(self._forward, squares=self.settings.reads_squares)
            for ids in mb.minibatches_of_step(self.settings, step_batch.groups, step_batch.step, epoch=0):
                microbatches = self.trainable_model.microbatches(batch, mb.positions_of(batch, ids))
                results += self.trainable_model.forward_only(microbatches, forward)
                of_step += microbatches
            self._set_old_logprobs(batch, [(scores.logprobs, scores.entropy, at) for scores, at in results])
            if self.settings.reads_squares:
                mb.write_back(batch, "squares", [(scores.squares, at) for scores, at in results])
            if self.settings.router_replay == "old-logprob":
                state = self.trainable_model.router_state
                state.replayed_routes = state.record(batch, of_step)

    def passes_of_step(self, step_batch: StepBatch) -> list[Tensor]:
        """Positions in this replica's batch of the sequences of each pass of a step."""
        batch, step = step_batch[self.name], step_batch.step
        probed = [mb.positions_of(batch, probed_ids())] if self._should_probe(step) else []
        return [*probed, *mb.updates_of_step(self.settings, batch, step_batch.groups, step)]

    def _should_probe(self, step: int) -> bool:
        return self.settings.router_probe_interval > 0 and step % self.settings.router_probe_interval == 0

    def _updates_on_policy(self, step_batch: StepBatch) -> bool:
        """Whether the step has a single update, whose forward gives the old log-probs."""
        s, prompts = self.settings, len(step_batch.groups)
        return s.updates_on_policy(prompts) and step_batch.step > s.critic_warmup_steps

    def _set_old_logprobs(self, batch: Batch, results: list[tuple[Tensor, Tensor, Tensor]]):
        """Fills the batch from [(log-probs, entropy, positions)] of the first pass; measures the gap to the rollout."""
        mb.write_back(batch, "logprobs", [(logprobs, positions) for logprobs, _, positions in results])
        mb.write_back(batch, "entropy", [(entropy, positions) for _, entropy, positions in results])
        self._measure_gap(batch)

    def _measure_gap(self, batch: Batch):
        """Measures how far the rollout's log-probs are from those of the policy before the step."""
        gap = (batch.rollout_logprobs - batch.logprobs).abs().masked_fill(~batch.response_mask, 0.0).double()
        largest = gap.amax() if len(gap) else gap.sum()
        sums, maxima = correction_sums(
            batch.logprobs, batch.rollout_logprobs, batch.response_mask, batch.cu_seqlens, self.loss.correction
        )
        maxima = torch.cat([largest.view(1), maxima])
        self.role_groups.dp_max(maxima)
        measured = torch.cat([torch.stack([gap.sum(), batch.response_mask.sum().double()]), sums])
        measured = self.role_groups.dp_all_reduce(measured)
        total, count = measured[:2]
        report = correction_report(measured[2:], maxima[1:])
        if self.settings.rollout_correction_normalize:
            self.loss.weight_mean = report["correction/applied_mean"] or 1.0
        self.metrics |= {
            "rollout/logprob_gap_max": float(maxima[0]),
            "rollout/logprob_gap_mean": float(total / count.clamp(min=1)),
            **report,
        }
        if batch.staleness is not None:
            self._measure_staleness(batch)

    def _measure_staleness(self, batch: Batch):
        logprobs, rollout, mask, ages = batch.logprobs, batch.rollout_logprobs, batch.response_mask, batch.staleness
        maxima = staleness_maxima(logprobs, rollout, mask, ages)
        self.role_groups.dp_max(maxima)
        sums = staleness_sums(logprobs, rollout, mask, ages, largest=int(maxima[1]))
        sums = self.role_groups.dp_all_reduce(sums)
        self.metrics |= staleness_report(maxima, sums)

    def _forward(self, chunk, microbatch: Batch, squares: bool = False) -> TokenScores:
        return policy_scores(chunk, microbatch, self.settings.temperature, self.vocab_size, squares=squares)

    def _forward_of_update(self, chunk, microbatch: Batch) -> TokenScores:
        s, output = self.settings, self.teacher_output
        teachers = [] if output is None else output.rows(microbatch)
        learner = self.trainable_model.learner(microbatch)
        return policy_scores(chunk, microbatch, s.temperature, self.vocab_size, teachers, s.only_distills, learner)

    def update(self, step_batch: StepBatch, kl_coefficient: float):
        """Trains on `advantages` for `--ppo-epochs` epochs of mini-batches; skipped during critic warm-up.

        `kl_coefficient` is β of a KL term in the loss.
        """
        if not self.role_groups.is_member:
            return
        if step_batch.step > self.settings.critic_warmup_steps:
            self._run_epochs(step_batch, kl_coefficient)
        else:
            self.trainable_model.end_step()
        self.metrics |= self.trainable_model.router_state.metrics("router", self.settings.router_replay != "none")
        self.metrics |= self.trainable_model.offload.metrics(self.name)

    def update_average(self):
        """Moves the moving average of the weights towards the present ones, with `--ema-decay`."""
        if self.settings.ema_decay is not None and self.trainable_model:
            with self.timers.phase(self.name, "average"):
                self.metrics |= self.trainable_model.update_average()

    def averaged(self) -> contextlib.AbstractContextManager:
        """Context in which the policy on this rank, if there is one, is its moving average."""
        return self.trainable_model.averaged() if self.trainable_model else contextlib.nullcontext()

    def _reject(self, batch: Batch):
        """Takes the tokens that break a bound of `--rollout-rejection` out of the actor's loss."""
        bounds = parse_bounds(self.settings.rollout_rejection)
        mask, cu_seqlens = batch.response_mask, batch.cu_seqlens
        kept = [kept_tokens(batch.logprobs, batch.rollout_logprobs, mask, cu_seqlens, bound) for bound in bounds]
        batch.kept = torch.stack(kept).all(0)
        sums = rejection_sums(kept, mask, batch.correct, cu_seqlens)
        self.metrics |= rejection_report(self.role_groups.dp_all_reduce(sums), bounds)

    def _select(self, batch: Batch, positions: Tensor, step: int, number: int):
        """Chooses the tokens of a mini-batch, the `number`-th of the step, that the policy loss treats apart."""
        loss, columns = self.loss.policy_loss, batch.only("logprobs", "rollout_logprobs", "advantages", "response_mask")
        columns.finished, columns.kept = batch.finished, batch.kept
        part = columns.select(positions)
        # No prompt and no other stream has these numbers.
        stream = torch.full_like(part.sequence_ids, FIRST_SELECTION - number)
        keys = stream_keys(self.settings.seed, step, stream, part.sequence_ids)
        sequences = token_sequences(part.response_mask, part.cu_seqlens)
        places = torch.arange(len(sequences), device=sequences.device) - part.cu_seqlens[sequences]
        tokens = PolicyTokens(
            logprobs=part.logprobs,
            old_logprobs=part.logprobs,
            advantages=part.advantages,
            response_mask=actor_mask(part, self.settings),
            cu_seqlens=part.cu_seqlens,
            rollout_logprobs=part.rollout_logprobs,
        )
        drawn = uniforms(keys[sequences], places)
        selected = loss.select(tokens, loss.options, drawn, self.role_groups.dp_all_reduce)
        batch.selected = torch.zeros_like(batch.response_mask)
        batch.selected[batch.token_positions(positions)] = selected

    def _compare(
        self, batch: Batch, positions: Tensor, groups: PromptGroups, advantages: Tensor, is_first: bool
    ) -> Tensor:
        """[T] the advantages of a mini-batch by which the policy loss compares the responses of a group; 0 elsewhere.

        Args:
            groups: of the step.
            advantages: [T] of the estimator.
            is_first: it is the step's first update, in which the policy is still the one before the step.
        """
        loss, at = self.loss.policy_loss, batch.token_positions(positions)
        old = present = torch.zeros_like(batch.rollout_logprobs)  # equal: the ratio is 1
        if not is_first or self.settings.old_logprobs != RECOMPUTE:
            scored, microbatches = batch.only("tokens"), self.trainable_model.microbatches(batch, positions)
            results = self.trainable_model.forward_only(microbatches, self._forward)
            mb.write_back(scored, "logprobs", [(scores.logprobs, where) for scores, where in results])
            old, present = batch.logprobs, scored.logprobs
        part = batch.only("response_mask", "finished", "kept").select(positions)
        tokens = PolicyTokens(
            logprobs=present[at],
            old_logprobs=old[at],
            advantages=advantages[at],
            response_mask=actor_mask(part, self.settings),
            cu_seqlens=part.cu_seqlens,
        )
        numbers, total = groups.of(part.sequence_ids), self.role_groups.dp_all_reduce
        compared = torch.zeros_like(advantages)
        compared[at] = loss.compare(tokens, loss.options, numbers, len(groups), total)
        return compared

    def _run_epochs(self, step_batch: StepBatch, kl_coefficient: float):
        batch, on_policy = step_batch[self.name], self._updates_on_policy(step_batch)
        loss, advantages = self.loss.policy_loss, batch.need("advantages")
        passes = list(mb.updates_of_step(self.settings, batch, step_batch.groups, step_batch.step))
        with self.timers.phase(self.name, "update"):
            if self.settings.rollout_rejection is not None:
                self._reject(batch)
            with self.trainable_model.present_for_updates():
                updates = []
                for number, positions in enumerate(passes):
                    if loss.select is not None:
                        self._select(batch, positions, step_batch.step, number)
                    if loss.compare is not None:
                        batch.advantages = self._compare(batch, positions, step_batch.groups, advantages, not number)
                    progress = number / len(passes)
                    updates.append(self._update(batch, positions, kl_coefficient, on_policy, progress))
            batch.advantages = advantages
            self.metrics |= self.trainable_model.update_metrics(updates, self.loss.names, self.name)
            if updates[0].has_loss:
                self.metrics["actor/ppo_kl_first"] = updates[0].means[self.loss.names.index(PPO_KL)].item()
            if self.settings.kl_in == "reward":
                self.metrics.pop("actor/kl_loss", None)

    def _update(
        self, batch: Batch, positions: Tensor, kl_coefficient: float, on_policy: bool, progress: float
    ) -> Update:
        """One update, after the share `progress` of the step's. `on_policy`: also sets the old log-probs."""
        read = batch.only("response_mask", "finished", "correct", "teacher_ids", "kept")  # others are large
        minibatch = read.select(positions)
        mask = actor_mask(minibatch, self.settings)
        counts = self.role_groups.dp_all_reduce(self.loss.local_counts(minibatch, mask))
        has_loss = not is_all_masked(counts[0], self.settings)
        measures = on_policy or self.settings.old_logprobs != RECOMPUTE and not progress

        def loss(scores, microbatch):
            logprobs, entropy = scores.logprobs.detach(), scores.entropy.detach()
            old_logprobs = logprobs if on_policy else microbatch.logprobs
            if self.settings.old_logprobs == INTERPOLATE:
                old_logprobs = proximal_logprobs(old_logprobs, logprobs, microbatch.staleness, progress)
            value, sums = self.loss(scores, microbatch, old_logprobs, counts, kl_coefficient)
            return value, (sums, logprobs, entropy) if measures else (sums,)

        microbatches = self.trainable_model.microbatches(batch, positions)
        results, update = self.trainable_model.checked_update(
            microbatches,
            self._forward_of_update,
            loss,
            self.loss.names,
            self.loss.metric_counts(counts),
            self.accepts,
            has_loss,
        )
        if measures:
            scored = zip(results, microbatches, strict=True)
            found = [(logprobs, entropy, at) for (_, logprobs, entropy), (_, at) in scored]
            if on_policy:
                self._set_old_logprobs(batch, found)
            else:
                first = batch.only("tokens", "response_mask", "rollout_logprobs", "staleness")
                mb.write_back(first, "logprobs", [(logprobs, at) for logprobs, _, at in found])
                self._measure_gap(first.select(positions))
        return update
