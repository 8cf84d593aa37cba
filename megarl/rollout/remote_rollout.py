"""The rollout of a program without the policy: a server generates, each replica's leader asks for its share."""

import dataclasses
import functools
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

from megarl.algorithms.token_sampling import SamplingSettings
from megarl.arguments import Settings
from megarl.batch import Batch
from megarl.comm.role_mesh import RoleMesh
from megarl.data.prompts import PromptSet
from megarl.mcore.inference.engine import RequestList, RequestSource
from megarl.mcore.inference.generation import Completion, GenerationRequest
from megarl.observe import activity
from megarl.observe.timers import Timers
from megarl.rollout.episodes.runner import EpisodeRunner
from megarl.rollout.remote_generator import RemoteGenerator
from megarl.rollout.requests import PromptRequest, RoundRequests, sampling_of
from megarl.rollout.response_ends import ResponseEnds
from megarl.tool_formats.thinking_budget import ThinkingBudget

_WAIT_SECONDS = 0.02  # for a completion, before environments are looked at again


class RemoteRollout:
    """Generates what `Rollout` would: a request has the same random stream wherever it runs."""

    max_requests = 64  # of turns, at a time

    def __init__(
        self, settings: Settings, mesh: RoleMesh, generator: RemoteGenerator, ends: ResponseEnds, timers: Timers,
        episodes: EpisodeRunner | None = None, thinking: ThinkingBudget | None = None,
    ):  # fmt: skip
        """`generator`: of the leader's requests; `episodes`: runs the environments; None: one turn; `thinking`: the
        budget of each response, or turn; None: none."""
        self.thinking, self.settings, self.role_groups, self.episodes = thinking, settings, mesh["rollout"], episodes
        self._generator, self._ends, self.timers = generator, ends, timers

    def load_weights(self):
        """Does nothing: the server has the weights."""

    def generate(
        self, prompts: list[PromptRequest], step: int, temperature: float, prompt_set: PromptSet | None = None
    ) -> Batch | None:
        """Generates the responses to each prompt; returns this replica's share.

        `temperature` 0 is greedy. `prompt_set`: the set whose lines the prompts are, for environments.
        """
        role_groups, s = self.role_groups, self.settings
        if not role_groups.is_member:
            return None
        sampling = sampling_of(s, temperature)
        with self.timers.phase(role_groups.model_role, "rollout"):
            requests = RoundRequests(prompts, s.seed, step, self.thinking, prompt_set=prompt_set)
            ids = requests.assigned_to(role_groups.dp_rank, len(role_groups.replicas))
            built, done = requests.build(ids), None
            if self.episodes is not None:
                source = RequestList(zip(ids, built, strict=True))
                stream = functools.partial(self._stream, sampling=sampling)
                self.episodes.run(stream, source, requests, 2 * self.max_requests, is_training=False)
                return self.episodes.settle(None)
            if role_groups.is_leader:
                done = self._generated(built, sampling)
            for i, completion in zip(ids, role_groups.broadcast_object(done), strict=True):
                requests.take(i, completion, None)
            return requests.to_batch()

    def _generated(self, requests: list[GenerationRequest], sampling: SamplingSettings) -> list[Completion]:
        """The server's answers; the run's stop strings end responses to requests without own ones."""
        own, matcher = functools.partial(dataclasses.replace, sampling=sampling), self._ends.matcher
        stops = [matcher if request.stops is None else request.stops for request in requests]
        asked = zip(requests, stops, strict=True)
        return self._generator.generate([own(each, end_ids=self._ends.ids, stops=of_one) for each, of_one in asked])

    def _stream(
        self, source: RequestSource, sampling: SamplingSettings, max_requests: int, response_limit: None
    ) -> Iterator[tuple[int, Completion]]:
        """Has all requests of a source answered; yields (request number, completion) as each ends, on all ranks of the
        replica. Arguments as of `RolloutEngine.stream`; limits are for training."""
        running: dict[Future, int] = {}  # on the leader
        count, most = 0, min(max_requests, self.max_requests)
        with activity.limited(), ThreadPoolExecutor(self.max_requests) as pool:
            while count or not source.is_empty():
                for number, request in source.take(most - count) if count < most and not source.is_empty() else ():
                    count += 1
                    if self.role_groups.is_leader:
                        running[pool.submit(self._generated, [request], sampling)] = number
                if not count:
                    source.wait()
                    continue
                ended = self.role_groups.broadcast_object(_take_ended(running))
                count -= len(ended)
                yield from ended


def _take_ended(running: dict[Future, int]) -> list[tuple[int, Completion]]:
    """(number, completion) of the requests that have ended, in the order of their numbers; removes them."""
    ended, _ = wait(running, _WAIT_SECONDS, FIRST_COMPLETED)
    return sorted(((running.pop(future), future.result()[0]) for future in ended), key=lambda each: each[0])
