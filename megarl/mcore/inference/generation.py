"""Requests for generation and their results: what the engine, and a server in its place, takes and gives."""

from dataclasses import dataclass, field
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
