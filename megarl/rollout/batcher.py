"""The batch of each step: collected by the ranks of the rollout, which tell all others what it contains.

Ranks outside the rollout hold nothing of generation. They learn the lengths of a step's sequences from a message, by
which every rank assigns them to replicas in the same way.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megarl.batch import ON_ROLLOUT, Batch
from megarl.comm import load_balance
from megarl.comm import microbatches as mb
from megarl.comm.announcements import Announcements
from megarl.comm.step_batch import ROLLOUT, StepBatch
from megarl.data.order import MixtureOrder, PromptOrder
from megarl.data.prompts import PromptSet
from megarl.data.ragged import Ragged
from megarl.errors import UsageError
from megarl.flags.distillation import SIBLING
from megarl.groups import PromptGroups
from megarl.plain_files import reading
from megarl.roles.reward import Reward
from megarl.roles.reward_metrics import step_metrics
from megarl.rollout import waiting_groups
from megarl.rollout.group_collector import GroupCollector, SavedGroupCollector
from megarl.rollout.requests import dp_assignment_of
from megarl.rollout.response_log import Record
from megarl.rollout.rollout import Rollout
from megarl.rollout.rollout_files import RolloutWriter, SavedRollouts
from megarl.rollout.round_scores import GenerationRound, RoundScorer
from megarl.rollout.waiting_groups import BATCH, GROUPS, POOLS, UNFINISHED, kept_records, packed


class BatchHeader(NamedTuple):
    """What every rank has to know of a step's batch."""

    lengths: Tensor  # [N] int64 tokens of each sequence
    generated_on: Tensor  # [N] int64 dp rank of the rollout that generated it
    group_sizes: Tensor  # [G] int64 sequences of each group

    def encode(self) -> dict[str, list[int]]:
        return {name: column.tolist() for name, column in self._asdict().items()}

    @classmethod
    def decode(cls, message: dict[str, list[int]]) -> "BatchHeader":
        """The header from JSON. RuntimeError for anything that `encode` does not write."""
        try:
            header = cls(**{name: torch.tensor(column, dtype=torch.int64) for name, column in message.items()})
            is_flat = header.lengths.shape == header.generated_on.shape and all(field.dim() == 1 for field in header)
            if is_flat and header.group_sizes.sum() == len(header.lengths):
                return header
        except (AttributeError, TypeError, ValueError, RuntimeError):
            pass
        raise RuntimeError("the message about a step's batch is damaged")


