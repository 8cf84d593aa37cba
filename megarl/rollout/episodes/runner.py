"""Runs the episodes of a round: one for each sample of each prompt, on this replica's share of them."""

import functools
import time
from pathlib import Path

import torch

from megarl.algorithms.counter_rng import stream_keys
from megarl.algorithms.sampling_settings import SamplingSettings
from megarl.arguments import Settings
from megarl.batch import Batch
from megarl.checkpoint import folders
from megarl.comm.role_mesh import RoleGroups
from megarl.data.conversations import Encoder
from megarl.data.prompts import PromptSet
from megarl.data.turns import TurnTokens
from megarl.environments.pool import PoolOptions
from megarl.environments.protocol import Task
from megarl.errors import TooManyFailures
from megarl.mcore import device
from megarl.mcore.inference.engine import RequestSource, RolloutEngine
from megarl.mcore.inference.generation import GenerationRequest
from megarl.roles.reward_metrics import FailureWindow, reasons_text
from megarl.rollout.episodes.batch import episodes_to_batch
from megarl.rollout.episodes.client import EnvironmentClient
from megarl.rollout.episodes.episode import Episode, EpisodeLimits
from megarl.rollout.episodes.source import EpisodeSource
from megarl.rollout.episodes.statistics import EpisodeStatistics, metrics_of
from megarl.rollout.requests import RoundRequests

JOURNAL = "journal"  # folder in that of the run
_NAME = "environment"  # of what fails, in the window of failures
# Streams of the environments' seeds: far from those of samples, which have one stream each.
_GROUP_STREAM, _SAMPLE_STREAM = 1 << 40, 1 << 41


def limits_of(settings: Settings) -> EpisodeLimits:
    """The budgets of the flags."""
    longest = settings.max_response_length
    return EpisodeLimits(settings.max_turns, min(settings.max_turn_length or longest, longest), longest)


class EpisodeRunner:
    """The environments of a replica of the rollout, on all of its ranks; only the leader has the processes."""

    def __init__(self, settings: Settings, role_groups: RoleGroups, encoder: Encoder, run: Path | None = None):
        """`encoder`: the policy's; `run`: folder of the run, which keeps finished steps of environments until the next
        checkpoint; None: they are not kept."""
        self.settings, self.role_groups = settings, role_groups
        s, self.limits = settings, limits_of(settings)
        self.client: EnvironmentClient | None = None
        # Episodes of the last `run` and the set of their prompts, on the leader.
        self.ended: tuple[list[Episode], PromptSet] | None = None
        self._end_ids = encoder.tokenizer.end_ids
        self._window = FailureWindow(s.environment_max_failures)
        self._of_step = EpisodeStatistics()  # of training episodes since the last `take_metrics`
        if role_groups.is_leader:
            options = PoolOptions(
                workers=s.environment_workers, timeout=s.environment_timeout, retries=s.environment_retries,
                parser=s.tool_call_parser, default=s.environment,
            )  # fmt: skip
            self.client = EnvironmentClient(
                options, TurnTokens(encoder, s.max_observation_length), self.limits, s.max_prompt_length,
                journal=None if run is None else run / JOURNAL, replica=role_groups.dp_rank,
                replicas=len(role_groups.replicas),
            )  # fmt: skip

    def run(
        self, engine: RolloutEngine, source: RequestSource, requests: RoundRequests, prompts: PromptSet,
        sampling: SamplingSettings, records_routes: bool, max_open: int | None, is_training: bool,
    ) -> Batch:  # fmt: skip
        """Runs this replica's episodes to their ends; returns them as a batch. A collective of the replica.

        Args:
            source: of the requests for first turns, numbered by sequence id.
            prompts: the set whose lines the requests name.
            records_routes: completions have the experts of their tokens.
            max_open: episodes that may be open at a time; None: twice as many as the engine holds, so that it has work
                while environments answer.
            is_training: journal the answers, and count them in the step's metrics.

        Raises:
            TooManyFailures: environments failed in more of the latest episodes than `--environment-max-failures`
                allows.
        """
        start, self.ended = time.perf_counter(), None
        begin = functools.partial(self._begin, requests, prompts, is_training)
        max_open = 2 * engine.max_requests if max_open is None else max_open
        episodes = EpisodeSource(source, begin, self.client, self.role_groups, max_open)
        for number, completion in engine.stream(episodes, self._end_ids, sampling, records_routes, max_open):
            episodes.turn_ended(number, completion)
        if self.client is not None:
            own = self.client.take_statistics()
            own.add_episodes(episodes.ended)
            own.add_times(episodes.waiting_seconds, time.perf_counter() - start)
            self.ended = episodes.ended, prompts
            self._check_failures(own)
            if is_training:
                self._of_step.add(own)
        return episodes_to_batch(episodes.ended, engine.empty_routes if records_routes else None)

    def take_metrics(self) -> dict[str, float]:
        """`environment/…` of the training episodes since the last call, on replica leaders; {} elsewhere. A collective
        of the leaders."""
        own, self._of_step = self._of_step, EpisodeStatistics()
        return metrics_of(own, self.role_groups) if self.client is not None else {}

    def discard_journal(self, run: Path):
        """Forgets what environments answered in steps up to the run's latest checkpoint, which has what came of it."""
        latest = folders.named(run / "checkpoints", folders.LATEST)
        if self.client is not None and self.client.journal is not None and latest is not None:
            step = folders.step_of(latest)
            self.client.journal.discard(lambda key: int(key.partition("/")[0]) <= step)

    def close(self):
        """Ends the environments."""
        if self.client is not None:
            self.client.close()

    def _begin(
        self, requests: RoundRequests, prompts: PromptSet, is_training: bool, number: int, request: GenerationRequest
    ) -> Episode:
        """Makes an episode; on the leader, starts its environment."""
        asked = requests.prompts[number // requests.samples]
        if self.client is not None:
            sample = asked.draw_index * requests.samples + number % requests.samples
            prompt, step = prompts[asked.line], requests.step_of(number)
            task = Task(
                messages=[dict(message) for message in prompt.conversation],
                answer=prompt.answer,
                metadata=prompt.metadata or {},
                task=prompt.task,
                seed=self._seed(step, asked.line, _GROUP_STREAM + asked.draw_index),
                sample_seed=self._seed(step, asked.line, _SAMPLE_STREAM + sample),
            )
            key = f"{step}/{asked.line}/{sample}" if is_training else None
            self.client.begin(number, prompt, list(request.prompt), task, key)
        return Episode(number=number, request=request, line=asked.line, limits=self.limits)

    def _seed(self, step: int, line: int, stream: int) -> int:
        """A seed of 63 bits."""
        numbers = torch.tensor([line]), torch.tensor([stream])
        return int(stream_keys(self.settings.seed, step, *numbers)) & ((1 << 63) - 1)

    def _check_failures(self, own: EpisodeStatistics):
        """TooManyFailures if too many environments failed. A collective of the replica leaders."""
        counts = torch.tensor([own.counts["episodes"], own.counts["failed"]], dtype=torch.float64)
        episodes, failed = self.role_groups.dp_all_reduce(counts.to(device.device())).tolist()
        self._window.add(int(episodes), {_NAME: int(failed)})
        if self._window.exceeded(_NAME):
            text = reasons_text(own.failures, self.role_groups)
            raise TooManyFailures(
                f"environments failed in {self._window.failed[_NAME]} of {self._window.samples} episodes; "
                f"--environment-max-failures allows {self._window.allowed:g} of them; {text}"
            )
