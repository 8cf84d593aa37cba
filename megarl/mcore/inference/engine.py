"""The rollout engine: Megatron's dynamic inference engine on the actor's own parameters.

Requests of unequal length are batched continuously; each samples its tokens from its own random stream.
"""

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from megarl.algorithms.token_sampling import SamplingSettings
from megarl.data.detokenizer import StopMatcher
from megarl.mcore import device
from megarl.mcore.inference.built_engine import BuiltEngine
from megarl.mcore.inference.generation import Completion, GenerationRequest
from megarl.mcore.inference.generation_session import ANY_STEP, NONE, WAIT, GenerationSession
from megarl.mcore.kernels.linear import prepacked_weights
from megarl.mcore.model.forward_pass import eval_mode

# On CUDA a step in which requests join is not a graph and takes several times as long as others. Therefore requests
# wait until a sixteenth of the places is free, and join together.
JOIN_SHARE = 16
POLL_STEPS = 16  # engine steps between two calls of `response_limit` or `interrupt`


class RequestSource(Protocol):
    """Source of the engine's requests. All ranks of a replica call it at the same steps and get the same results."""

    def take(self, room: int) -> list[tuple[int, GenerationRequest]]:
        """Returns at most `room` more requests, each with its number; none if none are available now."""

    def is_empty(self) -> bool:
        """Whether `take` will return no more requests."""

    def wait(self):
        """Waits a while for requests; called when nothing runs, on this replica and on those that share experts."""


class RequestList:
    """A source of numbered requests that are known in advance."""

    def __init__(self, requests: Iterable[tuple[int, GenerationRequest]]):
        self._queue = deque(requests)

    def take(self, room: int) -> list[tuple[int, GenerationRequest]]:
        return [self._queue.popleft() for _ in range(min(room, len(self._queue)))]

    def is_empty(self) -> bool:
        return not self._queue

    def wait(self):
        """There is nothing to wait for."""


class RolloutEngine(BuiltEngine):
    """Generates with continuous batching on the actor's own model; suspended except inside `stream`."""

    interrupted = 0  # what ended the last `stream`: above 0, its `interrupt`

    def generate(
        self,
        requests: list[GenerationRequest],
        end_ids: tuple[int, ...],
        settings: SamplingSettings,
        routes: bool = False,
    ) -> list[Completion]:
        """Returns one completion per request, in order. All ranks of a replica call it with the same requests.

        Args:
            end_ids: tokens that end a response.
            routes: also return which experts were chosen for each token (arXiv 2510.11370 §3).

        Raises:
            RuntimeError: the routes of some token are missing.
        """
        done = dict(self.stream(RequestList(enumerate(requests)), end_ids, settings, routes))
        return [done[number] for number in range(len(requests))]

    def stream(
        self,
        source: RequestSource,
        end_ids: tuple[int, ...],
        settings: SamplingSettings,
        routes: bool = False,
        max_requests: int | None = None,
        response_limit: Callable[[], int | None] | None = None,
        interrupt: Callable[[], int] | None = None,
    ) -> Iterator[tuple[int, Completion]]:
        """Generates responses to all requests of a source; yields (request number, completion) as each ends.

        The engine resumes at the first item and suspends after the last one, or when the iterator is closed, which
        drops unfinished requests. Between items, this rank may run forward passes of any model, but must not update
        this one. It must not call collectives that wait for a replica which shares experts with this one, because
        that replica's engine waits for this engine.

        Args:
            source: returns the same requests on all ranks of a replica.
            end_ids, routes: as in `generate`.
            max_requests: maximum number of requests in the engine at a time; default: as many as it can hold.
            response_limit: called every `POLL_STEPS` steps; returns the maximum response length in tokens from now
                on, None: that of each request. It may decrease: longer responses end soon, with their tokens so far.
            interrupt: called every `POLL_STEPS` steps; above 0, it ends the stream, which then yields all requests in
                the engine with their tokens so far and without routes. `interrupted` is its last result, the highest of
                the replicas that share experts.
        """
        self._steps = self.interrupted = 0
        self._max_response: int | None = None
        with self.session(end_ids, settings, routes, self.stops) as session:
            max_requests = min(max_requests or self.max_requests, self.max_requests)
            while finished := self._run_until_finished(session, source, max_requests, response_limit, interrupt):
                if self.interrupted:
                    session.clear()  # the engine must not hold requests when it is suspended
                yield from finished
                if self.interrupted:
                    return

    @contextlib.contextmanager
    def session(
        self,
        end_ids: tuple[int, ...] = (),
        settings: SamplingSettings = SamplingSettings(),
        routes: bool = False,
        stops: StopMatcher | None = None,
    ) -> Iterator[GenerationSession]:
        """Context in which the engine runs, without requests at first. Arguments as in `generate`; `stops`: the stop
        strings of requests without own ones."""
        self.engine.resume()
        try:
            with eval_mode(self.model), self._cache_present(), prepacked_weights(self.model, self.prediction):
                self.engine.device_decode.begin()
                yield GenerationSession(self, end_ids, settings, routes, stops)
        finally:
            self.engine.suspend()

    def _run_until_finished(
        self,
        session: GenerationSession,
        source: RequestSource,
        max_requests: int,
        response_limit: Callable[[], int | None] | None,
        interrupt: Callable[[], int] | None,
    ) -> list[tuple[int, Completion]]:
        """Runs steps until some requests finish and returns their completions; empty when all requests are done."""
        with session.inference():
            while True:
                self._steps += 1
                if response_limit and self._steps % POLL_STEPS == 0:
                    self._max_response = response_limit()
                if interrupt and self._steps % POLL_STEPS == 0:
                    self.interrupted = session.highest_of_replicas(interrupt())
                    if self.interrupted:
                        return session.unfinished()
                session.limit_responses(self._max_response)
                self._admit(session, source, max_requests)
                own = session.wanted_step if len(session) else NONE if source.is_empty() else WAIT
                agreed = session.highest_of_replicas(own)
                if agreed == NONE:
                    return []
                if agreed == WAIT:
                    source.wait()
                    continue
                if agreed == ANY_STEP and self.is_coupled:  # no graph on any replica, probably since requests join
                    self._admit(session, source, max_requests, join_others=True)
                if finished := session.step(agreed):
                    return finished

    def _admit(self, session: GenerationSession, source: RequestSource, max_requests: int, join_others: bool = False):
        """Adds requests up to `max_requests`; none while some wait for cache, since another replica may start them.

        `join_others`: also few, because the next step is not a graph in any case.
        """
        room = 0 if self.engine.waiting_request_ids else max_requests - len(session)
        if room <= 0 or source.is_empty():
            return
        if join_others or room >= max_requests // JOIN_SHARE or not len(session) or not device.has_cuda():
            for number, request in source.take(room):
                session.add(number, request)
