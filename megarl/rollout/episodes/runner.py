"""Runs the episodes of a round: one for each sample of each prompt, on this replica's share of them."""

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from megarl.algorithms.token_sampling import stream_keys
from megarl.arguments import Settings
from megarl.batch import Batch
from megarl.checkpoint import folders
from megarl.comm.announcements import ResponseSender
from megarl.comm.role_mesh import RoleGroups
from megarl.data.conversations import Encoder
from megarl.data.detokenizer import StopMatcher
from megarl.data.images.book import ReadBytes
from megarl.data.prompt import Prompt
from megarl.data.prompts import PromptSet
from megarl.data.turns import TurnTokens
from megarl.environments.pool import PoolOptions
from megarl.environments.protocol import Task
from megarl.environments.session_pool import SessionPool
from megarl.errors import TooManyFailures, warn
from megarl.mcore import device
from megarl.mcore.inference.engine import RequestSource
from megarl.mcore.inference.generation import Completion, GenerationRequest
from megarl.measurements import NamesOfRun
from megarl.observe.files import step_of
from megarl.roles.reward_metrics import FailureWindow, reasons_text
from megarl.rollout.bank import AskedRequests, RolloutBank
from megarl.rollout.episodes.agent_episode import AgentEpisode
from megarl.rollout.episodes.client import EnvironmentClient
from megarl.rollout.episodes.episode import Episode, EpisodeLimits, key_of
from megarl.rollout.episodes.episode_source import EpisodeSource
from megarl.rollout.episodes.results import CarriedEpisodes, episodes_to_batch, record_of
from megarl.rollout.request_queue import UNFINISHED, GroupEarlyStop
from megarl.rollout.requests import ResponseEnds, RoundRequests, thinking_budget_of
from megarl.rollout.statistics import EpisodeStatistics, metrics_of
from megarl.tool_formats.chosen_format import name_of

JOURNAL = "journal"  # folder in that of the run
_NAME = "environment"  # of what fails, in the window of failures
# Streams of the environments' seeds: far from those of samples, which have one stream each.
_GROUP_STREAM, _SAMPLE_STREAM = 1 << 40, 1 << 41


def limits_of(settings: Settings, encoder: Encoder, turns: TurnTokens, own: ResponseEnds) -> EpisodeLimits:
    """The budgets of the flags, and how turns end. `own`: what ends the responses of the run."""
    longest, tokenizer = settings.max_response_length, encoder.tokenizer
    has_others = settings.stop is not None or settings.stop_token_ids is not None

    @functools.lru_cache(64)
    def matcher(stops: tuple[str, ...]) -> StopMatcher | None:
        return StopMatcher(tokenizer, tuple(dict.fromkeys((*own.stops, *stops)))) if stops else None

    return EpisodeLimits(
        turns=settings.max_turns,
        turn=min(settings.max_turn_length or longest, longest),
        response=longest,
        ends=tokenizer.end_ids,
        closing=turns.closing_token() if has_others else None,
        is_carried=settings.partial_rollouts,
        thinking=thinking_budget_of(settings, encoder),
        matcher=matcher,
    )


def _key_in(requests: RoundRequests, number: int) -> str:
    prompt = requests.prompt_of(number)
    return key_of(prompt.step, prompt.line, requests.stream_of(number))


def task_of(prompt: Prompt, seed: int, sample_seed: int, read: ReadBytes) -> Task:
    """What the environment of a prompt begins with. `read`: gives the bytes of an image of the prompt."""
    messages = [dict(message) for message in prompt.conversation]
    images = tuple(dict(bytes=read(ref), width=ref.width, height=ref.height) for ref in prompt.images)
    return Task(messages, prompt.answer, prompt.metadata or {}, prompt.task, seed, sample_seed, images)


