"""An episode of an agent: turns with histories that may branch, and the rows of tokens that become of them.

Each turn that no other one continues ends a row: all tokens up to its end. The rows of an episode are one sequence of
the batch, with one score; a turn that several rows have counts in the first of them. Their order depends on their
tokens alone, not on when the agent has asked.
"""

import dataclasses
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from megarl.mcore.inference.generation import Completion, GenerationRequest
from megarl.rollout.episodes.episode import DONE, TRUNCATED_BY_BUDGET, Episode, TurnRequest

if TYPE_CHECKING:
    from megarl.mcore.inference.stop_states import Follows


class AgentEnd(NamedTuple):
    """How the agent of an episode has ended. The replica's leader makes it, all of its ranks apply it."""

    number: int  # of the episode
    turns: tuple[int, ...] = ()  # those that count
    reward: float = 0.0
    correct: bool | None = None
    truncated: bool = False  # a budget has cut the last turn or refused a request
    failed: bool = False


@dataclasses.dataclass
class _Turn:
    parent: int | None
    prompt: list[int]
    limit: int  # tokens that it may have
    completion: Completion | None = None

    @property
    def row(self) -> list[int]:
        """Tokens up to the turn's end."""
        return [*self.prompt, *self.completion.tokens]


class AgentEpisode(Episode):
    """The episode, the same on all ranks of a replica."""

    def __init__(self, episode: Episode):
        """`episode`: that has begun, and of which an agent is the environment."""
        own = {field.name: getattr(episode, field.name) for field in dataclasses.fields(Episode)}
        super().__init__(**own)
        self._turns: dict[int, _Turn] = {}

    def ask(self, asked: TurnRequest, stops: "Follows | None") -> GenerationRequest:
        """The engine's request for a turn; `stops`: its own stop strings."""
        parent = None if asked.parent is None else self._turns[asked.parent]
        prompt = [*(parent.row if parent is not None else ()), *asked.tokens]
        self._turns[asked.turn] = _Turn(asked.parent, prompt, asked.limit)
        return dataclasses.replace(
            self.request,
            prompt=prompt,
            key=asked.key,
            max_new_tokens=asked.limit,
            counted_tokens=self.new_tokens,
            stops_from=len(prompt),
            stops=stops,
        )

    def write(self, turn: int, completion: Completion) -> bool:
        """Takes in what the policy has written of a turn; returns whether the round's limit has cut it."""
        written = self._turns[turn]
        written.completion = completion
        self.new_tokens += len(completion.tokens)
        return not completion.finished and len(completion.tokens) < written.limit

    def finish(self, end: AgentEnd):
        """Ends the episode, and makes its rows."""
        if end.failed:
            return self.fail()
        self._make_rows([(number, self._turns[number]) for number in end.turns])
        self.new_tokens = sum(len(tokens) for tokens in self.logprobs)  # without turns that do not count
        self.rewards[-1] = end.reward
        self.verdicts = [end.reward >= 1 if end.correct is None else end.correct]
        self.end = TRUNCATED_BY_BUDGET if end.truncated else DONE
        self._turns = {}
        return None

    def settle(self, limit: int | None):
        """Ends the round. What has not ended within `limit` new tokens is left with no turn: no round continues it."""
        if limit is not None and (self.end is None or self.new_tokens > limit):
            self.fail()
            super().settle(None)
            self.end, self.row_starts, self._turns = None, [], {}
        else:
            super().settle(None)

    def _make_rows(self, turns: list[tuple[int, _Turn]]):
        continued = {turn.parent for _, turn in turns}
        rows = sorted((turn.row, number) for number, turn in turns if number not in continued)
        trained: set[int] = set()
        routes: list[Tensor] = []
        for row, last in rows:
            path = self._path(last)
            if self.tokens:
                self.row_starts.append(len(self.tokens))
            else:
                self.prompt_length = len(self._turns[path[0]].prompt)
            self._add_row(row, path, trained)
            if (of_row := self._turns[last].completion.routes) is not None:
                routes.append(of_row)
        self.routes = torch.cat(routes) if routes else None

    def _path(self, last: int) -> list[int]:
        """The turns of the row that a turn ends, the first one first."""
        path, number = [], last
        while number is not None:
            path.append(number)
            number = self._turns[number].parent
        return path[::-1]

    def _add_row(self, row: list[int], path: list[int], trained: set[int]):
        """Appends a row with the turns of `path`; those that no earlier row has count."""
        start = len(self.tokens)
        self.tokens = [*self.tokens, *row]
        for number in path:
            turn = self._turns[number]
            if number in trained:
                continue
            trained.add(number)
            begin = start + len(turn.prompt)
            self.turns.append((begin, begin + len(turn.completion.tokens)))
            self.logprobs.append(list(turn.completion.logprobs))
            self.rewards.append(0.0)
