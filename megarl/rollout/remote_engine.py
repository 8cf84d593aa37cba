"""The engine of a program whose tokens a server generates: requests of a source out, completions back as they end."""

import dataclasses
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

from megarl.algorithms.token_sampling import SamplingSettings
from megarl.comm.role_mesh import RoleGroups
from megarl.data.stop_strings import StopMatcher
from megarl.mcore.inference.engine import RequestSource
from megarl.mcore.inference.generation import Completion, GenerationRequest
from megarl.observe import activity
from megarl.rollout.remote_generator import RemoteGenerator

_WAIT_SECONDS = 0.02  # for a completion, before environments are looked at again


class RemoteEngine:
    """Has what `RolloutEngine` has for one source of requests at a time, on all ranks of a replica."""

    max_requests = 64  # at a time

    def __init__(self, generator: RemoteGenerator, role_groups: RoleGroups, stops: StopMatcher | None):
        """`generator`: of the leader's requests; `stops`: end all responses but those of requests with their own."""
        self._generator, self._role_groups, self._stops = generator, role_groups, stops

    def stream(
        self, source: RequestSource, end_ids: tuple[int, ...], settings: SamplingSettings, routes: bool = False,
        max_requests: int | None = None, response_limit: Callable[[], int | None] | None = None,
    ) -> Iterator[tuple[int, Completion]]:  # fmt: skip
        """Generates responses to all requests of a source; yields (request number, completion) as each ends.

        Arguments as of `RolloutEngine.stream`, without `routes` and `response_limit`. It raises what
        `RemoteGenerator` raises.
        """
        assert not routes  # routes and limits are for training
        assert response_limit is None
        running: dict[Future, int] = {}  # on the leader
        count, most = 0, min(max_requests or self.max_requests, self.max_requests)
        with activity.limited(), ThreadPoolExecutor(self.max_requests) as pool:
            while count or not source.is_empty():
                for number, request in source.take(most - count) if count < most and not source.is_empty() else ():
                    count += 1
                    if self._role_groups.is_leader:
                        running[pool.submit(self._generate, request, end_ids, settings)] = number
                if not count:
                    source.wait()
                    continue
                ended = self._role_groups.broadcast_object(_take_ended(running))
                count -= len(ended)
                yield from ended

    def _generate(self, request: GenerationRequest, end_ids: tuple[int, ...], settings: SamplingSettings) -> Completion:
        stops = self._stops if request.stops is None else request.stops
        asked = dataclasses.replace(request, sampling=settings, end_ids=end_ids, stops=stops)
        return self._generator.generate([asked])[0]


def _take_ended(running: dict[Future, int]) -> list[tuple[int, Completion]]:
    """(number, completion) of the requests that have ended, in the order of their numbers; removes them."""
    ended, _ = wait(running, _WAIT_SECONDS, FIRST_COMPLETED)
    return sorted(((running.pop(future), future.result()) for future in ended), key=lambda each: each[0])
