"""The rollout engine of a replica as a server uses it: requests come and go, and a pause leaves it without a cache.

A paused request goes on afterwards (`mcore.inference.response`): under the same weights its text is the same to the
bit; under other weights, its next tokens are those of the new policy.
"""

import contextlib
from collections.abc import Callable, Iterable
from typing import Literal

from megarl.algorithms.token_sampling import SamplingSettings
from megarl.mcore.inference.engine import RolloutEngine
from megarl.mcore.inference.generation import Completion, GenerationRequest, TokenChunk
from megarl.mcore.inference.generation_session import GenerationSession
from megarl.mcore.inference.response import Response

# wait: running requests end first; abort: they end at once; keep: they stop, and go on after `resume`.
PauseMode = Literal["wait", "abort", "keep"]


class ServedEngine:
    """The engine of one replica; all of its ranks make the same calls. Replicas that share experts step together.

    It is paused at first. While it is paused, its cache holds nothing, so the weights may change.
    """

    def __init__(
        self, engine: RolloutEngine, end_ids: tuple[int, ...], routes: bool = False,
        load_weights: Callable[[str], None] | None = None,
    ):  # fmt: skip
        """
        Args:
            end_ids: of requests without own ones.
            routes: last chunks have the experts that were chosen for the tokens.
            load_weights: loads a folder's weights into the engine's model; None: `update_weights` is not allowed.
        """
        self.rollout_engine, self.version = engine, 0  # of the weights
        self._end_ids, self._routes, self._load_weights = end_ids, routes, load_weights
        self._session: GenerationSession | None = None  # None: paused
        self._leave_session = contextlib.ExitStack()
        self._responses: dict[int, Response] = {}  # by number, in the order of arrival

    def __len__(self) -> int:
        return len(self._responses)

    @property
    def is_paused(self) -> bool:
        """Whether it generates nothing until `resume`."""
        return self._session is None

    @property
    def has_room(self) -> bool:
        """Whether one more request may be added; aborted ones take a place until the next step."""
        return len(self if self._session is None else self._session) < self.rollout_engine.max_requests

    @property
    def needs_steps(self) -> bool:
        """Whether a step has something to do, if only to free the cache of aborted requests."""
        return self._session is not None and len(self._session) > 0

    def add(self, number: int, request: GenerationRequest):
        """Adds a request under a new number; there must be room."""
        self._responses[number] = Response(request)
        if self._session is not None:
            self._session.add(number, request)

    def abort(self, numbers: Iterable[int]):
        """Drops requests; nothing more is reported of them. Their cache is free after the next step."""
        known = [number for number in numbers if self._responses.pop(number, None)]
        if self._session is not None:
            self._session.abort(known)

    def step(self) -> list[TokenChunk]:
        """Runs one step; returns the new tokens of each request that got some or ended. RuntimeError while paused."""
        if self._session is None:
            raise RuntimeError("the engine is paused: resume it first")
        with self._session.inference():
            finished = self._session.step()
        chunks = [self._last_chunk(number, completion) for number, completion in finished]
        reported = {number: response.new for number, response in self._responses.items()}
        for chunk in self._session.new_tokens(reported):
            self._responses[chunk.number].add(chunk.tokens, chunk.logprobs, self.version)
            chunks.append(chunk)
        return [chunk._replace(version=self.version) for chunk in chunks]

    def _last_chunk(self, number: int, completion: Completion) -> TokenChunk:
        start, top = self._responses.pop(number).new, completion.top_logprobs
        return TokenChunk(
            number=number, tokens=completion.tokens[start:], logprobs=completion.logprobs[start:],
            top_logprobs=top and top[start:], finish_reason="stop" if completion.finished else "length",
            routes=completion.routes,
        )  # fmt: skip

    def pause(self, mode: PauseMode = "keep") -> list[TokenChunk]:
        """Frees the cache until `resume`; returns the rest (wait) or the end (abort) of all requests."""
        chunks: list[TokenChunk] = []
        while mode == "wait" and self.needs_steps:
            chunks += self.step()
        if self._session is not None:
            self._session.clear()
            self._session = None
            self._leave_session.close()
        if mode == "abort":
            chunks += [TokenChunk(n, [], [], finish_reason="abort", version=self.version) for n in self._responses]
            self._responses.clear()
        return chunks

    def resume(self):
        """Goes on with all requests."""
        if self._session is None:
            session = self.rollout_engine.session(self._end_ids, SamplingSettings(), self._routes)
            self._session = self._leave_session.enter_context(session)
            for number, response in self._responses.items():
                self._session.add(number, response.go_on())

    def update_weights(self, path: str):
        """Loads weights from a folder; running requests go on with them. Collective.

        Raises:
            UsageError: no such folder, or weights of another model; the old ones stay.
        """
        if self._load_weights is None:
            raise RuntimeError("this server was made without a source of weights")
        was_paused = self.is_paused
        self.pause()
        try:
            self._load_weights(path)
            self.version += 1
        finally:
            if not was_paused:
                self.resume()
