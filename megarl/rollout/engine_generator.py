"""The generator on this program's ranks: the rollout engine, which generates while others train or wait."""

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

from megarl.algorithms.sampling_settings import SamplingSettings
from megarl.mcore.inference.engine import RolloutEngine
from megarl.mcore.inference.generation import Completion, GenerationRequest, TokenChunk
from megarl.mcore.inference.served_requests import ServedRequests
from megarl.rollout.api import PauseMode, completions_of


class EngineGenerator:
    """A `Generator` on one replica; all of its ranks make the same calls. Replicas that share experts step together.

    It is paused at first. While it is paused, the engine is suspended and its cache holds nothing, so the weights may
    change.
    """

    def __init__(
        self, engine: RolloutEngine, end_ids: tuple[int, ...], settings: SamplingSettings = SamplingSettings(),
        routes: bool = False, load_weights: Callable[[str], None] | None = None, version: int = 0,
    ):  # fmt: skip
        """
        Args:
            end_ids, settings: of requests without own ones.
            routes: completions have the experts that were chosen for their tokens.
            load_weights: loads a folder's weights into the engine's model; None: `update_weights` is not allowed.
            version: of the present weights.
        """
        self.engine, self.version = engine, version
        self._call, self._load_weights = (end_ids, settings, routes), load_weights
        self._requests, self._session = ServedRequests(), contextlib.ExitStack()
        self._waiting: deque[tuple[int, GenerationRequest]] = deque()  # of `stream`, for room
        self._unreported: deque[TokenChunk] = deque()  # that `stream` has not yielded yet

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def is_paused(self) -> bool:
        """Whether it generates nothing until `resume`."""
        return self._requests.session is None

    @property
    def has_room(self) -> bool:
        """Whether one more request may be added."""
        return self._requests.in_engine < self.engine.max_requests

    @property
    def needs_steps(self) -> bool:
        """Whether a step has something to do, if only to free the cache of aborted requests."""
        return not self.is_paused and self._requests.in_engine > 0

    def add(self, number: int, request: GenerationRequest):
        """Adds a request under a new number; there must be room."""
        self._requests.add(number, request)

    def step(self) -> list[TokenChunk]:
        """Runs one step of the engine; returns what requests got. RuntimeError while it is paused."""
        if self.is_paused:
            raise RuntimeError("the generator is paused: resume it first")
        return [chunk._replace(version=self.version) for chunk in self._requests.step()]

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """Returns one completion per request, in their order."""
        return completions_of(self.stream(requests), len(requests))

    def stream(self, requests: Sequence[GenerationRequest]) -> Iterator[TokenChunk]:
        """Yields the tokens of requests, numbered from 0, as they are generated; no others may be running.

        Between two chunks it may be paused, get other weights, and be resumed.
        """
        self._waiting.extend(enumerate(requests))
        self.resume()
        try:
            while self._waiting or self._requests.in_engine:
                while self._waiting and self.has_room:
                    self.add(*self._waiting.popleft())
                self._unreported.extend(self.step())
                while self._unreported:
                    yield self._unreported.popleft()
        finally:
            self.abort(range(len(requests)))

    def abort(self, numbers: Iterable[int]):
        """Drops requests; nothing more is reported of them."""
        numbers = set(numbers)
        self._requests.abort(numbers)
        self._waiting = deque(item for item in self._waiting if item[0] not in numbers)
        self._unreported = deque(chunk for chunk in self._unreported if chunk.number not in numbers)

    def pause(self, mode: PauseMode = "keep") -> list[TokenChunk]:
        """Suspends the engine; returns chunks that `stream` has not yielded, and the rest (wait) or end (abort) of all
        requests."""
        chunks = list(self._unreported)
        self._unreported.clear()
        while mode == "wait" and self.needs_steps:
            chunks += self.step()
        self._suspend()
        if mode == "abort":
            chunks += [chunk._replace(version=self.version) for chunk in self._requests.abort_all()]
        return chunks

    def _suspend(self):
        if not self.is_paused:
            self._requests.pause()
            self._session.close()

    def resume(self):
        """Continues all requests."""
        if self.is_paused:
            end_ids, settings, routes = self._call
            self._requests.resume(self._session.enter_context(self.engine.session(end_ids, settings, routes)))

    def update_weights(self, path: str) -> int:
        """Loads weights from a folder; running requests continue with them. Returns the new version. Collective.

        Raises:
            UsageError: no such folder, or weights of another model; the old ones stay.
        """
        if self._load_weights is None:
            raise RuntimeError("this generator was made without a source of weights")
        was_paused = self.is_paused
        self._suspend()
        try:
            self._load_weights(path)
            self.version += 1
        finally:
            if not was_paused:
                self.resume()
        return self.version

    def shut_down(self):
        """Drops all requests and suspends the engine."""
        self.pause("abort")