class RolloutBatcher:
    """Gives each step its batch, on all ranks."""

    def __init__(
        self, rollout: Rollout, reward: Reward, prompts: PromptSet, prompt_tokens: Ragged, hidden_size: int,
        writer: RolloutWriter | None = None, saved: SavedRollouts | None = None,
    ):  # fmt: skip
        """
        Args:
            prompt_tokens, writer: as of `GroupCollector`.
            hidden_size: the actor's, to estimate the FLOPs of sequences for load balancing.
            saved: has the batches, with a `SavedRollout`; None: they are generated.
        """
        self.settings, self.mesh, self.timers = rollout.settings, rollout.mesh, rollout.timers
        self.reward, self.prompts, self.hidden_size = reward, prompts, hidden_size
        self.metrics: dict[str, float] = {}
        self.rows: list[dict] = []  # of the samples file: what was scored before the step's batch was full
        generates, others = rollout.role_groups.ranks, {*range(self.mesh.size)} - {*rollout.role_groups.ranks}
        self._announcements = Announcements("batches", generates.start, others)
        self._scorer = RoundScorer(self.settings, self.mesh, reward, prompts, self.timers)
        self.collector: GroupCollector | None = None  # on ranks of the rollout
        if rollout.role_groups.is_member:
            scorer, tell = self._scorer, self._announcements
            if saved is not None:
                self.collector = SavedGroupCollector(saved, rollout, prompts, prompt_tokens, scorer, tell)
            else:
                self.collector = GroupCollector(rollout, prompts, prompt_tokens, scorer, tell, writer)

    @property
    def order(self) -> PromptOrder | MixtureOrder | None:
        """The order of prompts; None outside the rollout."""
        return None if self.collector is None else self.collector.order

    def generate(self, step: int) -> StepBatch | None:
        """The batch of a step. Collective.

        None when the filter left too few groups (`GroupCollector.collect`), and after the last step, when ranks that
        generate ahead have nothing left to do. None also with `--debug-rollout-only`, since nothing is trained.
        """
        if step > self.settings.train_iters:
            return None
        self._scorer.begin_step()
        self.rows = self._scorer.rows  # to which each round adds
        responses, header = (None, self._follow(step)) if self.collector is None else self._collect(step)
        batch = None if header is None else self._step_batch(step, responses, header)
        if batch is None or not self.settings.debug_rollout_only:
            return batch
        self._score(batch)
        return None

    def _score(self, batch: StepBatch):
        """Scores a batch that goes no further; adds its metrics `rollout/…` and `reward/…`. Collective."""
        name = self.reward.name
        batch.dispatch(name)
        self.reward.score(batch)
        batch.wait_sends()
        self.rows = self.rows or batch.rows
        if batch[name] is not None:
            metrics, _, _ = step_metrics(batch[name], self.settings, self.mesh[name])
            self.metrics |= metrics

    def forget(self, step: int):
        """Removes what was kept of the batches up to a step, which training has ended."""
        if self.collector is not None:
            self.collector.queue.forget(step)

    def files(self) -> dict[str, bytes]:
        """What a checkpoint keeps of generation: this replica's log by name, on its leader; {} if it has no records.
        Collective."""
        records = [packed(kind, record, step) for kind, record, step in self._records() if record is not None]
        if not records:
            return {}
        return {waiting_groups.FILES.replace("*", f"{self.mesh[ROLLOUT].dp_rank:05d}"): b"".join(records)}

    def _records(self) -> Iterator[tuple[str, Record | None, int | None]]:
        """(kind, record, step) of what this replica keeps, record None of what it does not have. Collective."""
        if self.collector is None:
            return
        yield GROUPS, self.collector.group_buffer.to_record(), None
        if self.settings.partial_rollouts:
            yield UNFINISHED, self.collector.partial_rollouts.to_record(), None
        role_groups = self.mesh[ROLLOUT]
        if self.collector.pools is not None and role_groups.is_leader and not role_groups.dp_rank:
            state = self.collector.pools.state_dict().items()
            yield POOLS, Record({}, {name: torch.from_numpy(values) for name, values in state}), None
        for step, record in self.collector.queue.to_records():
            yield BATCH, record, step

    def manifest_entries(self, step: int) -> dict[str, Any]:
        """What the manifest of a step's checkpoint says of generation; {} outside the rollout."""
        if self.collector is None:
            return {}
        groups, unfinished = len(self.collector.group_buffer), len(self.collector.partial_rollouts)
        queue, lag = self.collector.queue, self.settings.generation_lag
        version = self.collector.versions.after_step(step)
        return {
            "prompt_order": self.collector.order.state_dict(),
            **waiting_groups.manifest_entry(self.settings, groups, unfinished),
            waiting_groups.QUEUE: {"lag": lag, "through": queue.through, "steps": queue.steps(), "version": version},
        }

    def resume(self, folder: Path, manifest: dict[str, Any], has_new_prompts: bool):
        """Loads the groups that waited when a checkpoint was saved, the batches of later steps, and the pools, unless
        they are of other prompts. Raises UsageError."""
        if self.collector is None:
            return
        step, queue = manifest["step"], waiting_groups.queued(manifest)
        try:
            where = f"--load {folder / waiting_groups.FIRST}"
            with reading(where, "is damaged"):
                kept, version = kept_records(folder), queue["version"]
                queued: dict[int, Iterable[Record]] = {number: kept.read(BATCH, number) for number in queue["steps"]}
                self.collector.queue.load(step, queue["through"], queued, version - queue["lag"])
                if kept.entries(GROUPS):
                    self.collector.group_buffer.load(kept.read(GROUPS), version)
                if kept.entries(UNFINISHED):
                    self.collector.partial_rollouts.load(kept.read(UNFINISHED))
                if self.collector.pools is not None and not has_new_prompts:
                    waiting_groups.load_pools(self.collector.pools, kept.read(POOLS), where)
            self.collector.versions.restart(step, version)
        except UsageError as error:
            raise UsageError(str(error), self.mesh[ROLLOUT].ranks.start) from None

    def _collect(self, step: int) -> tuple[Batch | None, BatchHeader | None]:
        """This rank's share of the batch, and its header. A collective of the rollout."""
        collector, role_groups, responses, header = self.collector, self.mesh[ROLLOUT], None, None
        if found := collector.collect(step):
            responses, groups = found
            with self.timers.phase(role_groups.model_role, "exchange"):
                lengths = role_groups.gather_rows(responses.sequence_ids, responses.lengths, groups.count)
                generated_on = dp_assignment_of(responses, groups.count, role_groups)
                header = BatchHeader(lengths, generated_on, groups.sizes)
        self.metrics = collector.metrics
        if self._announcements.sends:  # in large steps the header is long
            if self.settings.generation_lag:
                self._announcements.set_progress(step)
            self._announcements.send({"batch": header and header.encode()})
        return responses, header

    def _follow(self, step: int) -> BatchHeader | None:
        """The header of the step's batch; until it comes, reward ranks score the rounds that are announced."""
        while True:
            with self.timers.phase(self.mesh.roles_of(self.mesh.rank)[0], "wait"):
                message = self._announcements.take()
            if "drawn" in message:
                self.reward.prepare(self.prompts, message["drawn"])
                if self._scorer.early_judges:
                    self.reward.judge_early(self.prompts, message["drawn"], step, message["number"])
            elif "batch" in message:
                if self.settings.generation_lag and self.mesh.rank == self.mesh["actor"].ranks.start:
                    self.metrics = {"rollout/lead": self._announcements.progress() - step}
                return message["batch"] and BatchHeader.decode(message["batch"])
            elif self.mesh[self.reward.name].is_member:
                self._scorer.score(GenerationRound(**message["round"]), step)

    def _step_batch(self, step: int, responses: Batch | None, header: BatchHeader) -> StepBatch:
        """The batch, its sequences assigned to replicas by FLOPs; whole groups to roles that compare responses."""
        groups = PromptGroups(header.group_sizes.tolist())
        minibatches = mb.minibatches_of_step(self.settings, groups, step, epoch=0)
        together = groups if len(minibatches) > 1 and self.settings.minibatch_groups is not None else None
        dp_assignment = load_balance.balanced_assignment(
            self.mesh, header.lengths, header.generated_on, minibatches, self.hidden_size, together
        )
        name = self.reward.name
        compares = {name: self.reward.needs_whole_groups, "teacher": self.settings.teacher_context == SIBLING}
        if self._scorer.early_judges:  # where the responses are judged already
            dp_assignment[name] = load_balance.round_robin_assignment(self.mesh, groups)[name]
            compares[name] = False
        for name in (name for name in dp_assignment if compares.get(name)):
            replicas = len(self.mesh[name].replicas)
            dp_assignment[name] = load_balance.with_whole_groups(
                dp_assignment[name], header.lengths, groups, replicas, self.hidden_size
            )
        return StepBatch(
            self.mesh, self.timers, dp_assignment, responses, step, self.prompts, groups, self.settings, ON_ROLLOUT
        )
