"""Generates the turns of a saved response again, and continues from one of them with another answer."""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import torch

from megarl.algorithms.sampling_settings import SamplingSettings
from megarl.data.prompt import Prompt
from megarl.data.stop_strings import StopMatcher
from megarl.environments.protocol import Message, Observation, Task
from megarl.errors import UsageError
from megarl.flags.environment_settings import SESSIONS
from megarl.mcore.inference.generation import Completion, GenerationRequest
from megarl.rollout.episodes.client import EnvironmentClient
from megarl.rollout.episodes.episode import FAILED, EnvironmentResult, Episode, EpisodeLimits, turn_key
from megarl.rollout.replay.saved import SavedResponse
from megarl.rollout.rollout import Rollout

_WAIT = 1.0  # seconds between two looks at an environment


class TurnCheck(NamedTuple):
    """How a turn that was generated again compares with the saved one."""

    same_tokens: int  # from its start
    tokens: int  # that were generated
    same_logprobs: bool  # to the bit
    logprob_gap: float  # largest difference between log-probs of the same tokens

    @property
    def is_same(self) -> bool:
        """Whether tokens and log-probs are equal to the bit."""
        return self.same_logprobs and self.same_tokens == self.tokens


class Player:
    """The policy of a step on this replica, for one saved response. All ranks of the replica call its methods."""

    def __init__(
        self, rollout: Rollout, saved: SavedResponse, request: GenerationRequest, limits: EpisodeLimits | None,
        matcher: Callable[[tuple[str, ...]], StopMatcher | None],
    ):  # fmt: skip
        """
        Args:
            request: that began the response.
            limits: of its turns; None without an environment.
            matcher: of the stop strings of an agent's request.
        """
        s = rollout.settings
        self._rollout, self._saved, self._request, self._limits = rollout, saved, request, limits
        self._matcher = matcher
        self._sampling = SamplingSettings(temperature=s.temperature, top_k=s.top_k, top_p=s.top_p, min_p=s.min_p)

    def generate(self, requests: list[GenerationRequest]) -> list[Completion]:
        assert self._rollout.engine is not None  # every rank is one of the rollout's
        return self._rollout.engine.generate(requests, self._rollout.ends.ids, self._sampling)

    def check(self) -> list[TurnCheck]:
        """Generates every turn again after the tokens that were before it."""
        found = self.generate([self._request_of(turn) for turn in range(len(self._saved.turns))])
        return [self._compared(turn, completion) for turn, completion in enumerate(found)]

    def _request_of(self, turn: int) -> GenerationRequest:
        if self._limits is None:
            return self._request
        saved, before = self._saved, self._saved.before(turn)
        room = saved.prompt_length + self._limits.response - len(before)
        key = turn_key(self._request.stream_of(turn), before)
        limit, stops = min(self._limits.turn, room), None
        if saved.is_agent:
            asked = saved.record["asked"][turn]
            key, limit, stops = asked["stream"], asked["limit"], self._matcher(tuple(asked["stops"]))
        return dataclasses.replace(
            self._request, prompt=before, key=key, max_new_tokens=limit, stops_from=len(before), stops=stops,
            thinking_from=len(before),
        )  # fmt: skip

    def _compared(self, turn: int, completion: Completion) -> TurnCheck:
        own, saved = completion.tokens, self._saved.turn_tokens(turn)
        pairs = zip(own, saved, strict=False)
        same = next((i for i, (one, other) in enumerate(pairs) if one != other), min(len(own), len(saved)))
        found = torch.tensor(completion.logprobs[:same], dtype=torch.float32)
        expected = torch.tensor(self._saved.logprobs[turn][:same], dtype=torch.float32)
        gap = float((found - expected).abs().max()) if same else 0.0
        is_equal = torch.equal(found, expected) and len(own) == len(saved)
        return TurnCheck(same, len(own), is_equal, gap)

    # -- forks -------------------------------------------------------------------------------------------------------

    def begun(self) -> Episode:
        assert self._limits is not None  # it has an environment
        return Episode(number=0, request=self._request, line=self._saved.place[0], limits=self._limits)

    def forked(self, turn: int, tokens: list[int]) -> Episode:
        """The episode up to a turn, counted from 0, followed by other tokens than what its environment has answered."""
        saved, count, limits = self._saved, turn + 1, self._limits
        assert limits is not None  # it has an environment
        assert saved.record is not None
        episode = Episode(
            number=0, request=self._request, line=saved.place[0], limits=limits, key=saved.record["key"],
            tokens=saved.tokens[: saved.turns[turn][1]], prompt_length=saved.prompt_length, turns=saved.turns[:count],
            logprobs=saved.logprobs[:count], rewards=saved.rewards[:count],
            verdicts=[False] * turn,
        )  # fmt: skip
        episode.apply(EnvironmentResult(0, tokens, episode.rewards[-1], correct=saved.observations[turn].correct))
        return episode

    def go_on(self, episode: Episode, environment: "LiveEnvironment | None"):
        """Plays an episode to its end. `environment`: on the replica's leader; None elsewhere."""
        while episode.end is None:
            (completion,) = self.generate([episode.next_request()])
            episode.add_turn(completion)
            if episode.end is None:
                found = None if environment is None else environment.answer(episode.turn_tokens(-1))
                episode.apply(self._rollout.role_groups.broadcast_object(found))


class LiveEnvironment:
    """The environment of a saved episode, which continues after one of its turns. On a replica's leader."""

    def __init__(self, client: EnvironmentClient, saved: SavedResponse, prompt: Prompt, task: Task, turn: int):
        """`turn`: the last one that it has seen, counted from 0."""
        assert saved.record is not None  # it has an environment
        self._client, key = client, saved.record["key"]
        client.restore(key, saved.observations[: turn + 1], saved.record["tools"])
        client.go_on(0, prompt, task, key, [saved.turn_tokens(number) for number in range(turn + 1)])

    def answer(self, tokens: list[int]) -> EnvironmentResult:
        """What it answers to a turn."""
        self._client.step(0, tokens)
        while not (results := self._client.results()):
            self._client.wait(_WAIT)
        (result,) = results
        assert isinstance(result, EnvironmentResult)  # it is no agent
        return result

    def end(self) -> tuple[list[Observation], str | None]:
        """Ends it; returns what it has answered to all turns, and in a line why it failed, if it did."""
        failures = self._client.statistics.failures
        return self._client.take_played(0).observations, failures[-1] if failures else None


def fork_problem(saved: SavedResponse, turn: int) -> str | None:
    """Why the answer to a turn, counted from 0, cannot be another one; None if it can."""
    record = saved.record
    if record is None:
        return "the run has no environment, whose answers could be others"
    if saved.manifest["environment"] == SESSIONS:
        return "the driver of a session is outside of the run, and cannot be run again"
    if saved.end == FAILED:
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
