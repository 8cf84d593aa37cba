"""Scores the rounds of a step while its batch is being filled, for the group filter and for greedy baselines.

A collective of the ranks of rollout and reward. The rollout's ranks bring the responses; those that only score learn
of a round from an announcement, and bring none.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.arguments import Settings
from megarl.batch import Batch
from megarl.comm import load_balance
from megarl.comm.announcements import judges_early
from megarl.comm.role_mesh import RoleMesh
from megarl.comm.step_batch import ROLLOUT, StepBatch
from megarl.data.prompts import PromptSet
from megarl.flags.selection import parse_bounds
from megarl.groups import PromptGroups
from megarl.mcore import device
from megarl.observe.timers import Timers
from megarl.rewards.expression import JUDGE
from megarl.roles.loss_mask import without_unscored
from megarl.roles.reward import Reward
from megarl.roles.scored import Scored, no_rows
from megarl.rollout.requests import dp_assignment_of

GROUP_FILTERS = ("reward", "correct")  # fields of `Scored`, of which one must differ within a group
RANGE = "range"  # the group filter that reads the means of the rewards


class GenerationRound(NamedTuple):
    """The groups of one round, before the filter."""

    lines: list[int]  # of the groups' prompts in the set
    batch: Batch | None = None  # this rank's share of the responses; None outside the rollout
    greedy: Batch | None = None  # of the greedy responses, one to each prompt; None without `--greedy-baseline`
    kept: list[bool] | None = None  # groups that the filter kept when a saved round was generated
    draws: list[tuple[int, int]] | None = None  # of each group: step that drew its line, and how often it had before
    records: dict[int, dict] | None = None  # with `--save-rollouts`, of this replica's episodes by sequence id


class RoundScorer:
    """Scores the rounds of a step; `rows` are the samples-file rows of those with a group filter, of this rank."""

    def __init__(self, settings: Settings, mesh: RoleMesh, reward: Reward, prompts: PromptSet, timers: Timers):
        self.settings, self.mesh, self.timers = settings, mesh, timers
        self.reward, self.prompts = reward, prompts
        self._field = settings.group_filter if settings.group_filter in GROUP_FILTERS else None
        self._scores_all = settings.scores_rounds
        self._range = parse_bounds(settings.group_filter_range) if settings.group_filter == RANGE else None
        has_judge, role_groups = any(term.name == JUDGE for term in reward.terms), mesh[reward.name]
        is_early = judges_early(settings, has_judge, role_groups.ranks, mesh[ROLLOUT].ranks)
        # Replicas of a judge that reads responses while others are generated.
        self.early_judges = len(role_groups.replicas) if is_early else 0
        self.begin_step()

    def begin_step(self):
        """Forgets the rounds of the last step."""
        self.rows: list[dict] = []
        self._responses = 0  # of this step's rounds

    @property
    def is_needed(self) -> bool:
        """Whether the rounds of a step have to be scored before its batch is full."""
        return self._scores_all or self.settings.greedy_baseline

    def score(self, found: GenerationRound, step: int) -> tuple[Tensor, int, float, Tensor | None]:
        """Scores a round; sets scores and baselines of its batch. A collective of the ranks of rollout and reward, if
        the scores are needed now.

        Returns:
            keep: [G] bool, groups that the filter keeps.
            responses: that count; 0 without a group filter.
            reward_sum: of all responses.
            correct_shares: [G] float64 of those that count; NaN of none; None: not scored yet.
        """
        batch, groups = found.batch, self._groups(found)
        if self.settings.greedy_baseline:
            self._set_baselines(found, step)
        keep = torch.ones(len(found.lines), dtype=torch.bool)
        responses, reward_sum, shares = 0, 0.0, None
        if self._scores_all:
            rows, of_file = self._score(batch, groups, step)
            if batch is not None:
                Scored.of_rows(rows[batch.sequence_ids]).fill(batch, drops=True)
            scored = Scored.of_rows(groups.padded(rows))  # zeros do not count
            valid = scored.counts
            if self._field is not None:
                keep = differ(getattr(scored, self._field).double(), valid)
            elif self._range is not None:
                keep = between(means_of(scored.reward, valid), self._range)
            responses, reward_sum = int(valid.sum()), float(scored.reward.sum())
            shares = means_of(scored.correct.double(), valid)
        if found.kept is not None:
            keep = torch.tensor(found.kept, dtype=torch.bool)
        if self._scores_all:
            self.rows += self._rows_of_round(of_file, groups, keep)
        self._responses += groups.count
        return keep, responses, reward_sum, shares

    def _groups(self, found: GenerationRound) -> PromptGroups:
        return PromptGroups(self.prompts.group_sizes(found.lines, self.settings.samples_per_prompt))

    def _set_baselines(self, found: GenerationRound, step: int):
        """Scores the greedy responses: each is the baseline of its prompt's group."""
        rows, _ = self._score(found.greedy, PromptGroups.equal(len(found.lines), 1), step, for_training=False)
        if found.batch is not None:
            own = Scored.of_rows(rows[self._groups(found).of(found.batch.sequence_ids)])
            found.batch.baseline_scores = own.reward.float()
            found.batch.response_mask = without_unscored(found.batch, own.counts)

    def _score(
        self, batch: Batch | None, groups: PromptGroups, step: int, for_training: bool = True
    ) -> tuple[Tensor, list[dict]]:
        """(`Scored.rows` of a round's responses, on all ranks that take part; this rank's rows of the samples file)."""
        count, dp_assignment = groups.count, load_balance.round_robin_assignment(self.mesh, groups)
        role = ROLLOUT if batch is not None else self.reward.name
        with self.timers.phase(self.mesh[role].model_role, "exchange"):
            dp_assignment |= {ROLLOUT: dp_assignment_of(batch, count, self.mesh[ROLLOUT])}
        step_batch = StepBatch(self.mesh, self.timers, dp_assignment, batch, step, self.prompts, groups, self.settings)
        step_batch.dispatch("reward")
        self.reward.score(step_batch, for_training)
        rows = no_rows(count, self.settings, device.device())
        if self.mesh["reward"].is_leader:
            own = step_batch["reward"]
            rows[own.sequence_ids] = Scored.of_batch(own, self.settings).rows()
        with step_batch.exchange_phase("reward", ROLLOUT):
            dist.all_reduce(rows, group=self.mesh.channel("scores"))
            step_batch.wait_sends()
        return rows, step_batch.rows

    def _rows_of_round(self, rows: list[dict], groups: PromptGroups, keep: Tensor) -> list[dict]:
        """Samples-file rows of a round, with sequence numbers that are unique in the step."""
        kept = groups.expand(keep).tolist()
        return [row | {"sequence": row["sequence"] + self._responses, "kept": kept[row["sequence"]]} for row in rows]


def means_of(values: Tensor, valid: Tensor) -> Tensor:
    """[G] float64: means of those of the values [G, n] that are `valid` [G, n] bool; NaN of none."""
    return (values.masked_fill(~valid, 0.0).sum(-1) / valid.sum(-1)).cpu()


def between(means: Tensor, bounds: tuple[float, ...]) -> Tensor:
    """[G] bool: whether means [G] are above the first bound and below the second; False for NaN."""
    return (means > bounds[0]) & (means < bounds[1])


def differ(values: Tensor, valid: Tensor) -> Tensor:
    """[G] bool: whether those of the values [G, n] that are `valid` [G, n] bool differ within a group."""
    highest = values.masked_fill(~valid, -torch.inf).amax(-1)
    return (highest > values.masked_fill(~valid, torch.inf).amin(-1)).cpu()
