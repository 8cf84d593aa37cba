"""The leader's side of a replica's environments: texts of turns out, observations in, as tokens."""

import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path

from megarl.data.prompt import Prompt
from megarl.data.turns import TurnTokens
from megarl.environments.calls import Answer, Asked, Reply
from megarl.environments.journal import Journal
from megarl.environments.pool import EnvironmentPool, PoolOptions, TurnText, unknown_image
from megarl.environments.protocol import ImageBytes, Message, Observation, Task, Turn
from megarl.environments.session_pool import SessionPool
from megarl.errors import UsageError
from megarl.mcore.inference.generation import Completion, GenerationRequest
from megarl.rollout.episodes.episode import EnvironmentResult, EpisodeLimits, TurnRequest
from megarl.rollout.episodes.message_tree import MessageTree
from megarl.rollout.statistics import EpisodeStatistics

Result = EnvironmentResult | TurnRequest


@dataclasses.dataclass
class PlayedTurns:
    """What an episode's environment was sent, and what it has answered."""

    prompt: Prompt | None = None  # None: of an episode that a file has brought
    request: GenerationRequest | None = None  # of the prompt alone; None: of such an episode
    slot: int | None = None  # number of the environment in the pool; None: another one must be made for the next turn
    turns: list[Turn] = dataclasses.field(default_factory=list)  # that were answered; the last one perhaps by a failure
    observations: list[Observation] = dataclasses.field(default_factory=list)
    tools: list[dict] = dataclasses.field(default_factory=list)  # since the reset
    sent: int = 0  # turns
    tree: MessageTree | None = None  # of an agent that has asked
    facts: dict | None = None  # of an agent's turns, from a checkpoint; None: it has brought none
    has_ended: bool = False  # the agent, perhaps too late for the round
    images: ImageBytes = dataclasses.field(default_factory=dict)  # of the agent, that only this rank knows

    @property
    def asked(self) -> list[dict]:
        """What a checkpoint has to know of an agent's requests."""
        return self.tree.facts() if self.facts is None else self.facts["asked"]


