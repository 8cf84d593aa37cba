"""Fills a step's batch: draws prompts, has them answered, and with a group filter keeps those that teach something.

A group, the responses to one prompt, whose rewards are all equal has no advantage under any group baseline. Dynamic
sampling (DAPO, arXiv 2503.14476 §3.2) writes to more prompts until the batch is full of groups that differ.
"""

import dataclasses
import math
from collections import Counter

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.arguments import Settings
from megarl.batch import Batch
from megarl.comm import load_balance
from megarl.comm import microbatches as mb
from megarl.comm.role_mesh import RoleMesh
from megarl.comm.step_batch import ROLLOUT, StepBatch
from megarl.data.order import PromptOrder
from megarl.data.prompts import PromptSet
from megarl.mcore import device
from megarl.observe.timers import Timers
from megarl.roles.reward import Reward
from megarl.rollout.group_buffer import GroupBuffer
from megarl.rollout.partial_rollouts import VERSIONS, PartialRolloutBuffer
from megarl.rollout.requests import PromptRequest
from megarl.rollout.rollout import Rollout

GROUP_FILTERS = {"reward": 0, "correct": 1}  # what must differ in a group: columns of its verdicts


@dataclasses.dataclass
class SamplingStatistics:
    """What a step's sampling came to."""

    rounds: int = 0
    groups: int = 0  # written
    kept: int = 0  # of them, by the filter
    rewards: float = 0.0  # of all responses, where a filter wants them
    tokens: int = 0  # written by this rank's lane
    rows: list[dict] = dataclasses.field(default_factory=list)  # of the samples file, this rank's


