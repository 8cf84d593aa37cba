"""Collects the groups of a step on the ranks of the rollout: draws prompts, generates rounds, applies the group filter.

A group is the responses to one prompt. A group whose rewards are all equal has no advantage under any group baseline;
dynamic sampling (DAPO, arXiv 2503.14476 §3.2) draws more prompts until the batch is full of groups that differ.

With `--debug-train-only` the responses of each step come from files instead (`rollout_files.py`).
"""

import math
from collections import Counter, defaultdict
from typing import Any

import torch
import torch.distributed as dist

from megarl.arguments import RoleSettings, Settings
from megarl.batch import Batch, generated_fields
from megarl.comm.announcements import Announcements, ResponseSender
from megarl.comm.role_mesh import RoleMesh
from megarl.comm.step_batch import ROLLOUT
from megarl.data.order import DifficultyPools, MixtureOrder
from megarl.data.prompts import PromptSet
from megarl.data.ragged import Ragged
from megarl.errors import UsageError
from megarl.flags.selection import parse_shares, parse_weights
from megarl.groups import PromptGroups
from megarl.mcore import device
from megarl.mcore.model.pipeline_layout import RoutedLayers
from megarl.observe.timers import Timers
from megarl.rollout.group_buffer import BatchQueue, GroupBuffer, forced_responses
from megarl.rollout.partial_rollouts import PartialRolloutBuffer
from megarl.rollout.requests import PromptRequest, episode_keys, groups_of, remaining_tokens
from megarl.rollout.rollout import Rollout
from megarl.rollout.rollout_files import GREEDY, RESPONSES, RolloutWriter, SavedRollouts
from megarl.rollout.round_scores import GenerationRound, RoundScorer
from megarl.rollout.waiting_groups import VERSIONS
from megarl.rollout.weight_sync import PolicyVersions, staleness_metrics, staleness_of


def groups_of_round(wanted: int, over_sampling: float) -> int:
    """How many groups a round generates for those that its batch lacks: rounded up, but not for an error of the
    product."""
    return math.ceil(round(wanted * over_sampling, 6))