class EnvironmentClient:
    """Starts environments, sends them turns, and makes `EnvironmentResult` of their answers.

    An episode that a later round continues is kept under its key; its environment keeps running meanwhile.
    """

    def __init__(
        self, options: PoolOptions, turn_tokens: TurnTokens, limits: EpisodeLimits, max_prompt_length: int,
        journal: Path | None, replica: int, replicas: int, pool: EnvironmentPool | SessionPool | None = None,
    ):  # fmt: skip
        """
        Args:
            max_prompt_length: tokens that a prompt may have with the tools and what `reset` adds.
            journal: folder of the replicas' journals; None: nothing is kept.
            replica, replicas: number of this replica, and how many there are.
            pool: has the episodes; None: one with these options.
        """
        self.journal = None if journal is None else Journal(journal, replica, replicas)
        self.pool: EnvironmentPool | SessionPool = pool or EnvironmentPool(options, self.journal)
        self.statistics = EpisodeStatistics()
        self._turn_tokens, self._limits = turn_tokens, limits
        self._max_prompt_length, self._images = max_prompt_length, options.images
        self._slots = itertools.count()  # each environment gets another number
        self._numbers: dict[int, int] = {}  # slot -> number of its episode in the round
        self._round: dict[int, PlayedTurns] = {}  # by number
        self.kept: dict[str, PlayedTurns] = {}  # for a later round, by key
        self._came: list[Answer | Asked] = []  # while nothing could be generated

    def begin(self, number: int, prompt: Prompt, request: GenerationRequest, task: Task, key: str | None):
        """Starts the environment of an episode. `request`: of its prompt alone; `key`: its name in the journal."""
        slot = self._join(number, PlayedTurns(prompt, request, next(self._slots)))
        self.pool.start(slot, task, prompt.environment, key)

    def go_on(
        self,
        number: int,
        prompt: Prompt,
        task: Task,
        key: str,
        turns: Sequence[Sequence[int]] = (),
        request: GenerationRequest | None = None,
    ):
        """Continues the episode `key` of an earlier round. `turns`: tokens of those that its environment answered;
        `request`: as of `begin`, for an agent."""
        played = self.kept.pop(key)
        played.prompt, played.request = prompt, request or played.request
        if played.facts is not None:
            played.tree = self._new_tree(number, played)
            played.tree.restore(played.facts["turns"], played.facts["asked"])
            played.facts = None
        if played.tree is not None:
            played.tree.number = number
        if played.slot is None:
            played.slot = next(self._slots)
            if played.tree is not None:
                self.pool.start(played.slot, task, prompt.environment, key)
            else:
                texts, seen = list(map(self._text, turns)), played.observations
                played.turns = self.pool.take_up(played.slot, task, prompt.environment, key, texts, seen, played.tools)
        self._join(number, played)

    def _join(self, number: int, played: PlayedTurns) -> int:
        self._round[number], self._numbers[played.slot] = played, number
        return played.slot

    def step(self, number: int, tokens: list[int]):
        """Sends the tokens of a turn."""
        played = self._round[number]
        played.sent += 1
        self.pool.step(played.slot, *self._text(tokens))

    def _text(self, tokens: Sequence[int]) -> TurnText:
        marked = self._turn_tokens.marked_text(tokens, self.pool.form.all_marks)
        return self._turn_tokens.text(tokens), marked

    def write(self, number: int, turn: int, completion: Completion):
        """Sends an agent a turn that the policy has written."""
        played = self._round[number]
        assert played.tree is not None  # it has asked for the turn
        written = played.tree.write(turn, completion.tokens, completion.logprobs, completion.finished)
        for (ticket, request), reply in written if played.slot is not None else ():
            self.pool.reply(played.slot, ticket, request, reply)

    def end(self, number: int):
        """Closes the environment of an episode that has ended, or that went on for too long."""
        self._close(self._round[number])

    def _close(self, played: PlayedTurns):
        if played.slot is not None:
            self._numbers.pop(played.slot, None)
            self.pool.end(played.slot)
            played.slot = None

    def take_played(self, number: int) -> PlayedTurns:
        """What an episode's environment was sent and answered in this round and earlier ones; forgets it."""
        played = self._round.pop(number)
        self._close(played)
        return played

    def keep(self, number: int, key: str, turns: int):
        """Keeps an episode for a later round, as it was after that many turns. Its environment goes on if it has seen
        no more. So does an agent that waits for the next turn; another one will be run again, and gets the turns before
        at once."""
        played = self._round.pop(number)
        self._numbers.pop(played.slot, None)
        if played.tree is not None:
            is_ahead = played.tree.cut(turns) or played.has_ended
            played.has_ended = False
        else:
            is_ahead = played.sent > turns
            played.turns, played.observations, played.sent = played.turns[:turns], played.observations[:turns], turns
        if is_ahead:
            self._close(played)
        self.kept[key] = played

    def forget(self, key: str):
        """Ends an episode that was kept, if it was."""
        if key in self.kept:
            self._close(self.kept.pop(key))

    def wait(self, seconds: float):
        """Waits until an environment answers, at most that long; `results` reports it."""
        if not self._came:
            self._came = self.pool.poll(seconds)

    def results(self) -> list[Result]:
        """What environments have answered, and agents have asked, since the last call."""
        events, self._came = self._came + self.pool.poll(), []
        found = (self._result_of(event) for event in events if event.number in self._numbers)
        return [result for result in found if result is not None]

    def take_statistics(self) -> EpisodeStatistics:
        """What has happened since the last call."""
        taken, self.statistics = self.statistics, EpisodeStatistics()
        return taken

    def close(self):
        self.pool.close()

    def _result_of(self, event: Answer | Asked) -> Result | None:
        number = self._numbers[event.number]
        played = self._round[number]
        if isinstance(event, Asked):
            return self._asked(number, played, event)
        self.statistics.add_event(event)
        played.has_ended = event.is_agent or event.failure is not None
        if event.turn is not None:
            played.turns.append(event.turn)
            played.observations += [] if event.observation is None else [event.observation]
        try:
            if event.failure is not None:
                raise UsageError(event.failure)
            if event.is_agent:
                return self._ended(number, played, event.observation)
            if event.turn is None:
                played.tools = event.tools
                first = self._first_prompt(event, played)
                images = tuple(event.images.values())
                return EnvironmentResult(number=number, tokens=first, replayable=event.replayable, images=images)
            return self._observed(number, event)
        except (UsageError, ValueError) as error:
            self.statistics.failures.append(f"environment on prompt {played.prompt.text[:80]!r}: {error}")
            return EnvironmentResult(number=number, tokens=[], failed=True, replayable=event.replayable)

    def _asked(self, number: int, played: PlayedTurns, asked: Asked) -> TurnRequest | None:
        """The turn that an agent asks for, unless it can be answered at once."""
        if played.tree is None:
            played.tree = self._new_tree(number, played)
        played.images |= asked.images
        found = played.tree.request((asked.ticket, asked.request), asked.ask)
        if isinstance(found, Reply):
            self.pool.reply(asked.number, asked.ticket, asked.request, found)
            return None
        if found is not None:
            found = found._replace(images=tuple(played.images.values()))
            played.images = {}
        return found

    def _new_tree(self, number: int, played: PlayedTurns) -> MessageTree:
        form, limits, longest = self.pool.form, self._limits, self._max_prompt_length
        return MessageTree(number, played.request, played.prompt, self._turn_tokens, form, limits, longest)

    def _ended(self, number: int, played: PlayedTurns, end: Observation) -> EnvironmentResult:
        """The end of an agent. ValueError if it has not got a turn."""
        tree = played.tree
        if tree is None or not tree.written:
            raise ValueError("the agent ended without a turn of the policy")
        played.turns = tree.parsed
        turns = tuple(turn.number for turn in tree.written)
        return EnvironmentResult(number, [], end.reward, True, end.correct, turns=turns, truncated=tree.is_truncated)

    def _first_prompt(self, event: Answer, played: PlayedTurns) -> list[int]:
        tokens = played.request.prompt
        if event.tools or event.observation.messages:
            messages = [*played.prompt.conversation, *self._known(event.observation.messages)]
            tokens = self._turn_tokens.first_prompt(messages, event.tools or played.prompt.tools)
        if len(tokens) > self._max_prompt_length:
            raise ValueError(
                f"the prompt has {len(tokens)} tokens with the tools and the first observation; --max-prompt-length "
                f"allows {self._max_prompt_length}"
            )
        return tokens

    def _observed(self, number: int, event: Answer) -> EnvironmentResult:
        seen, is_last = event.observation, event.turn.number + 1 >= self._limits.turns
        made = EnvironmentResult(number, [], seen.reward, seen.done, seen.correct, replayable=event.replayable)
        if seen.done or is_last:
            return made
        tokens = self._turn_tokens.bridge(self._known(seen.messages))
        return made._replace(tokens=tokens, images=tuple(event.images.values()))

    def _known(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Messages whose images are known. UsageError: they come from a file, and the images are gone."""
        if problem := unknown_image(self._images, messages):
            raise UsageError(problem)
        return messages
