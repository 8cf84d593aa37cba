"""The policy of a replica as a server uses it: its rollout engine, and scores of sequences.

Requests of `ServedEngine` come and go, and a pause leaves it without a cache. A paused request goes on afterwards
(`mcore.inference.generation`): under the same weights its text is the same to the bit; under other weights, its next
tokens are those of the new policy.
"""

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

import torch

from megarl.algorithms.token_sampling import SamplingSettings
from megarl.batch import Batch
from megarl.comm.microbatches import blank_sequences, build_microbatches
from megarl.mcore import device
from megarl.mcore.inference.engine import RolloutEngine
from megarl.mcore.inference.generation import Completion, GenerationRequest, Response, TokenChunk
from megarl.mcore.inference.generation_session import GenerationSession
from megarl.mcore.model.forward_pass import top_scores
from megarl.roles.trainable_model import forward_only
from megarl.serving.replica_messages import RequestUpdate, ScorePrompt

# wait: running requests end first; abort: they end at once; keep: they stop, and go on after `resume`.
PauseMode = Literal["wait", "abort", "keep"]


class ServedEngine:
    """The engine of one replica; all of its ranks make the same calls. Replicas that share experts step together.

    It is paused at first. While it is paused, its cache holds nothing, so the weights may change.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        end_ids: tuple[int, ...],
        routes: bool = False,
        load_weights: Callable[[str], None] | None = None,
    ):
        """`end_ids`: of requests without own ones; `routes`: last chunks have the tokens' experts; `load_weights`: of a
        folder, into the engine's model.
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
        tokens, logprobs, finish = completion.tokens[start:], completion.logprobs[start:], completion.finished
        reason = "stop" if finish else "length"
        return TokenChunk(number, tokens, logprobs, top and top[start:], reason, completion.routes)

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
        """Loads weights from a folder; running requests go on with them. Collective. UsageError: the old ones stay."""
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


# -- scores ------------------------------------------------------------------------------------------------------------


def together(requests: Sequence[ScorePrompt], max_tokens: int) -> int:
    """How many of the first requests one pass scores: those with the first one's temperature, and at most
    `max_tokens` tokens if it is more than one."""
    tokens = 0
    for count, request in enumerate(requests):
        tokens += len(request.prompt)
        if count and (tokens > max_tokens or request.temperature != requests[0].temperature):
            return count
    return len(requests)


def score_sequences(model, pg_collection, vocab_size: int, requests: list[ScorePrompt]) -> list[RequestUpdate]:
    """Scores sequences, all of one temperature, in one forward pass of training, with the bits of the rollout.

    All ranks of a replica call it alike. Replicas that share experts call it together, if need be without requests.
    """
    if requests:
        lengths = torch.tensor([len(request.prompt) for request in requests])
        tokens = torch.tensor([token for request in requests for token in request.prompt])
        everything = torch.arange(len(requests))
        batch = Batch(sequence_ids=everything, lengths=lengths, tokens=tokens).to(device.device())
        microbatches = build_microbatches(batch, [everything])
    else:
        blank = blank_sequences(["sequence_ids", "tokens"], device.device())
        microbatches = [(blank, torch.zeros(0, dtype=torch.int64))]
    count = max((request.top_logprobs for request in requests), default=0)
    temperature = requests[0].temperature if requests else 1.0

    def forward(chunk, microbatch):
        return top_scores(chunk, microbatch.tokens, microbatch.host_metadata.lengths, temperature, vocab_size, count)

    (((logprobs, tokens, tops), _),) = forward_only(model, microbatches, forward, pg_collection)
    if not requests:
        return []
    logprobs, tokens, tops = (values.cpu().split(lengths.tolist()) for values in (logprobs, tokens, tops))
    return list(map(_scores, requests, logprobs, tokens, tops))


def _scores(request: ScorePrompt, logprobs, tokens, tops) -> RequestUpdate:
    best: list[list[tuple[int, float]] | None] | None = None
    if count := request.top_logprobs:
        rows = zip(tokens[1:, :count].tolist(), tops[1:, :count].tolist(), strict=True)
        best = [None, *(list(zip(found, values, strict=True)) for found, values in rows)]
    return RequestUpdate(request.id, logprobs=[None, *logprobs[1:].tolist()], top=best, finish="scored")