class EpisodeRunner:
    """The environments of a replica of the rollout, on all of its ranks; only the leader has the processes."""

    def __init__(
        self,
        settings: Settings,
        role_groups: RoleGroups,
        encoder: Encoder,
        run: Path | None = None,
        sessions: SessionPool | None = None,
    ):
        """
        Args:
            encoder: the policy's.
            run: folder that keeps finished steps of environments until the next checkpoint; None: they are not kept.
            sessions: of `--agent-sessions`, on the leader: they have the episodes in the place of environments.
        """
        self.settings, self.role_groups = settings, role_groups
        s, turns = settings, TurnTokens(encoder, settings.max_observation_length)
        self.turn_tokens = turns
        self._ends, self._images = ResponseEnds(s, encoder.tokenizer), encoder.images
        # The samples of a group share the bytes of its images.
        self._read = functools.lru_cache(64)(encoder.read_image)
        self.limits = limits_of(s, encoder, turns, self._ends)
        self.client: EnvironmentClient | None = None
        # Episodes of the last round that have ended, and the set of their prompts, on the leader.
        self.ended: tuple[list[Episode], PromptSet | None] | None = None
        self._running: list[Episode] = []  # of the last round, in ascending order of their numbers
        self._idle: list[Episode] = []  # of earlier rounds, of which the last one needed no more tokens
        self._is_training = False  # the last round
        self._prompts: PromptSet | None = None  # of the last round
        self._records: dict[str, dict] = {}  # by key, of episodes that have ended, until they are written
        self._window = FailureWindow(s.environment_max_failures)
        self._has_warned = False  # of the first environment that failed
        self._of_step = EpisodeStatistics()  # of training episodes since the last `take_metrics`
        self._part_names = NamesOfRun()
        if role_groups.is_leader:
            parser = name_of(s.tool_call_parser, encoder.template)
            options = PoolOptions(
                s.environment_workers, s.environment_timeout, s.environment_retries, parser, s.environment, self._images
            )
            journal = None if run is None or sessions is not None else run / JOURNAL
            replica, replicas = role_groups.dp_rank, len(role_groups.replicas)
            self.client = EnvironmentClient(
                options, turns, self.limits, s.max_prompt_length, journal, replica, replicas, sessions
            )
        self.carried = CarriedEpisodes(self.limits, self.client)

    def run(
        self, stream: Callable[..., Iterator[tuple[int, Completion]]], source: RequestSource, requests: RoundRequests,
        max_open: int, is_training: bool, early_stop: GroupEarlyStop | None = None,
        sender: ResponseSender | None = None, bank: RolloutBank | None = None,
    ):  # fmt: skip
        """Runs this replica's episodes to their ends, or as far as the earliest groups decide; `settle` ends the round.
        A collective of the replica.

        Args:
            stream: of `RolloutEngine`, to be called with a source and further arguments by name.
            source: of the requests for first turns, numbered by sequence id.
            is_training: journal the answers, and count them in the step's metrics.
            max_open, early_stop, sender: as of `EpisodeSource`.
            bank: has turns that need not be generated, and keeps those that are; None: nothing keeps them.
        """
        start, self.ended = time.perf_counter(), None
        if self.client is not None and self.client.journal is not None:
            self.client.journal.step = requests.step
        begin = functools.partial(self._begin, requests, is_training)
        episodes = EpisodeSource(
            source, begin, self.client, self.role_groups, max_open, early_stop, sender, self._images
        )
        limit = episodes.response_limit if early_stop else None
        asked = AskedRequests(episodes, episodes.turn_ended, bank)
        for number, completion in stream(asked, max_requests=max_open, response_limit=limit):
            asked.ended(number, completion)
        self._running = sorted([*episodes.ended, *episodes.stopped], key=lambda episode: episode.number)
        self._idle = self._idle_of(requests) if is_training else []
        self._is_training, self._prompts = is_training, requests.prompt_set
        if self.client is not None:
            counts, shared = self.client.statistics.counts, episodes.shared_turns
            counts["waiting"] += episodes.waiting_seconds
            counts["running"] += time.perf_counter() - start
            counts["sharable"] += shared.asked
            counts["shared"] += shared.taken

    def _idle_of(self, requests: RoundRequests) -> list[Episode]:
        """The episodes of earlier rounds of which this one needs no more tokens, of this replica."""
        numbers = [number for number, limit in enumerate(requests.limits) if not limit]
        found = {number: self.carried.get(_key_in(requests, number)) for number in numbers}
        return [e.continued(number, e.request) for number, e in found.items() if e is not None]

    def new_lengths(self) -> tuple[Tensor, Tensor]:
        """(sequence ids [N], new tokens of the policy [N], `UNFINISHED` if an episode has not ended) of the last round,
        of this replica."""
        found = [(e.number, UNFINISHED if e.end is None else e.new_tokens) for e in self._running + self._idle]
        numbers, lengths = torch.tensor(found, dtype=torch.int64).view(-1, 2).unbind(1)
        return numbers, lengths

    def settle(self, limit: int | None, empty_routes: Tensor | None = None, version: int | None = None) -> Batch:
        """Ends the round: cuts its episodes to `limit` new tokens, None: to none; returns them as a batch, in which
        some may not have ended. Arguments as of `episodes_to_batch`. A collective of the replica leaders.

        TooManyFailures if environments failed in more of the latest episodes than `--environment-max-failures` allows.
        """
        episodes = self._running + self._idle
        for episode in episodes:
            episode.settle(limit)
        if self.client is not None:
            self._end_round(self.client)
        if self._is_training and self.settings.partial_rollouts:
            self.carried.add(episodes)
        batch = episodes_to_batch(episodes, empty_routes, self.limits.thinking is not None, version)
        for episode in episodes:
            episode.routes = None  # they are large, and the batch has them
        return batch

    def _end_round(self, client: EnvironmentClient):
        """Counts the episodes that have ended, and keeps the environments of those that a later round continues."""
        keeps, own = self._is_training and self.settings.partial_rollouts, client.take_statistics()
        for episode in self._running:
            if episode.end is None and keeps:
                client.keep(episode.number, episode.key, episode.complete_turns)
                continue
            seen = client.take_played(episode.number)
            if episode.end is not None:
                rewritten = 0 if seen.tree is None else seen.tree.rewritten
                own.add_episode(episode, seen.turns, seen.observations, rewritten)
            if episode.end is not None and self._is_training and self.settings.save_rollouts:
                self._records[episode.key] = record_of(episode, seen)
        self.ended = [episode for episode in self._running if episode.end is not None], self._prompts
        self._check_failures(own)
        if self._is_training:
            self._of_step.add(own)

    def take_records(self, keys: Sequence[str]) -> dict[int, dict]:
        """What is kept of the episodes of these keys that this replica has run (`record_of`), by their numbers.

        Records of other episodes are forgotten unless a later round continues these.
        """
        found = {number: self._records.pop(key) for number, key in enumerate(keys) if key in self._records}
        self._records = {key: record for key, record in self._records.items() if self.carried.get(key) is not None}
        return found

    def take_metrics(self) -> dict[str, float]:
        """`environment/…` of the training episodes since the last call, on replica leaders; {} elsewhere. A collective
        of the leaders."""
        own, self._of_step = self._of_step, EpisodeStatistics()
        return metrics_of(own, self.role_groups, self._part_names) if self.client is not None else {}

    def discard_journal(self, run: Path):
        """Forgets what environments answered in steps up to the run's latest checkpoint, which has what came of it."""
        latest = folders.named(run / "checkpoints", folders.LATEST)
        if self.client is not None and self.client.journal is not None and latest is not None:
            self.client.journal.discard(step_of(latest))

    def close(self):
        if self.client is not None:
            self.client.close()

    def _begin(self, requests: RoundRequests, is_training: bool, number: int, request: GenerationRequest) -> Episode:
        """Makes an episode or continues that of an earlier round; on the leader, with its environment."""
        asked, key = requests.prompt_of(number), _key_in(requests, number) if is_training else None
        before = self.carried.get(key) if key is not None and asked.lengths else None
        if self.client is not None:
            prompt = requests.prompt_set[asked.line]
            task = self.task(requests, number, prompt)
            if before is None:
                self.client.begin(number, prompt, request, task, key)
            elif isinstance(before, AgentEpisode):
                of_line = dataclasses.replace(request, prompt=before.line_prompt)
                self.client.go_on(number, prompt, task, key, request=of_line)
            else:
                turns = [before.turn_tokens(turn) for turn in range(before.complete_turns)]
                self.client.go_on(number, prompt, task, key, turns)
        if before is not None:
            return before.continued(number, request)
        return Episode(number=number, request=request, line=asked.line, limits=self.limits, key=key)

    def task(self, requests: RoundRequests, number: int, prompt: Prompt) -> Task:
        """What the environment of an episode begins with."""
        asked = requests.prompt_of(number)
        sample = requests.trunk_of(number)  # so that environments answer the samples of a branch alike
        of_group = self._seed(asked.step, asked.line, _GROUP_STREAM + asked.draw_index)
        return task_of(prompt, of_group, self._seed(asked.step, asked.line, _SAMPLE_STREAM + sample), self._read)

    def _seed(self, step: int, line: int, stream: int) -> int:
        key = stream_keys(self.settings.seed, step, torch.tensor([line]), torch.tensor([stream]))
        return int(key) & ((1 << 63) - 1)

    def _check_failures(self, own: EpisodeStatistics):
        """TooManyFailures if too many environments failed. A collective of the replica leaders."""
        counts = torch.tensor([own.counts["episodes"], own.counts["failed"]], dtype=torch.float64)
        episodes, failed = self.role_groups.dp_all_reduce(counts.to(device.device())).tolist()
        self._window.add(int(episodes), {_NAME: int(failed)})
        if own.failures and not self._has_warned:
            self._has_warned = True
            warn([f"{own.failures[0]}; such episodes are not trained on (--environment-max-failures)"])
        if self._window.exceeded(_NAME):
            text = reasons_text(own.failures, self.role_groups)
            raise TooManyFailures(
                f"environments failed in {self._window.failed[_NAME]} of {self._window.samples} episodes; "
                f"--environment-max-failures allows {self._window.allowed:g} of them; {text}"
            )
