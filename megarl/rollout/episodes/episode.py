"""One sample of a prompt in a multi-turn rollout: its tokens so far, and why it ended."""

import dataclasses
from typing import TYPE_CHECKING, NamedTuple

from megarl.mcore.inference.generation import Completion, GenerationRequest

if TYPE_CHECKING:
    from torch import Tensor

# Why an episode ended. The environment ended it; the policy's turn was cut; it used all turns; there was no room for
# another turn; the environment failed.
DONE, TURN_LENGTH, TURNS, LENGTH, FAILED = "done", "turn_length", "turns", "length", "failed"
TRUNCATED = (TURN_LENGTH, TURNS, LENGTH)


class EpisodeLimits(NamedTuple):
    """Budgets of an episode, in turns and tokens."""

    turns: int
    turn: int  # tokens of a turn
    response: int  # tokens of all turns and observations together


class EnvironmentResult(NamedTuple):
    """What an environment's answer means for an episode. The replica's leader makes it, all of its ranks apply it."""

    number: int  # of the episode
    tokens: list[int]  # the first prompt, or what lies between the last turn and the next one
    reward: float = 0.0
    done: bool = False
    correct: bool | None = None
    failed: bool = False


@dataclasses.dataclass
class Episode:
    """Tokens of the prompt, the turns, and what lies between them; the same on all ranks of a replica."""

    number: int  # sequence id in the round
    request: GenerationRequest  # of the prompt alone; its key is the episode's random stream
    line: int  # of the prompt in its set
    limits: EpisodeLimits
    tokens: list[int] = dataclasses.field(default_factory=list)
    prompt_length: int = 0  # 0: the environment has not answered the reset
    turns: list[tuple[int, int]] = dataclasses.field(default_factory=list)  # (start, end) of each in `tokens`
    logprobs: list[list[float]] = dataclasses.field(default_factory=list)  # of each turn
    rewards: list[float] = dataclasses.field(default_factory=list)  # of each turn
    routes: "Tensor | None" = None  # of the last completion, which has all tokens before it
    end: str | None = None
    solved: bool = False

    def apply(self, result: EnvironmentResult):
        """Takes in the environment's answer to the reset or to the last turn."""
        if result.failed:
            self.fail()
        elif not self.prompt_length:
            self.tokens, self.prompt_length = list(result.tokens), len(result.tokens)
        else:
            self._observe(result)

    def _observe(self, result: EnvironmentResult):
        self.rewards[-1] = result.reward
        # Without a verdict, the task is solved if the rewards add up to 1.
        self.solved = sum(self.rewards) >= 1 if result.correct is None else result.correct
        if result.done:
            self.end = DONE
        elif len(self.turns) == self.limits.turns:
            self.end = TURNS
        elif self._room - len(result.tokens) < 1:
            self.end = LENGTH
        else:
            self.tokens += result.tokens

    def fail(self):
        """Drops all turns of an episode whose environment failed: nothing of it is trained on."""
        if not self.prompt_length:
            self.tokens = list(self.request.prompt)
            self.prompt_length = len(self.tokens)
        self.tokens = self.tokens[: self.prompt_length]
        self.end, self.solved = FAILED, False
        self.turns, self.logprobs = [], []
        self.rewards, self.routes = [], None

    @property
    def _room(self) -> int:
        """Tokens that may follow."""
        return self.prompt_length + self.limits.response - len(self.tokens)

    def next_request(self) -> GenerationRequest:
        """The request for the next turn."""
        limit = min(self.limits.turn, self._room)
        return dataclasses.replace(self.request, prompt=list(self.tokens), max_new_tokens=limit)

    def add_turn(self, completion: Completion):
        """Appends what the policy wrote; a turn that was cut at its limit ends the episode."""
        start = len(self.tokens)
        self.tokens += completion.tokens
        self.turns.append((start, len(self.tokens)))
        self.logprobs.append(completion.logprobs)
        self.rewards.append(0.0)
        self.routes = completion.routes
        if not completion.finished:
            self.end = LENGTH if self._room < 1 else TURN_LENGTH
