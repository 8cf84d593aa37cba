"""Generates the turns of a saved response again, and continues from one of them with another answer.

An agent owns its loop, so it cannot be brought to a turn. It runs once more, asks again what it asked, and gets the
same turns, since their random streams are named by what they continue. From the turn on, the messages that follow it
have other contents in each request. The agent itself knows only its own.
"""

import dataclasses

import torch

from megarl.data.prompt import Prompt
from megarl.environments.calls import Answer, Ask, Asked, Reply, canonical
from megarl.environments.pool import EnvironmentPool, PoolOptions
from megarl.environments.protocol import Message, Observation, Task
from megarl.errors import UsageError
from megarl.flags.environment import SESSIONS
from megarl.mcore.inference.engine import RequestList
from megarl.mcore.inference.generation import Completion, GenerationRequest
from megarl.rollout.episodes.client import EnvironmentClient, PlayedTurns
from megarl.rollout.episodes.episode import FAILED, EnvironmentResult, Episode, EpisodeLimits, turn_key
from megarl.rollout.episodes.episode_source import EpisodeSource
from megarl.rollout.requests import sampling_of
from megarl.rollout.rollout import Rollout
from megarl.rollout.saved_response import SavedResponse, TurnCheck


class Player:
    """The policy of a step on this replica, for one saved response. All ranks of the replica call its methods."""

    def __init__(
        self, rollout: Rollout, saved: SavedResponse, request: GenerationRequest, limits: EpisodeLimits | None
    ):
        """
        Args:
            request: that began the response.
            limits: of its turns; None without an environment.
        """
        self._rollout, self.saved, self._request, self._limits = rollout, saved, request, limits
        self._sampling = sampling_of(rollout.settings, rollout.settings.temperature)

    def check(self) -> list[TurnCheck]:
        """Generates every turn again after the tokens that were before it."""
        assert self._rollout.engine is not None  # every rank is one of the rollout's
        requests = [self._request_of(turn) for turn in range(len(self.saved.episode.turns))]
        found = self._rollout.engine.generate(requests, self._rollout.ends.ids, self._sampling)
        return [self._compared(turn, completion) for turn, completion in enumerate(found)]

    def _request_of(self, turn: int) -> GenerationRequest:
        if self._limits is None:
            return self._request
        saved, before = self.saved, self.saved.episode.before(turn)
        room = saved.episode.prompt_length + self._limits.response - len(before)
        key = turn_key(self._request.stream_of(turn), before)
        limit, stops = min(self._limits.turn, room), None
        if saved.is_agent:
            asked = saved.record["asked"][turn]
            key, limit, stops = asked["stream"], asked["limit"], self._limits.matcher(tuple(asked["stops"]))
        return dataclasses.replace(self._request, prompt=before, key=key, max_new_tokens=limit, stops=stops)

    def _compared(self, turn: int, completion: Completion) -> TurnCheck:
        own, saved = completion.tokens, self.saved.episode.turn_tokens(turn)
        pairs = zip(own, saved, strict=False)
        same = next((i for i, (one, other) in enumerate(pairs) if one != other), min(len(own), len(saved)))
        found = torch.tensor(completion.logprobs[:same], dtype=torch.float32)
        expected = torch.tensor(self.saved.episode.logprobs[turn][:same], dtype=torch.float32)
        gap = float((found - expected).abs().max()) if same else 0.0
        is_equal = torch.equal(found, expected) and len(own) == len(saved)
        return TurnCheck(same, len(own), is_equal, gap)

    def begun(self) -> Episode:
        assert self._limits is not None  # it has an environment
        return Episode(number=0, request=self._request, line=self.saved.place[0], limits=self._limits)

    def forked(self, turn: int, tokens: list[int]) -> Episode:
        """The episode up to a turn, counted from 0, followed by other tokens than what its environment has answered."""
        saved, count, limits = self.saved.episode, turn + 1, self._limits
        assert limits is not None  # it has an environment
        assert self.saved.record is not None
        episode = dataclasses.replace(
            saved, number=0, request=self._request, limits=limits, key=self.saved.record["key"], end=None,
            tokens=saved.tokens[: saved.turns[turn][1]], turns=saved.turns[:count], logprobs=saved.logprobs[:count],
            rewards=saved.rewards[:count], verdicts=[False] * turn,
        )  # fmt: skip
        seen = self.saved.observations[turn]
        episode.apply(EnvironmentResult(0, tokens, episode.rewards[-1], correct=seen.correct))
        return episode

    def play(self, episode: Episode, client: EnvironmentClient | None) -> Episode:
        """Plays an episode to its end. `client`: on the replica's leader, where the environment has been started; None
        elsewhere."""
        assert self._rollout.engine is not None  # every rank is one of the rollout's
        requests = RequestList([(episode.number, self._request)])
        source = EpisodeSource(requests, lambda *_: episode, client, self._rollout.role_groups, max_open=1)
        for number, completion in self._rollout.engine.stream(source, self._rollout.ends.ids, self._sampling):
            source.turn_ended(number, completion)
        return source.ended[0]