class RolloutBatcher:
    """The step's groups; every rank draws and keeps the same ones."""

    def __init__(
        self, settings: Settings, mesh: RoleMesh, rollout: Rollout, reward: Reward, prompts: PromptSet,
        tokens: list[list[int]], hidden: int, timers: Timers,
    ):  # fmt: skip
        """`tokens`: those of each prompt. `hidden`: hidden size by which work is shared out to lanes."""
        self.settings, self.mesh, self.timers, self.hidden = settings, mesh, timers, hidden
        self.rollout, self.reward, self.prompts, self.tokens = rollout, reward, prompts, tokens
        self.order = PromptOrder(len(prompts), settings.seed)
        self.metrics: dict[str, float] = {}
        self._column = GROUP_FILTERS.get(settings.group_filter)
        self.known = settings.sampled_fields
        self.parts = PartialRolloutBuffer(mesh, settings)
        known = (*self.known, *([VERSIONS] if settings.partial_rollouts else []))
        self.waiting = GroupBuffer(mesh, settings.samples_per_prompt, known, rollout.recorded_layers)

    def next_batch(self, step: int) -> StepBatch | None:
        """The step's data. Collective.

        None when the filter left too few groups: none at all, or with dynamic sampling fewer than
        `--prompts-per-step` after `--max-sampling-rounds`. These wait, still on policy since nothing is learnt.
        """
        s, drawn, tally = self.settings, Counter(), SamplingStatistics()
        is_stale = len(self.waiting) == s.prompts_per_step  # written ahead
        most = s.max_sampling_rounds if s.dynamic_sampling else 1
        while len(self.waiting) < s.prompts_per_step and tally.rounds < most:
            self._round(s.prompts_per_step - len(self.waiting), drawn, step, tally)
        is_full = len(self.waiting) == s.prompts_per_step
        is_enough = is_full or (len(self.waiting) > 0 and not s.dynamic_sampling)
        self._measure(tally, 0 if is_enough else len(self.waiting))
        if s.one_step_off:
            self.metrics["rollout/staleness"] = int(is_stale)
        self.reward.rows = tally.rows
        return self._flow(step) if is_enough else None

    def prefetch(self, step: int):
        """With `--one-step-off` writes the batch of a coming step by the policy at hand; it waits for `fill`.

        Ranks outside the rollout go on at once.
        """
        if not self.settings.one_step_off:
            return
        tally, prompts = SamplingStatistics(), self._draw(self.settings.prompts_per_step, Counter())
        _, batch = self._write(prompts, step, tally, len(prompts))
        self.waiting.add(batch, torch.ones(len(prompts), dtype=torch.bool))
        self._measure_tokens(tally)

    def _round(self, wanted: int, drawn: Counter, step: int, tally: SamplingStatistics):
        """Has `wanted` prompts answered, the first of more with `--over-sampling`, and takes in the right groups."""
        begun = self._begin(wanted, drawn)
        prompts, batch = self._write(begun, step, tally, wanted)
        is_in = torch.ones(len(prompts), dtype=torch.bool)
        if self._column is not None:
            verdicts = self._verdicts(batch, len(prompts), self.settings.samples_per_prompt)
            _set_scores(batch, verdicts.flatten(0, 1))
            is_in = _differ(verdicts[..., self._column])
            tally.rewards += float(verdicts[..., 0].sum())
            tally.rows += self._rows(is_in, tally.groups)
        self.waiting.add(batch, is_in)
        tally.rounds += 1
        tally.groups += len(prompts)
        tally.kept += int(is_in.sum())

    def _begin(self, wanted: int, drawn: Counter) -> list[PromptRequest]:
        """The prompts of a round: of groups that go on, then new ones unless enough of the former are whole."""
        count = math.ceil(round(wanted * self.settings.over_sampling, 6))
        begun, limit = self.parts.pop_oldest(count), self.settings.max_response_length
        whole = sum(not any(part.remaining(limit) for part in prompt.parts) for prompt in begun)
        return begun if whole >= wanted else begun + self._draw(count - len(begun), drawn)

    def _draw(self, count: int, drawn: Counter) -> list[PromptRequest]:
        prompts = []
        for line in self.order.take(count):
            prompts.append(PromptRequest(line, self.tokens[line], drawn[line]))
            drawn[line] += 1
        return prompts

    def _write(
        self, prompts: list[PromptRequest], step: int, tally: SamplingStatistics, wanted: int
    ) -> tuple[list[PromptRequest], Batch | None]:
        """(the `wanted` prompts that are answered first, this rank's share of the responses to them)."""
        samples = self.settings.samples_per_prompt
        self.reward.prepare(self.prompts, [drawn.line for drawn in prompts])
        batch = self.rollout.generate(prompts, samples, step, wanted=wanted)
        prompts, batch = self._first(prompts, batch, step, tally, wanted)
        if self.settings.greedy_baseline:
            greedy = self.rollout.generate([drawn._replace(parts=()) for drawn in prompts], 1, step, temperature=0)
            scores = self._verdicts(greedy, len(prompts), 1, learnt=False)[:, 0, 0].float()
            if batch is not None:
                batch.baseline_scores = scores[batch.sequence_ids // samples]
                tally.tokens += int(greedy.response_mask.sum())
        return prompts, batch

    def _first(
        self, prompts: list[PromptRequest], batch: Batch | None, step: int, tally: SamplingStatistics, wanted: int
    ) -> tuple[list[PromptRequest], Batch | None]:
        """Of a round's groups those that come in; the others go on in the next, or are dropped."""
        samples, first, longest = self.settings.samples_per_prompt, torch.arange(len(prompts)), None
        with self.timers.phase(self.mesh[ROLLOUT].model_role, "exchange"):
            if wanted < len(prompts):
                first, longest = self.rollout.earliest_groups(batch, prompts, samples, wanted)
            if self.settings.partial_rollouts:
                batch, new = self.parts.keep_unfinished(batch, prompts, step, first, longest)
                tally.tokens += new
        if batch is not None and wanted < len(prompts):
            batch = _select_groups(batch, first, samples)
        if self.settings.partial_rollouts:
            self.rollout.recompute_routes(batch, [prompts[i] for i in first.tolist()], samples)
        if batch is not None and not self.settings.partial_rollouts:
            tally.tokens += int(batch.response_mask.sum())
        return [prompts[i] for i in first.tolist()], batch

    def _verdicts(self, batch: Batch | None, groups: int, samples: int, learnt: bool = True) -> Tensor:
        """[groups, samples, 2] float64 scores and verdicts of a round's responses, on every rank. Collective."""
        count = groups * samples
        with self.timers.phase(self.mesh[ROLLOUT].model_role, "exchange"):
            dp_assignment = load_balance.round_robin_assignment(self.mesh, count, samples) | {
                ROLLOUT: self.rollout.dp_assignment(batch, count)
            }
        flow = StepBatch(self.mesh, self.timers, dp_assignment, batch)
        flow.dispatch(["reward"])
        self.reward.score(flow, self.prompts, learnt)
        found = torch.zeros(count, 2, dtype=torch.float64, device=device.device())
        if self.mesh["reward"].is_leader:
            scored = flow["reward"]
            found[scored.sequence_ids] = torch.stack([scored.scores.double(), scored.correct.double()], dim=1)
        with self.timers.phase(self.mesh[ROLLOUT].model_role, "exchange"):
            dist.all_reduce(found)
        return found.view(groups, samples, 2)

    def _rows(self, is_in: Tensor, before: int) -> list[dict]:
        """Rows of the samples file of the round just scored, numbered over the step; `before`: groups of it so far."""
        samples, kept = self.settings.samples_per_prompt, is_in.tolist()
        return [
            row | {"sequence": row["sequence"] + before * samples, "kept": kept[row["sequence"] // samples]}
            for row in self.reward.rows
        ]

    def _measure(self, tally: SamplingStatistics, waiting: int):
        self.metrics = {}
        self._measure_tokens(tally)
        if self.settings.partial_rollouts:
            self.metrics |= self.parts.metrics()
        if self._column is not None:
            self.metrics |= {
                "sampling/rounds": tally.rounds,
                "sampling/groups": tally.groups,
                "sampling/kept_fraction": tally.kept / tally.groups,
                "sampling/reward_mean": tally.rewards / (tally.groups * self.settings.samples_per_prompt),
                "sampling/waiting_groups": waiting,
            }

    def _measure_tokens(self, tally: SamplingStatistics):
        """Counts what was written in a step, whichever step learns it."""
        role_groups = self.mesh[ROLLOUT]
        if role_groups.is_member:
            tokens = role_groups.dp_all_reduce(torch.tensor([tally.tokens], device=device.device()))
            self.metrics["rollout/tokens"] = int(tokens) + self.metrics.get("rollout/tokens", 0)

    def _flow(self, step: int) -> StepBatch:
        """The batch, handed over; lanes share its work out evenly."""
        rollout, count = self.waiting.batch, len(self.waiting) * self.settings.samples_per_prompt
        if self.settings.partial_rollouts:
            self.metrics |= self.parts.start_update(rollout, step)
        self.waiting.clear()
        minibatches = mb.minibatches_of_step(self.settings, count, step, epoch=0)
        with self.timers.phase(self.mesh[ROLLOUT].model_role, "exchange"):
            lengths, written = (
                load_balance.gather_lengths(self.mesh, rollout, count),
                self.rollout.dp_assignment(rollout, count),
            )
        dp_assignment = load_balance.balanced_assignment(self.mesh, lengths, written, minibatches, self.hidden)
        return StepBatch(self.mesh, self.timers, dp_assignment, rollout, self.known)


def _select_groups(batch: Batch, groups: Tensor, samples: int) -> Batch:
    """The sequences of these groups (ascending numbers), numbered anew."""
    groups = groups.to(batch.sequence_ids.device)
    mine = (batch.sequence_ids // samples).unsqueeze(1) == groups  # [N, groups]
    part = batch.select(mine.any(1).nonzero().flatten())
    part.sequence_ids = mine.nonzero()[:, 1] * samples + part.sequence_ids % samples
    return part


def _differ(values: Tensor) -> Tensor:
    """[G] bool: whether the values [G, n] of a group are not all equal."""
    return (values.amax(-1) != values.amin(-1)).cpu()


def _set_scores(batch: Batch | None, verdicts: Tensor):
    """Gives this rank's responses their scores and verdicts, rows of [N, 2] by sequence id."""
    if batch is not None:
        mine = verdicts[batch.sequence_ids]
        batch.scores, batch.correct = mine[:, 0].float(), mine[:, 1] > 0
