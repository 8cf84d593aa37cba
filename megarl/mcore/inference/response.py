"""A response from its first request to its end, through new weights, a server's pause, a round's end.

What it has got is read again as the end of a prompt, so `Response.request` is all that an engine needs to go on. Random
numbers are keyed by position, and a prefill computes what decode steps would: so under the same weights, a response
that was stopped is to the bit what it would have been.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from megarl.mcore.inference.generation import Completion, GenerationRequest


class Span(NamedTuple):
    """Tokens of a response that follow each other and that the same weights have drawn."""

    weights: int | None  # their number, as the caller counts weights; None: not known yet
    tokens: list[int]
    logprobs: list[float]  # of each token
    is_forced: bool = False  # a thinking budget has put them there


@dataclasses.dataclass
class Response:
    """What was asked for, and what there is of it."""

    asked: GenerationRequest  # for all of it
    spans: list[Span] = dataclasses.field(default_factory=list)
    before: int = 0  # tokens that it had when it went on for the last time
    finished: bool = False  # whether an end token or a stop string ends it
    routes: Tensor | None = None  # of prompt and response, once it has ended
    prompt_weights: int | None = None  # with which the prompt was read first; None: nobody asks

    @property
    def length(self) -> int:
        """Tokens so far."""
        return sum(len(span.tokens) for span in self.spans)

    @property
    def tokens(self) -> list[int]:
        return [token for span in self.spans for token in span.tokens]

    @property
    def chosen(self) -> int:
        """Tokens that the policy has chosen."""
        return sum(len(span.tokens) for span in self.spans if not span.is_forced)

    @property
    def logprobs(self) -> list[float]:
        return [logprob for span in self.spans for logprob in span.logprobs]

    @property
    def row(self) -> list[int]:
        """Its prompt and what there is of it."""
        return [*self.asked.prompt, *self.tokens]

    @property
    def versions(self) -> list[int]:
        """The weights of each token, of the first tokens if those of the last ones are not known yet."""
        return [span.weights for span in self.spans if span.weights is not None for _ in span.tokens]

    @property
    def new(self) -> int:
        """Tokens that it has got since it went on for the last time."""
        return self.length - self.before

    @property
    def room(self) -> int:
        """Tokens that it may still get."""
        return self.asked.max_new_tokens - self.length

    @property
    def has_ended(self) -> bool:
        return self.finished or self.room < 1

    def add(self, tokens: Sequence[int], logprobs: Sequence[float], weights: int | None, is_forced: bool = False):
        """Appends tokens that these weights have drawn, or that were forced while they drew."""
        last = self.spans[-1] if self.spans else None
        if tokens and (last is None or (last.weights, last.is_forced) != (weights, is_forced)):
            self.spans.append(Span(weights, [], [], is_forced))
        if tokens:
            self.spans[-1].tokens.extend(tokens)
            self.spans[-1].logprobs.extend(logprobs)

    def take(self, completion: Completion, weights: int | None):
        """Appends what an engine with these weights has answered to `request`."""
        self.add(completion.tokens, completion.logprobs, weights)
        self.finished, self.routes = completion.finished, completion.routes

    def learn(self, versions: Sequence[int]):
        """Takes in the weights of each token."""
        tokens, logprobs, self.spans = self.tokens, self.logprobs, []
        for token, logprob, weights in zip(tokens, logprobs, versions, strict=True):
            self.add([token], [logprob], weights)

    def cut(self, length: int):
        """Leaves the first tokens."""
        excess = self.length - length
        while excess > 0:
            last = self.spans.pop()
            left = max(len(last.tokens) - excess, 0)
            excess -= len(last.tokens) - left
            self.add(last.tokens[:left], last.logprobs[:left], last.weights, last.is_forced)
        self.finished, self.routes = False, None

    def request(self, limit: int | None = None) -> GenerationRequest:
        """The request for what is missing, or for `limit` tokens of it."""
        return dataclasses.replace(
            self.asked,
            prompt=self.row,
            written=self.asked.written + self.length,
            max_new_tokens=self.room if limit is None else limit,
        )

    def go_on(self) -> GenerationRequest:
        """As `request`; what follows counts as `new`."""
        self.before = self.length
        return self.request()

    def completion(self) -> Completion:
        """All of it, with the weights of each token as its versions."""
        return Completion(self.tokens, self.logprobs, self.finished, self.routes, versions=self.versions)