def go_on_after(turn: int, client: EnvironmentClient, saved: SavedResponse, prompt: Prompt, task: Task):
    """Brings an environment to a turn of a saved episode, counted from 0, whose answer is the last that it has seen.
    On the replica's leader."""
    assert saved.record is not None  # it has an environment
    key = saved.record["key"]
    seen = saved.observations[: turn + 1]
    client.kept[key] = PlayedTurns(observations=seen, tools=saved.record["tools"], sent=turn + 1)
    client.go_on(0, prompt, task, key, [saved.episode.turn_tokens(number) for number in range(turn + 1)])


def fork_problem(saved: SavedResponse, turn: int) -> str | None:
    """Why the answer to a turn, counted from 0, cannot be another one; None if it can."""
    record = saved.record
    if record is None:
        return "the run has no environment, whose answers could be others"
    if saved.manifest["environment"] == SESSIONS:
        return "the driver of a session is outside of the run, and cannot be run again"
    if saved.episode.end == FAILED:
        return "the environment of this episode failed"
    allowed = saved.continued_turns()
    if turn not in allowed:
        numbers = ", ".join(str(each + 1) for each in allowed)
        return f"another turn follows the turns {numbers or 'none'} of this episode"
    if not saved.is_agent and not record["replayable"]:
        return "its environment is not replayable, so it cannot be brought to a turn"
    return None


def other_answer(seen: Observation, texts: list[str]) -> list[Message]:
    """The messages of an answer with other contents. UsageError unless there is one text for each of them."""
    if len(texts) != len(seen.messages):
        raise UsageError(
            f"--answer: {len(texts)} texts; the answer to this turn has {len(seen.messages)} messages, one text each"
        )
    return [message | {"content": text} for message, text in zip(seen.messages, texts, strict=True)]


class ForkedPool(EnvironmentPool):
    """A pool for one agent, whose requests have other messages after a turn."""

    def __init__(self, options: PoolOptions, saved: SavedResponse, turn: int, texts: list[str]):
        """`turn`: of the saved episode, counted from 0; `texts`: of the messages that follow it."""
        super().__init__(options)
        self.answer: list[Message] = []  # the messages with other contents, once the agent has sent them
        self._prompt, self._tokens = saved.episode.before(turn), saved.episode.turn_tokens(turn)
        self._texts = texts
        self._asks: dict[tuple[int, int], Ask] = {}
        self._path: list[str] | None = None  # messages up to the turn, as text

    def poll(self, seconds: float = 0.0) -> list[Answer | Asked]:
        """As of `EnvironmentPool`. UsageError for another number of messages than texts."""
        return [self._changed(each) if isinstance(each, Asked) else each for each in super().poll(seconds)]

    def _changed(self, asked: Asked) -> Asked:
        messages, path = list(asked.ask.messages), self._path
        if path is not None and len(messages) > len(path) and [canonical(m) for m in messages[: len(path)]] == path:
            first = len(path)
            last = next((i for i in range(first, len(messages)) if messages[i]["role"] == "assistant"), len(messages))
            if last - first != len(self._texts):
                raise UsageError(f"--answer: {len(self._texts)} texts; the agent sends {last - first} messages")
            other = zip(messages[first:last], self._texts, strict=True)
            self.answer = [message | {"content": text} for message, text in other]
            messages[first:last] = self.answer
        changed = asked._replace(ask=asked.ask._replace(messages=messages))
        self._asks[asked.ticket, asked.request] = changed.ask
        return changed

    def reply(self, number: int, ticket: int, request: int, reply: Reply):
        """As of `EnvironmentPool`; notes the turn after which messages change."""
        is_turn = list(reply.prompt) == self._prompt and list(reply.tokens) == self._tokens
        if self._path is None and reply.turn is not None and is_turn:
            self._path = [canonical(m) for m in (*self._asks[ticket, request].messages, reply.message)]
        super().reply(number, ticket, request, reply)
