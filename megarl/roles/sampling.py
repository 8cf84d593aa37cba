"""Fills a step's batch: draws prompts, has them answered, and with a group filter keeps those that teach something.

A group, the responses to one prompt, whose rewards are all equal has no advantage under any group baseline. Dynamic
sampling (DAPO, arXiv 2503.14476 §3.2) writes to more prompts until the batch is full of groups that differ.
"""

from collections import Counter

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.arguments import Settings
from megarl.batch import Batch
from megarl.data.order import PromptOrder
from megarl.data.prompts import PromptSet
from megarl.mcore import device
from megarl.observe.timers import Timers
from megarl.roles import lanes
from megarl.roles import microbatches as mb
from megarl.roles.flow import SOURCE, Flow
from megarl.roles.reward import Reward
from megarl.roles.rollout import Rollout
from megarl.roles.waiting import Waiting
from megarl.rollout.requests import Drawn
from megarl.world import World

FILTERS = {"reward": 0, "correct": 1}  # what must differ in a group: columns of its verdicts


class Sampling:
    """The step's groups; every rank draws and keeps the same ones."""

    def __init__(
        self, settings: Settings, world: World, rollout: Rollout, reward: Reward, prompts: PromptSet,
        tokens: list[list[int]], hidden: int, timers: Timers,
    ):  # fmt: skip
        """`tokens`: those of each prompt. `hidden`: hidden size by which work is shared out to lanes."""
        self.settings, self.world, self.timers, self.hidden = settings, world, timers, hidden
        self.rollout, self.reward, self.prompts, self.tokens = rollout, reward, prompts, tokens
        self.order = PromptOrder(len(prompts), settings.seed)
        self.metrics: dict[str, float] = {}
        self._column = FILTERS.get(settings.group_filter)
        verdicts, baseline = ("scores", "correct"), ("baseline_scores",)
        self.known = verdicts * (self._column is not None) + baseline * settings.greedy_baseline
        self.waiting = Waiting(world, settings.samples_per_prompt, self.known)

    def fill(self, step: int) -> Flow | None:
        """The step's data. Collective.

        None when the filter left too few groups: none at all, or with dynamic sampling fewer than
        `--prompts-per-step` after `--max-sampling-rounds`. These wait, still on policy since nothing is learnt.
        """
        s, drawn, kept, rewards, tokens, rows = self.settings, Counter(), 0, 0.0, 0, []
        for number in range(1, (s.max_sampling_rounds if s.dynamic_sampling else 1) + 1):
            prompts = self._draw(s.prompts_per_step - len(self.waiting), drawn)
            batch, written = self._write(prompts, step)
            is_in = torch.ones(len(prompts), dtype=torch.bool)
            if self._column is not None:
                verdicts = self._verdicts(batch, len(prompts), s.samples_per_prompt)
                _note(batch, verdicts.flatten(0, 1))
                is_in = _differ(verdicts[..., self._column])
                rows += self._rows(is_in, before=drawn.total() - len(prompts))
                rewards += float(verdicts[..., 0].sum())
            self.waiting.add(batch, is_in)
            kept, tokens = kept + int(is_in.sum()), tokens + written
            if len(self.waiting) == s.prompts_per_step:
                break
        is_enough = len(self.waiting) == s.prompts_per_step or (len(self.waiting) > 0 and not s.dynamic_sampling)
        self._measure(number, drawn.total(), kept, rewards, tokens, 0 if is_enough else len(self.waiting))
        self.reward.rows = rows
        return self._flow(step) if is_enough else None

    def _draw(self, count: int, drawn: Counter) -> list[Drawn]:
        prompts = []
        for line in self.order.take(count):
            prompts.append(Drawn(line, self.tokens[line], drawn[line]))
            drawn[line] += 1
        return prompts

    def _write(self, prompts: list[Drawn], step: int) -> tuple[Batch | None, int]:
        """This rank's share of the responses to these prompts, and how many tokens its lane wrote for them."""
        samples, written = self.settings.samples_per_prompt, 0
        batch = self.rollout.generate(prompts, samples, step)
        if self.settings.greedy_baseline:
            greedy = self.rollout.generate(prompts, 1, step, temperature=0)
            scores = self._verdicts(greedy, len(prompts), 1)[:, 0, 0].float()
            if batch is not None:
                batch.baseline_scores = scores[batch.sequence_ids // samples]
                written = int(greedy.response_mask.sum())
        return batch, written + (0 if batch is None else int(batch.response_mask.sum()))

    def _verdicts(self, batch: Batch | None, groups: int, samples: int) -> Tensor:
        """[groups, samples, 2] float64 scores and verdicts of a round's responses, on every rank. Collective."""
        count = groups * samples
        flow = Flow(self.world, self.timers, lanes.dealt(self.world, count, samples), batch)
        flow.share(["reward"])
        self.reward.score(flow, self.prompts)
        found = torch.zeros(count, 2, dtype=torch.float64, device=device.device())
        if self.world["reward"].is_leader:
            scored = flow["reward"]
            found[scored.sequence_ids] = torch.stack([scored.scores.double(), scored.correct.double()], dim=1)
        with self.timers.phase(self.world[SOURCE].host, "exchange"):
            dist.all_reduce(found)
        return found.view(groups, samples, 2)

    def _rows(self, is_in: Tensor, before: int) -> list[dict]:
        """Rows of the samples file of the round just scored, numbered over the step; `before`: groups of it so far."""
        samples, kept = self.settings.samples_per_prompt, is_in.tolist()
        return [
            row | {"sequence": row["sequence"] + before * samples, "kept": kept[row["sequence"] // samples]}
            for row in self.reward.rows
        ]

    def _measure(self, rounds: int, groups: int, kept: int, rewards: float, tokens: int, waiting: int):
        place = self.world[SOURCE]
        self.metrics = {}
        if place.is_member:
            total = place.sum_over_lanes(torch.tensor([tokens], device=device.device()))
            self.metrics["rollout/tokens"] = int(total)
        if self._column is not None:
            self.metrics |= {
                "sampling/rounds": rounds,
                "sampling/groups": groups,
                "sampling/kept_fraction": kept / groups,
                "sampling/reward_mean": rewards / (groups * self.settings.samples_per_prompt),
                "sampling/waiting_groups": waiting,
            }

    def _flow(self, step: int) -> Flow:
        """The batch, handed over; lanes share its work out evenly."""
        rollout, written = self.waiting.batch, self.waiting.owners
        self.waiting.clear()
        minibatches = mb.minibatches_of_step(self.settings, len(written), step, epoch=0)
        with self.timers.phase(self.world[SOURCE].host, "exchange"):
            owners = lanes.balanced(self.world, rollout, written, minibatches, self.hidden)
        return Flow(self.world, self.timers, owners, rollout, self.known)


def _differ(values: Tensor) -> Tensor:
    """[G] bool: whether the values [G, n] of a group are not all equal."""
    return (values.amax(-1) != values.amin(-1)).cpu()


def _note(batch: Batch | None, verdicts: Tensor):
    """Gives this rank's responses their scores and verdicts, rows of [N, 2] by sequence id."""
    if batch is not None:
        mine = verdicts[batch.sequence_ids]
        batch.scores, batch.correct = mine[:, 0].float(), mine[:, 1] > 0
