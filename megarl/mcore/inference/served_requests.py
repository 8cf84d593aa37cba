"""Requests of a service: tokens as they are generated, aborts, and a pause in which the engine holds no cache.

A paused request is resumed as a continuation: its prompt and its tokens so far are the new prompt. Random numbers are
keyed by position, and a prefill computes what decode steps would, so its text is the same; under other
weights, its next tokens are those of the new policy.
"""

import dataclasses
from collections.abc import Iterable

from megarl.mcore.inference.generation import Completion, GenerationRequest, TokenChunk
from megarl.mcore.inference.session import GenerationSession


@dataclasses.dataclass
class _Progress:
    request: GenerationRequest
    tokens: list[int]  # reported so far
    before: int = 0  # of them, tokens that were generated before the request's present stay in the engine

    @property
    def reported(self) -> int:
        """Tokens of the request's present stay that were reported."""
        return len(self.tokens) - self.before

    def continuation(self) -> GenerationRequest:
        """A request for the rest of the response."""
        remaining = self.request.max_new_tokens - len(self.tokens)
        prompt = [*self.request.prompt, *self.tokens]
        return dataclasses.replace(self.request, prompt=prompt, max_new_tokens=remaining)


class ServedRequests:
    """Reports the tokens of requests after each step. All ranks of a replica make the same calls."""

    def __init__(self):
        self.session: GenerationSession | None = None  # None: paused
        self._progress: dict[int, _Progress] = {}  # by number, in the order of arrival

    def __len__(self) -> int:
        return len(self._progress)

    @property
    def in_engine(self) -> int:
        """Requests that take a place in the engine: aborted ones do until the next step."""
        return len(self) if self.session is None else len(self.session)

    def resume(self, session: GenerationSession):
        """Resumes all requests in a session that has none."""
        self.session = session
        for number, progress in self._progress.items():
            progress.before = len(progress.tokens)
            session.add(number, progress.continuation())

    def pause(self):
        """Drops the cache of all requests; `resume` continues them. All of their tokens were reported."""
        self.session.clear()
        self.session = None

    def add(self, number: int, request: GenerationRequest):
        """Adds a request under a new number."""
        self._progress[number] = _Progress(request, [])
        if self.session is not None:
            self.session.add(number, request)

    def abort(self, numbers: Iterable[int]):
        """Drops requests; nothing more is reported of them. Their cache is free after the next step."""
        known = [number for number in numbers if self._progress.pop(number, None)]
        if self.session is not None:
            self.session.abort(known)

    def abort_all(self) -> list[TokenChunk]:
        """Drops all requests; returns their last chunks."""
        numbers = list(self._progress)
        self.abort(numbers)
        return [TokenChunk(number, [], [], finish_reason="abort") for number in numbers]

    def step(self) -> list[TokenChunk]:
        """Runs one step of the engine; returns the new tokens of each request that got some or ended."""
        with self.session.inference():
            finished = self.session.step()
        chunks = [self._last_chunk(number, completion) for number, completion in finished]
        reported = {number: progress.reported for number, progress in self._progress.items()}
        for chunk in self.session.new_tokens(reported):
            self._progress[chunk.number].tokens += chunk.tokens
            chunks.append(chunk)
        return chunks

    def _last_chunk(self, number: int, completion: Completion) -> TokenChunk:
        start, top = self._progress.pop(number).reported, completion.top_logprobs
        return TokenChunk(
            number,
            completion.tokens[start:],
            completion.logprobs[start:],
            top and top[start:],
            "stop" if completion.finished else "length",
            completion.routes,
        )