class GroupCollector:
    """Fills the group buffer of each step, on every rank of the rollout: they draw the same prompts and keep the same
    groups."""

    def __init__(
        self,
        rollout: Rollout,
        prompts: PromptSet,
        prompt_tokens: Ragged,
        scorer: RoundScorer,
        announcements: Announcements,
        writer: RolloutWriter | None = None,
    ):
        """
        Args:
            prompt_tokens: tokens of each prompt in the set.
            announcements: tell the other ranks the lines that a round has "drawn", if a reward model or a judge reads
                them meanwhile, and a "round" that is to be scored.
            writer: keeps the responses of each step; None without `--save-rollouts`.
        """
        self.settings, self.role_groups = rollout.settings, rollout.role_groups
        self.rollout, self.timers = rollout, rollout.timers
        self.prompts, self.prompt_tokens = prompts, prompt_tokens
        self.pools: DifficultyPools | None = None
        s = rollout.settings
        if s.pool_bounds is not None:
            bounds, weights = parse_shares(s.pool_bounds), parse_weights(s.pool_weights)
            self.pools = DifficultyPools(len(prompts), bounds, weights, s.pool_retire_after)
        self.order = prompts.order(s.seed, self.pools)
        self.metrics: dict[str, float] = {}
        self._scorer, self._announcements, self._writer = scorer, announcements, writer
        carried = None if rollout.episodes is None else rollout.episodes.carried
        self.partial_rollouts = PartialRolloutBuffer(self.role_groups, s, carried)
        self._has_versions = s.has_stale_tokens
        self.group_buffer = GroupBuffer(self.role_groups, s, rollout.recorded_layers)
        self.queue = BatchQueue(self.group_buffer, keeps=s.generation_lag > 0)
        self.versions = PolicyVersions(s)
        # Of the rounds that fill one step's batch: `rounds`, `groups` generated and `kept` by the filter; with a filter
        # `responses` without failed episodes and their `reward_sum`. Of this rank's replica: `tokens` generated,
        # responses that were `taken`, and of these those with thoughts that were `cut`.
        self._counts = defaultdict[str, Any](int)

    def collect(self, step: int) -> tuple[Batch, PromptGroups] | None:
        """(this rank's share of a step's responses, their groups on all replicas); None if its rounds gave too few
        groups: none at all, or with dynamic sampling fewer than `--prompts-per-step` after `--max-sampling-rounds`.
        They stay in the buffer for the next step. Collective."""
        self.metrics = {}
        if step > self.queue.through:
            self._fill(step)
        found = self.queue.get(step)
        if found is not None and self._has_versions:
            found[0].staleness = staleness_of(found[0].versions, self.versions.of_step(step)[1])
        self.versions.end_step(step, has_batch=found is not None)
        return found

    def _fill(self, step: int):
        """Generates for a step, and queues its batch if the buffer then holds enough groups."""
        s, self._counts = self.settings, defaultdict(int)
        self._run_rounds(step)
        if self.pools is not None:
            self.pools.end_step()
        is_full = len(self.group_buffer) == s.prompts_per_step
        is_enough = is_full or (len(self.group_buffer) > 0 and not s.dynamic_sampling)
        self._set_metrics(waiting_groups=0 if is_enough else len(self.group_buffer))
        if self._writer is not None:
            own = {n: v for n, v in self.metrics.items() if n != "rollout/tokens" and not n.startswith("sampling/")}
            with self.timers.phase(self.role_groups.model_role, "save"):
                self._writer.commit(self.order.state_dict(), self.metrics["rollout/tokens"], own)
        if is_enough and self._has_versions:
            batch, trains = self.group_buffer.batch, self.versions.of_step(step)[1]
            self.metrics |= staleness_metrics(batch, trains, s, self.role_groups)
        self.queue.put(step, self.group_buffer.take() if is_enough else None)

    def _run_rounds(self, step: int):
        """Runs rounds until the batch is full, or as many as are allowed."""
        s, draws = self.settings, Counter()
        max_rounds = s.max_sampling_rounds if s.dynamic_sampling else 1
        if self._writer is not None:
            self._writer.begin(step, len(self.group_buffer), self.versions.of_step(step)[0])
        while len(self.group_buffer) < s.prompts_per_step and self._counts["rounds"] < max_rounds:
            wanted = s.prompts_per_step - len(self.group_buffer)
            requests = self._requests_of_round(step, wanted, draws)  # for more than `wanted` with --over-sampling
            self._accept(self._generate_groups(requests, step, wanted), step)

    def _accept(self, found: GenerationRound, step: int):
        """Scores a round where the run needs it now, and buffers the groups that pass the filter."""
        if self._scorer.is_needed:
            self._announcements.send({"round": {"lines": found.lines, "kept": found.kept}})
        keep, responses, reward_sum, shares = self._scorer.score(found, step)
        groups = PromptGroups(self.prompts.group_sizes(found.lines, self.settings.samples_per_prompt))
        if self._writer is not None:
            with self.timers.phase(self.role_groups.model_role, "save"):
                self._writer.add(found, groups, keep)
        self.group_buffer.add(found.batch, groups, keep)
        if self.pools is not None:
            for line, share in zip(found.lines, shares.tolist(), strict=True):
                self.pools.add(line, share)
        self._counts["rounds"] += 1
        self._counts["groups"] += len(found.lines)
        self._counts["kept"] += int(keep.sum())
        self._counts["responses"] += responses
        self._counts["reward_sum"] += reward_sum

    def _requests_of_round(self, step: int, wanted: int, draws: Counter) -> list[PromptRequest]:
        """Carried groups first, then new prompts, unless enough of the carried groups are finished already."""
        count = groups_of_round(wanted, self.settings.over_sampling)
        carried = self.partial_rollouts.pop_oldest(count, self.versions.of_step(step)[1])
        carried = [request._replace(limit=self._response_limit(request.line)) for request in carried]
        finished = sum(not any(remaining_tokens([request])) for request in carried)
        return carried if finished >= wanted else carried + self._draw_prompts(step, count - len(carried), draws)

    def _draw_prompts(self, step: int, count: int, draws: Counter) -> list[PromptRequest]:
        """The next prompts of the set; `draws` counts how often this step has drawn each line."""
        requests = []
        for line in self.order.take(count):
            samples = self.prompts.group_size(line) or self.settings.samples_per_prompt
            tokens, limit = self.prompt_tokens.view(line), self._response_limit(line)
            requests.append(PromptRequest(line, tokens, samples, limit, step, draws[line]))
            draws[line] += 1
        return requests

    def _response_limit(self, line: int) -> int:
        """Tokens of a response to a line: those of its file in a mixture, or of the flag."""
        return self.prompts.response_limit(line) or self.settings.max_response_length

    def _generate_groups(self, requests: list[PromptRequest], step: int, wanted: int) -> GenerationRound:
        """The `wanted` groups taken of those requested, with this rank's share of their responses."""
        sender = None
        # Ranks of a reward model encode the prompts meanwhile, those of a judge await the responses.
        if self.settings.reward_model is not None or self._scorer.early_judges:
            lines = [request.line for request in requests]
            self._announcements.send({"drawn": lines, "number": self._counts["rounds"]})
        if self._scorer.early_judges and self.role_groups.is_leader:
            sender = ResponseSender(step, self._counts["rounds"], groups_of(requests), self._scorer.early_judges)
        versions = self.versions if self._has_versions else None
        batch = self.rollout.generate(
            requests, step, wanted=wanted, prompt_set=self.prompts, sender=sender, versions=versions
        )
        requests, batch = self._take_earliest(requests, batch, wanted)
        greedy = None
        if self.settings.greedy_baseline:
            prompts = [request._replace(lengths=(), responses=(), samples=1) for request in requests]
            greedy = self.rollout.generate(prompts, step, temperature=0, prompt_set=self.prompts)
            self._counts["tokens"] += int(greedy.response_mask.sum())
        draws, records = [(request.step, request.draw_index) for request in requests], None
        if self._writer is not None and self.rollout.episodes is not None:
            records = self.rollout.episodes.take_records(episode_keys(requests))
        lines = [request.line for request in requests]
        return GenerationRound(lines=lines, batch=batch, greedy=greedy, draws=draws, records=records)

    def _take_earliest(
        self, requests: list[PromptRequest], batch: Batch, wanted: int
    ) -> tuple[list[PromptRequest], Batch]:
        """Takes the `wanted` earliest groups of a round. With partial rollouts the next round continues the others.

        Example with `wanted` 1 of two groups of two responses: group A ended with 3 and 5 new tokens, when group B had
        5 and, in the slowest case, 7. A is taken and `longest` is 5: B's responses are truncated to 5 new tokens on
        every layout, however far a replica had come. The next round continues B from there.
        """
        taken, longest = torch.arange(len(requests)), None
        with self.timers.phase(self.role_groups.model_role, "exchange"):
            if wanted < len(requests):
                taken, longest = self.rollout.earliest_groups(batch, requests, wanted)
            if self.settings.partial_rollouts:
                batch, new_tokens = self.partial_rollouts.keep_unfinished(batch, requests, taken, longest)
                self._counts["tokens"] += new_tokens
        if wanted < len(requests):
            is_taken = torch.zeros(len(requests), dtype=torch.bool).index_fill(0, taken, True)
            batch = batch.renumbered(groups_of(requests).expand(is_taken))
        requests = [requests[i] for i in taken.tolist()]
        if self.settings.thinking_budget is not None:
            self._counts["taken"] += len(batch)
            self._counts["cut"] += forced_responses(batch)
        if self.settings.partial_rollouts:
            self.rollout.recompute_routes(batch, requests)
        else:
            self._counts["tokens"] += int(batch.response_mask.sum())
        return requests, batch

    def _set_metrics(self, waiting_groups: int):
        self.metrics = self.rollout.generation_metrics()
        own = [self._counts[name] for name in ("tokens", "taken", "cut")]
        counted = torch.tensor(own, dtype=torch.int64, device=device.device())
        self.metrics["rollout/tokens"], taken, cut = self.role_groups.dp_all_reduce(counted).tolist()
        if taken:
            self.metrics["rollout/thinking_cut_fraction"] = cut / taken
        if isinstance(self.order, MixtureOrder):
            drawn = zip(self.prompts.entries, self.order.counts, strict=True)
            self.metrics |= {f"mixture/{entry.name}/prompts": count for entry, count in drawn}
        if self.pools is not None:
            self.metrics |= self.pools.metrics()
        if self.settings.partial_rollouts:
            self.metrics |= self.partial_rollouts.metrics()
        if self.settings.group_filter != "none":
            self.metrics |= {
                "sampling/rounds": self._counts["rounds"],
                "sampling/groups": self._counts["groups"],
                "sampling/kept_fraction": self._counts["kept"] / self._counts["groups"],
                "sampling/reward_mean": self._counts["reward_sum"] / max(self._counts["responses"], 1),
                "sampling/waiting_groups": waiting_groups,
            }


