"""An episode of an agent: turns with histories that may branch, and the rows of tokens that become of them.

Each turn that no other one continues ends a row: all tokens up to its end. The rows of an episode are one sequence of
the batch, with one score; a turn that several rows have counts in the first of them. Their order depends on their
tokens alone, not on when the agent has asked.

With `--partial-rollouts` an agent asks for one turn at a time, so that an episode that has not ended has one open turn,
the last one. A later round continues with it, whether or not the agent still runs.
"""

import copy
import dataclasses
from typing import Any

import torch
from torch import Tensor

from megarl.mcore.inference.generation import Completion, GenerationRequest, Response
from megarl.rollout.episodes.episode import DONE, FAILED, TRUNCATED_BY_BUDGET, EnvironmentResult, Episode, TurnRequest


@dataclasses.dataclass
class _Turn(Response):
    """Its weights are versions of the policy; a round learns those of its tokens when it ends."""

    parent: int | None = None
    stops: tuple[str, ...] = ()  # texts that end it
    is_open: bool = True  # it has not ended

    @property
    def start(self) -> int:
        """Where it begins in its row."""
        return len(self.asked.prompt)


class AgentEpisode(Episode):
    """The episode, the same on all ranks of a replica."""

    def __init__(self, episode: Episode, prompt: list[int] | None = None):
        """`episode`: that has begun, and of which an agent is the environment; `prompt`: of its line, that of its
        request by default."""
        own = {field.name: getattr(episode, field.name) for field in dataclasses.fields(Episode)}
        super().__init__(**own)
        self.line_prompt = list(episode.request.prompt) if prompt is None else prompt
        self._turns: dict[int, _Turn] = {}
        self._places: list[tuple[int, int, int]] = []  # (turn, its start and end in `tokens`) of those that count
        self._how: EnvironmentResult | None = None

    @property
    def complete_turns(self) -> int:
        """Turns before the open one, with which a later round goes on."""
        return max(self._turns)

    @property
    def turn_limit(self) -> int:
        """Tokens that the open turn may still get; below 1 if other limits than those of its run leave none."""
        turn = self._turns[self.complete_turns]
        return turn.room if turn.asked.max_new_tokens <= self.limits.turn else 0

    def ask(self, asked: TurnRequest):
        """Takes in that the agent has asked for a turn."""
        parent = None if asked.parent is None else self._turns[asked.parent]
        prompt = [*(parent.row if parent is not None else ()), *asked.tokens]
        request = GenerationRequest(prompt, asked.key, asked.limit)
        self._turns[asked.turn] = _Turn(request, parent=asked.parent, stops=asked.stops)

    def request_of(self, number: int) -> GenerationRequest:
        """The engine's request for a turn, or for the rest of it."""
        turn, trunk = self._turns[number], self.request.trunk_of(len(self._path(number)) - 1)
        stops, thinking = self.limits.matcher(turn.stops), self.request.thinking
        missing, counted = turn.request(), self.new_tokens
        return dataclasses.replace(missing, counted_tokens=counted, stops=stops, thinking=thinking, trunk=trunk)

    def write(self, number: int, completion: Completion) -> Completion | None:
        """Takes in what the policy has written of a turn. Returns the whole turn; None if the round's limit has cut
        it."""
        turn = self._turns[number]
        turn.take(completion, None)
        turn.is_open = not turn.has_ended
        self.new_tokens += len(completion.tokens)
        return None if turn.is_open else Completion(turn.tokens, turn.logprobs, turn.finished)

    def apply(self, result: EnvironmentResult):
        """Takes in how the agent has ended."""
        if result.failed:
            return super().apply(result)
        self._how, self.end = result, TRUNCATED_BY_BUDGET if result.truncated else DONE
        self.new_tokens = sum(self._turns[number].new for number in result.turns)
        return None

    def fail(self):
        self.tokens, self.prompt_length = list(self.line_prompt), len(self.line_prompt)
        self.end = FAILED

    def continued(self, number: int, request: GenerationRequest) -> "AgentEpisode":
        """The same episode in another round."""
        other = copy.copy(self)
        other.number, other.request, other.new_tokens, other.routes = number, request, 0, None
        if self.end is None:
            other.known_versions = []  # its tokens get other places
        for turn in other._turns.values():
            turn.go_on()
        return other

    def settle(self, limit: int | None):
        """See Episode. An episode that has not ended has its rows so far."""
        if limit is not None and self.new_tokens > limit:
            self._undo(self.new_tokens - limit)
            self.new_tokens = limit
        if self.end == FAILED:
            self._turns = {}
            super().settle(None)
        elif self._turns:  # else it ended in an earlier round
            self._make_rows()

    def _undo(self, excess: int):
        """Removes the last `excess` tokens of the policy, and what the agent has asked after them."""
        self.end = self._how = None
        for number in sorted(self._turns, reverse=True):
            turn = self._turns[number]
            removed = min(excess, turn.new)
            excess -= removed
            if not excess:
                turn.cut(turn.length - removed)
                turn.is_open = True
                return
            del self._turns[number]

    def _make_rows(self):
        end, self._places, self.asked = self._how, [], []
        self.tokens, self.turns, self.logprobs, self.rewards, self.row_starts = [], [], [], [], []
        turns = {number: self._turns[number] for number in (sorted(self._turns) if end is None else end.turns)}
        continued, trained = {turn.parent for turn in turns.values()}, set()
        routes: list[Tensor] = []
        for row, last in sorted((turn.row, number) for number, turn in turns.items() if number not in continued):
            path = self._path(last)
            if self.tokens:
                self.row_starts.append(len(self.tokens))
            else:
                self.prompt_length = self._turns[path[0]].start
            self._add_row(row, path, trained)
            if (of_row := self._turns[last].routes) is not None:
                routes.append(of_row)
        self.known_versions = [(start, self._turns[n].versions) for n, start, _ in self._places]
        if end is None:
            self.is_open = self._turns[self.complete_turns].length > 0
            return
        self.routes = torch.cat(routes) if routes else None
        self.rewards[-1], self.is_open = end.reward, False
        self.verdicts = [end.reward >= 1 if end.correct is None else end.correct]
        self._turns = {}

    def _path(self, last: int) -> list[int]:
        """The turns of the row that a turn ends, the first one first."""
        path, number = [], last
        while number is not None:
            path.append(number)
            number = self._turns[number].parent
        return path[::-1]

    def _add_row(self, row: list[int], path: list[int], trained: set[int]):
        """Appends a row with the turns of `path`; those that no earlier row has count."""
        first = len(self.tokens)
        self.tokens = [*self.tokens, *row]
        for number in path:
            turn = self._turns[number]
            if number in trained or not turn.length:
                continue
            trained.add(number)
            start, end = first + turn.start, first + len(turn.row)
            self._places.append((number, start, end))
            self.turns.append((start, end))
            self.logprobs.append(turn.logprobs)
            self.rewards.append(0.0)
            asked = turn.asked
            self.asked.append({"stream": asked.key, "limit": asked.max_new_tokens, "stops": list(turn.stops)})

    def learn_versions(self, versions: list[int]):
        """See Episode. Turns that go on may get other places."""
        if self.end is not None:
            return super().learn_versions(versions)
        for number, start, end in self._places:
            if number in self._turns:
                self._turns[number].learn(versions[start:end])
        return None

    def facts(self) -> dict[str, Any]:
        """What a checkpoint has to know of an episode that has not ended, for `restored`."""
        found = []
        for number in sorted(self._turns):
            turn = self._turns[number]
            asked = turn.asked
            known = 0 if turn.parent is None else len(self._turns[turn.parent].row)
            found.append({
                "parent": turn.parent, "prompt": asked.prompt[known:], "limit": asked.max_new_tokens, "key": asked.key,
                "stops": turn.stops, "tokens": turn.tokens, "logprobs": turn.logprobs,
                "finished": turn.finished, "is_open": turn.is_open, "before": turn.before,
                "versions": turn.versions,
            })  # fmt: skip
        return {"line_prompt": self.line_prompt, "turns": found}

    @classmethod
    def restored(cls, episode: Episode, facts: dict[str, Any]) -> "AgentEpisode":
        """An episode of a checkpoint. KeyError, TypeError or ValueError if the facts are damaged."""
        made = cls(episode, [int(token) for token in facts["line_prompt"]])
        for number, fact in enumerate(facts["turns"]):
            parent = fact["parent"]
            prompt = [*(() if parent is None else made._turns[parent].row), *fact["prompt"]]
            request = GenerationRequest(prompt, fact["key"], fact["limit"])
            made._turns[number] = turn = _Turn(request, parent=parent, stops=tuple(fact["stops"]))
            turn.add(fact["tokens"], fact["logprobs"], None)
            turn.learn(fact["versions"])
            turn.before, turn.finished, turn.is_open = fact["before"], fact["finished"], fact["is_open"]
        if not made._turns or not made._turns[made.complete_turns].is_open:
            raise ValueError("an agent's episode has no open turn")
        return made
