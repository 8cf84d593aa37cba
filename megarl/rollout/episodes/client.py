"""The leader's side of a replica's environments: texts of turns out, observations in, as tokens."""

from pathlib import Path

from megarl.data.prompt import Prompt
from megarl.data.turns import TurnTokens
from megarl.environments.journal import Journal
from megarl.environments.pool import EnvironmentPool, Event, PoolOptions
from megarl.environments.protocol import Task
from megarl.errors import UsageError
from megarl.rollout.episodes.episode import EnvironmentResult, EpisodeLimits
from megarl.rollout.episodes.statistics import EpisodeStatistics


class EnvironmentClient:
    """Starts environments, sends them turns, and makes `EnvironmentResult` of their answers."""

    def __init__(
        self, options: PoolOptions, turn_tokens: TurnTokens, limits: EpisodeLimits, max_prompt_length: int,
        journal: Path | None, replica: int, replicas: int,
    ):  # fmt: skip
        """
        Args:
            turn_tokens: texts to tokens and back.
            max_prompt_length: tokens that a prompt may have with the tools and what `reset` adds.
            journal: folder of the replicas' journals; None: nothing is kept.
            replica, replicas: number of this replica, and how many there are.
        """
        self.journal = None if journal is None else Journal(journal, replica, replicas)
        self.pool = EnvironmentPool(options, self.journal)
        self.statistics = EpisodeStatistics()
        self._turn_tokens, self._limits = turn_tokens, limits
        self._max_prompt_length = max_prompt_length
        self._prompts: dict[int, tuple[Prompt, list[int]]] = {}  # of running episodes: the line and its tokens
        self._came: list[Event] = []  # while nothing could be generated

    def begin(self, number: int, prompt: Prompt, tokens: list[int], task: Task, key: str | None):
        """Starts the environment of an episode. `tokens`: of its prompt; `key`: names the episode in the journal."""
        self._prompts[number] = prompt, tokens
        self.pool.start(number, task, prompt.environment, key)

    def step(self, number: int, tokens: list[int]):
        """Sends the tokens of a turn."""
        self.pool.step(number, self._turn_tokens.text(tokens))

    def end(self, number: int):
        """Closes the environment of an episode that has ended."""
        self._prompts.pop(number, None)
        self.pool.end(number)

    def wait(self, seconds: float):
        """Waits until an environment answers, at most that long; `results` reports it."""
        if not self._came:
            self._came = self.pool.poll(seconds)

    def results(self) -> list[EnvironmentResult]:
        """What environments have answered since the last call."""
        events, self._came = self._came + self.pool.poll(), []
        return [self._result_of(event) for event in events]

    def take_statistics(self) -> EpisodeStatistics:
        """What has happened since the last call."""
        taken, self.statistics = self.statistics, EpisodeStatistics()
        return taken

    def close(self):
        """Ends the worker processes."""
        self.pool.close()

    def _result_of(self, event: Event) -> EnvironmentResult:
        self.statistics.add_event(event)
        try:
            if event.failure is not None:
                raise UsageError(event.failure)
            if event.turn is None:
                return EnvironmentResult(number=event.number, tokens=self._first_prompt(event))
            return self._observed(event)
        except (UsageError, ValueError) as error:
            prompt, _ = self._prompts[event.number]
            self.statistics.failures.append(f"environment on prompt {prompt.text[:80]!r}: {error}")
            return EnvironmentResult(number=event.number, tokens=[], failed=True)

    def _first_prompt(self, event: Event) -> list[int]:
        prompt, tokens = self._prompts[event.number]
        if event.tools or event.observation.messages:
            messages = [*prompt.conversation, *event.observation.messages]
            tokens = self._turn_tokens.first_prompt(messages, event.tools or None)
        if len(tokens) > self._max_prompt_length:
            raise ValueError(
                f"the prompt has {len(tokens)} tokens with the tools and the first observation; --max-prompt-length "
                f"allows {self._max_prompt_length}"
            )
        return tokens

    def _observed(self, event: Event) -> EnvironmentResult:
        seen, is_last = event.observation, event.turn.number + 1 >= self._limits.turns
        tokens = [] if seen.done or is_last else self._turn_tokens.bridge(seen.messages)
        return EnvironmentResult(
            number=event.number, tokens=tokens, reward=seen.reward, done=seen.done, correct=seen.correct
        )
