"""One sample of a prompt in a multi-turn rollout: its tokens so far, and why it ended."""

import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from megarl.data.detokenizer import StopMatcher
from megarl.mcore.inference.generation import Completion, GenerationRequest
from megarl.tool_formats.thinking_budget import ThinkingBudget

# Why an episode ended. The environment ended it; the policy's turn was cut; it used all turns; there was no room for
# another turn; the environment failed.
DONE, TURN_LENGTH, TURNS, LENGTH, FAILED = "done", "turn_length", "turns", "length", "failed"
TRUNCATED_BY_BUDGET = "budget"  # of an agent: a request was refused, or the last turn cut
TRUNCATED = (TURN_LENGTH, TURNS, LENGTH, TRUNCATED_BY_BUDGET)


UNKNOWN = GenerationRequest(prompt=[], key=0, max_new_tokens=0)  # of an episode that a file has brought


def _without_stops(_: tuple[str, ...]) -> None:
    """The matcher of requests without stop strings of their own."""


class EpisodeLimits(NamedTuple):
    """Budgets of an episode, in turns and tokens."""

    turns: int
    turn: int  # tokens of a turn
    response: int  # tokens of all turns and observations together
    ends: tuple[int, ...] = ()  # the tokenizer's end tokens
    closing: int | None = None  # the token that closes a turn which something else has ended; None: nothing else does
    is_carried: bool = False  # a later round may continue an episode
    thinking: ThinkingBudget | None = None  # of each turn
    # What follows the stop strings of an agent's request; None: it has none.
    matcher: Callable[[tuple[str, ...]], StopMatcher | None] = _without_stops


class EnvironmentResult(NamedTuple):
    """What an environment's answer, or the end of an agent, means for an episode. The replica's leader makes it, all of
    its ranks apply it."""

    number: int  # of the episode
    tokens: list[int]  # the first prompt, or what lies between the last turn and the next one
    reward: float = 0.0
    done: bool = False
    correct: bool | None = None
    failed: bool = False
    replayable: bool = True  # whether another environment can be brought to this state
    turns: tuple[int, ...] = ()  # of an agent: those that count
    truncated: bool = False  # of an agent: a budget has cut the last turn or refused a request
    images: tuple[bytes, ...] = ()  # that the tokens have rows of


class TurnRequest(NamedTuple):
    """A turn that an agent has asked for. The replica's leader makes it, all of its ranks generate it."""

    number: int  # of the episode
    turn: int  # of the turn in it
    parent: int | None  # the turn that it continues
    tokens: list[int]  # of the prompt after that turn; of the whole prompt without one
    limit: int  # tokens that it may have
    key: int  # of its random stream
    stops: tuple[str, ...] = ()  # texts that end it
    images: tuple[bytes, ...] = ()  # that the tokens have rows of


def key_of(step: int, line: int, sample: int) -> str:
    """The name of a training episode: the step that drew its prompt, the prompt's line, and the number of the sample
    among all that the step draws of the line."""
    return f"{step}/{line}/{sample}"


def turn_key(key: int, prompt: Sequence[int], count: int = 0) -> int:
    """The key of a turn's random stream: named by its episode's stream and the tokens of its prompt.

    So it depends neither on the time of a request nor on what the agent asks besides. `count`: equal prompts before it.
    """
    named = np.array([key, count, *prompt], "<i8").tobytes()
    return int.from_bytes(hashlib.blake2b(named, digest_size=8).digest(), "little", signed=True)


