"""Requests for generation and their results: what the engine, and a server in its place, takes and gives; and a
response from its first request to its end, through new weights, a server's pause, a round's end.

What a response has got is read again as the end of a prompt, so `Response.request` is all that an engine needs to go
on. Random numbers are keyed by position, and a prefill computes what decode steps would: so under the same weights, a
response that was stopped is to the bit what it would have been.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from torch import Tensor

from megarl.algorithms.token_sampling import SamplingSettings
from megarl.data.detokenizer import StopMatcher
from megarl.tool_formats.thinking_budget import ThinkingBudget

TopLogprobs = list[tuple[int, float]]  # (token, log-prob), most likely first


class Trunk(NamedTuple):
    """The first turns of an episode, which the samples of a branch share (`--branch-turns`)."""

    key: int  # of their random streams, the same in all of these samples
    turns: int  # of an episode of them; further turns have the request's own key


@dataclass(frozen=True)
class GenerationRequest:
    """One response to generate; `key` selects its random stream (`megarl.algorithms.token_sampling`)."""

    prompt: list[int]
    key: int
    max_new_tokens: int
    sampling: SamplingSettings | None = None  # None: as the call says
    end_ids: tuple[int, ...] | None = None  # tokens that end the response; None: as the call says
    top_logprobs: int = 0  # how many of the most likely tokens to report at each position
    # How many of the prompt's last tokens are the response's first ones, which were written before. Stop strings and
    # the thinking budget count from the response's beginning.
    written: int = 0
    stops: StopMatcher | None = None  # its own stop strings; None: as the call says
    thinking: ThinkingBudget | None = None  # its thinking budget
    counted_tokens: int = 0  # that a limit on responses counts besides those of this one: of earlier turns
    trunk: Trunk | None = None  # of an episode, or of a turn that belongs to it; None: it shares none

    @property
    def start(self) -> int:
        """Where the response begins in `prompt`."""
        return len(self.prompt) - self.written

    def trunk_of(self, turn: int) -> Trunk | None:
        """The trunk of a turn of an episode, counted from 0; None: the samples of a branch do not share it."""
        return self.trunk if self.trunk is not None and turn < self.trunk.turns else None

    def stream_of(self, turn: int) -> int:
        """What names the random stream of a turn of an episode, counted from 0."""
        trunk = self.trunk_of(turn)
        return self.key if trunk is None else trunk.key


@dataclass(frozen=True)
class Completion:
    """A generated response: its tokens, their log-probs, and whether an end token or a stop string ends it."""

    tokens: list[int]  # the end token, or those of the stop string, included
    logprobs: list[float]
    finished: bool
    # [tokens of prompt and response, L, k] int16: experts chosen in this rank's MoE layers, −1 in the last row.
    routes: Tensor | None = field(default=None, compare=False)
    top_logprobs: list[TopLogprobs] | None = field(default=None, compare=False)  # one list per token, if asked for
    versions: list[int] | None = field(default=None, compare=False)  # of the policy, one per token, if known


class EngineCounts(NamedTuple):
    """What an engine did. Decode steps are those in which no prompt is prefilled; only an engine that drafts counts
    them. Equal prompts of a step, computed once, count each; so do tokens that are read again because their request was
    evicted."""

    steps: int = 0
    requests: int = 0  # summed over steps
    tokens: int = 0  # generated
    drafted: int = 0
    accepted: int = 0  # drafted tokens that became part of a response
    predicted: int = 0  # tokens that the layer of multi-token prediction guessed, drafted or not
    right: int = 0  # of these
    read: int = 0  # tokens of prompts
    reused: int = 0  # tokens of prompts whose blocks were found in the cache

    def plus(self, other: "EngineCounts") -> "EngineCounts":
        """Returns the sum of both counts."""
        return EngineCounts(*(a + b for a, b in zip(self, other, strict=True)))


class TokenChunk(NamedTuple):
    """What a request has got since its last chunk."""

    number: int  # of the request
    tokens: list[int]
    logprobs: list[float]
    top_logprobs: list[TopLogprobs] | None = None  # one list per token, if they were asked for
    # Why the response ended: "stop" (its last token is an end token), "length" or "abort"; None: not ended.
    finish_reason: str | None = None
    routes: Tensor | None = None  # of the whole sequence, with the last chunk
    version: int = 0  # of the policy that generated these tokens


class Span(NamedTuple):
    """Tokens of a response that follow each other and that the same weights have drawn."""

    weights: int | None  # their number, as the caller counts weights; None: not known yet
    tokens: list[int]
    logprobs: list[float]  # of each token
    is_forced: bool = False  # a thinking budget has put them there


@dataclass
class Response:
    """What was asked for, and what there is of it."""

    asked: GenerationRequest  # for all of it
    spans: list[Span] = field(default_factory=list)
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
        return replace(
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