# -- saved groups ------------------------------------------------------------------------------------------------------


class SavedRollout(Rollout):
    """The rollout's ranks without an engine and without weights."""

    def __init__(self, settings: Settings, role: RoleSettings, mesh: RoleMesh, timers: Timers):
        self.settings, self.role, self.timers = settings, role, timers
        self.mesh, self.role_groups = mesh, mesh[ROLLOUT]
        self.metrics: dict[str, float] = {}
        self.bank = self.episodes = self.guests = self.scheduled = self._weight_sync = self.model = None

    @property
    def recorded_layers(self) -> tuple[int, ...] | None:
        """Numbers of the MoE layers whose routes this rank holds: all of them on a replica's first pipeline stage."""
        if self.settings.router_replay != "rollout":
            return None
        is_first = self.role_groups.is_member and dist.get_rank(self.role_groups.pg_collection.pp) == 0
        return RoutedLayers.of(self.role.megatron).numbers if is_first else ()

    def load_weights(self):
        """There are no weights to copy."""

    def sync_weights(self, step: int, has_trained: bool):
        """As `load_weights`."""

    def generation_metrics(self) -> dict[str, float]:
        """Nothing is generated; the metrics of the generation are in the record of the step."""
        return {}


class SavedGroupCollector(GroupCollector):
    """Fills the group buffer with the saved groups of each step. Rewards and baselines are computed again."""

    def __init__(self, saved: SavedRollouts, rollout, prompts: PromptSet, prompt_tokens: Ragged, scorer, announcements):
        """Arguments after `saved` as of `GroupCollector`, with a `SavedRollout`."""
        super().__init__(rollout, prompts, prompt_tokens, scorer, announcements)
        self._saved, self._step = saved, 0  # the step that is read

    def check_start(self, step: int):
        """UsageError unless the groups that waited when the first step was generated also wait now."""
        waits, needed = len(self.group_buffer), self._saved.records[step].waiting
        if waits not in (needed, self.settings.prompts_per_step):
            raise UsageError(
                f"--load-rollouts {self._saved.path}: {needed} groups waited from earlier steps when step {step} was "
                f"generated, and {waits} do now; start from that step's checkpoint, or from the first step",
                self.role_groups.ranks.start,
            )
        self.partial_rollouts.clear()  # what continues them is in the files

    def _run_rounds(self, step: int):
        record, self._step = self._saved.records[step], step
        for number in range(len(record.rounds)):
            self._accept(self._read(step, number), step)
        self._counts["tokens"] = record.tokens if self.role_groups.dp_rank == 0 else 0
        self.order.load_state_dict(record.order)

    def _read(self, step: int, number: int) -> GenerationRound:
        record, s, role_groups = self._saved.records[step], self.settings, self.role_groups
        lines, kept = record.rounds[number]["lines"], record.rounds[number]["kept"]
        fields = generated_fields(s)
        versions = [VERSIONS] if self._has_versions else []  # of one policy, none were written
        with self.timers.phase(role_groups.model_role, "read"):
            layers = self.rollout.recorded_layers
            groups = PromptGroups(self.prompts.group_sizes(lines, s.samples_per_prompt))
            responses = self._saved.read(record, number, RESPONSES, fields, layers, role_groups, groups, versions)
            if self._has_versions and responses.versions is None:
                version = self.versions.of_step(step)[0]
                responses.versions = torch.full_like(responses.tokens, version, dtype=torch.int32)
            greedy, single = None, PromptGroups.equal(len(lines), 1)
            if s.greedy_baseline:
                greedy = self._saved.read(record, number, GREEDY, fields, None, role_groups, single)
        return GenerationRound(lines=lines, batch=responses, greedy=greedy, kept=kept)

    def _set_metrics(self, waiting_groups: int):
        super()._set_metrics(waiting_groups)
        self.metrics |= self._saved.records[self._step].metrics