@dataclasses.dataclass
class Episode:
    """Tokens of the prompt, the turns, and what lies between them; the same on all ranks of a replica.

    With `--over-sampling` a round may stop before an episode has ended, also within a turn. With `--partial-rollouts`
    the next round goes on where it was stopped.
    """

    number: int  # sequence id in the round
    request: GenerationRequest  # of the prompt alone; its key, and that of its trunk, name the random streams
    line: int  # of the prompt in its set
    limits: EpisodeLimits
    key: str | None = None  # of `key_of`; None: not of training
    tokens: list[int] = dataclasses.field(default_factory=list)
    prompt_length: int = 0  # 0: the environment has not answered the reset
    turns: list[tuple[int, int]] = dataclasses.field(default_factory=list)  # (start, end) of each in `tokens`
    logprobs: list[list[float]] = dataclasses.field(default_factory=list)  # of each turn
    rewards: list[float] = dataclasses.field(default_factory=list)  # of each turn
    verdicts: list[bool] = dataclasses.field(default_factory=list)  # whether the task is solved, after each answer
    is_open: bool = False  # whether the last turn goes on: the round's limit has cut it
    new_tokens: int = 0  # that the policy has written in this round
    routes: Tensor | None = None  # of the last completion, which has all tokens before it
    end: str | None = None
    replayable: bool = True
    row_starts: list[int] = dataclasses.field(default_factory=list)  # where further rows begin in `tokens`
    # Of an agent, how it has asked for each turn: random stream, limit in tokens, and stop strings.
    asked: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    # Of tokens of earlier rounds: (start in `tokens`, versions of the policy for tokens from there on).
    known_versions: list[tuple[int, list[int]]] = dataclasses.field(default_factory=list)

    @property
    def solved(self) -> bool:
        return bool(self.verdicts) and self.verdicts[-1]

    @property
    def complete_turns(self) -> int:
        """Turns that the policy has ended."""
        return len(self.turns) - self.is_open

    def apply(self, result: EnvironmentResult):
        """Takes in the environment's answer to the reset or to the last turn."""
        self.replayable = result.replayable
        if result.failed:
            self.fail()
        elif not self.prompt_length:
            self.tokens, self.prompt_length = list(result.tokens), len(result.tokens)
        else:
            self._observe(result)

    def _observe(self, result: EnvironmentResult):
        self.rewards[-1] = result.reward
        # Without a verdict, the task is solved if the rewards add up to 1.
        self.verdicts.append(sum(self.rewards) >= 1 if result.correct is None else result.correct)
        if result.done:
            self.end = DONE
        elif len(self.turns) >= self.limits.turns:
            self.end = TURNS
        if self.end is not None:
            return
        between = [*self._closing, *result.tokens]
        if self._room - len(between) < 1:
            self.end = LENGTH
        else:
            self.tokens += between

    @property
    def _closing(self) -> list[int]:
        """What the last turn lacks at its end: a stop string has ended it, and the template's token did not."""
        limits = self.limits
        return [] if limits.closing is None or self.tokens[-1] in limits.ends else [limits.closing]

    def fail(self):
        """Ends an episode whose environment failed; `settle` drops its turns."""
        if not self.prompt_length:
            self.tokens = list(self.request.prompt)
            self.prompt_length = len(self.tokens)
        self.end = FAILED

    @property
    def _room(self) -> int:
        return self.prompt_length + self.limits.response - len(self.tokens)

    @property
    def turn_limit(self) -> int:
        """Tokens that the next request may give."""
        start, end = self.turns[-1] if self.is_open else (0, 0)
        return min(self.limits.turn - (end - start), self._room)

    def next_request(self) -> GenerationRequest:
        """The request for the next turn, or for the rest of an open one."""
        start, own = self.turns[-1][0] if self.is_open else len(self.tokens), self.request
        turn = self.complete_turns
        return dataclasses.replace(
            own,
            prompt=list(self.tokens),
            key=turn_key(own.stream_of(turn), self.tokens[:start]),
            max_new_tokens=self.turn_limit,
            counted_tokens=self.new_tokens,
            written=len(self.tokens) - start,
            trunk=own.trunk_of(turn),
        )

    def add_turn(self, completion: Completion):
        """Appends what the policy wrote; a turn that was cut at its own limit ends the episode."""
        is_cut = not completion.finished and len(completion.tokens) < self.turn_limit
        if not self.is_open:
            self.turns.append((len(self.tokens), len(self.tokens)))
            self.logprobs.append([])
            self.rewards.append(0.0)
        self.tokens += completion.tokens
        self.turns[-1] = (self.turns[-1][0], len(self.tokens))
        self.logprobs[-1] = [*self.logprobs[-1], *completion.logprobs]
        self.new_tokens += len(completion.tokens)
        self.routes, self.is_open = completion.routes, is_cut
        if not completion.finished and not is_cut:
            self.end = LENGTH if self._room < 1 else TURN_LENGTH

    def forced_in(self, turn: int) -> tuple[int, int]:
        """(start, end) in `tokens` of what a thinking budget has put into a turn; equal if it has not."""
        start, end = self.turns[turn]
        if self.limits.thinking is None:
            return end, end
        found = self.limits.thinking.forced(self.before(turn), self.turn_tokens(turn))
        return (min(start + found.start, end), min(start + found.stop, end)) if found else (end, end)

    def before(self, turn: int) -> list[int]:
        """The tokens that the policy has read before it wrote a turn, counted from 0."""
        start = self.turns[turn][0]
        return self.tokens[max((first for first in self.row_starts if first <= start), default=0) : start]

    def turn_tokens(self, turn: int) -> list[int]:
        start, end = self.turns[turn]
        return self.tokens[start:end]

    def continued(self, number: int, request: GenerationRequest) -> "Episode":
        """The same episode in another round."""
        return dataclasses.replace(self, number=number, request=request, new_tokens=0, routes=None)

    def learn_versions(self, versions: list[int]):
        """Takes in the versions of all tokens; a later round gives them back."""
        self.known_versions = [(0, versions)]

    def settle(self, limit: int | None):
        """Ends the round: undoes what lies beyond `limit` new tokens of the policy, answers of the environment
        included. An episode that then has failed loses all turns: nothing of it is trained on."""
        if limit is not None and self.new_tokens > limit:
            self._undo(self.new_tokens - limit)
            self.new_tokens = limit
        if self.end == FAILED:
            self.tokens = self.tokens[: self.prompt_length]
            self.turns, self.logprobs, self.rewards, self.verdicts, self.asked = [], [], [], [], []
            self.is_open, self.routes = False, None

    def _undo(self, excess: int):
        self.end = self.routes = None
        while excess:
            start, end = self.turns[-1]
            removed = min(excess, end - start)
            excess -= removed
            self.is_open = removed < end - start
            self.tokens = self.tokens[: end - removed]
            if self.is_open:
                self.turns[-1], self.logprobs[-1] = (start, end - removed), self.logprobs[-1][:-removed]
                self.rewards[-1] = 0.0
            else:
                del self.turns[-1], self.logprobs[-1], self.rewards[-1]
        del self.verdicts[self.complete_turns :]
