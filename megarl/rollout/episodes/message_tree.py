"""What the requests of an agent have in common: which turn a request continues, and the tokens of its prompt.

A request continues the deepest turn whose messages are the first of its own. Then the turn's tokens are kept as they
were written, and only what follows is encoded. If the chat template would show the history otherwise, or if the agent
has changed it, the request begins a row of its own: its messages are encoded anew, as a server would do.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from megarl.data.prompt import Prompt
from megarl.data.turns import TurnTokens
from megarl.environments.calls import CONTEXT_LENGTH, Ask, Reply, canonical, digests
from megarl.environments.protocol import Message, Turn, parse_turn
from megarl.errors import UsageError
from megarl.mcore.inference.generation import GenerationRequest
from megarl.rollout.episodes.episode import EpisodeLimits, TurnRequest, turn_key
from megarl.tool_formats.tool_format import ToolFormat

Place = tuple[int, int]  # (ticket, number) of an agent's request
_ONE_AT_A_TIME = "with --partial-rollouts an agent asks for one turn at a time: the last one is being written"


@dataclass
class AgentTurn:
    """A turn that an agent has asked for; `reply` is None until it is written."""

    number: int
    parent: "AgentTurn | None"
    ask: Ask
    prompt: list[int]
    limit: int  # tokens that it may have
    is_run_limit: bool  # it is the run's, not the agent's
    root_length: int  # tokens of the prompt with which its row begins
    depth: int  # turns before it
    is_rewritten: bool  # its history rewrites turns of the policy
    stream: int = 0  # names its random numbers
    reply: Reply | None = None
    waiting: list[Place] = field(default_factory=list)
    is_asked: bool = True  # by the present run of the agent

    @property
    def row(self) -> list[int]:
        """Its prompt and what is written of it."""
        return [*self.prompt, *(() if self.reply is None else self.reply.tokens)]

    @property
    def row_length(self) -> int:
        """Tokens of the row up to the turn's end, at most."""
        return len(self.prompt) + (self.limit if self.reply is None else len(self.reply.tokens))


class MessageTree:
    """The turns of one episode of an agent, on the replica's leader."""

    def __init__(
        self, number: int, request: GenerationRequest, prompt: Prompt, turn_tokens: TurnTokens, form: ToolFormat,
        limits: EpisodeLimits, max_prompt_length: int,
    ):  # fmt: skip
        """
        Args:
            number, request: of the episode; its keys name the random streams.
            form: of tool calls.
            prompt: of the episode's line; a first request with the same messages has the tokens of `request`.
            max_prompt_length: tokens of a prompt that do not count as response.
        """
        self.number = number
        self._was_refused = False  # a budget has refused a request of the present run
        self._is_concurrent = False  # the agent has asked for two turns at a time, which it may not
        self._request, self._turn_tokens, self._form, self._limits = request, turn_tokens, form, limits
        self._conversation = [dict(message) for message in prompt.conversation]
        self._max_prompt_length, self._ends = max_prompt_length, frozenset(limits.ends)
        self._turns: list[AgentTurn] = []
        self._by_ask: dict[tuple[str, int], AgentTurn] = {}  # request and how many equal ones came before it
        self._by_path: dict[bytes, AgentTurn] = {}  # digest of messages up to the turn's own
        self._asks: Counter[str] = Counter()  # of the present run of the agent
        self._ticket: int | None = None  # of it

    @property
    def asked(self) -> list[AgentTurn]:
        """The turns of the present run of the agent."""
        return [turn for turn in self._turns if turn.is_asked]

    @property
    def written(self) -> list[AgentTurn]:
        """Those of them that the policy has written."""
        return [turn for turn in self.asked if turn.reply is not None]

    @property
    def parsed(self) -> list[Turn]:
        """The latter as text and calls."""
        replies = [turn.reply for turn in self.written]
        return [reply.turn for reply in replies if reply is not None and reply.turn is not None]

    @property
    def rewritten(self) -> int:
        """Requests whose history rewrites turns of the policy."""
        return sum(turn.is_rewritten for turn in self.asked)

    @property
    def is_truncated(self) -> bool:
        """Whether a budget has refused a request, or has cut a turn that no other one continues."""
        inner = {id(turn.parent) for turn in self.written}
        ends = [turn.reply for turn in self.written if id(turn) not in inner]
        return self._was_refused or any(reply is not None and reply.is_budget for reply in ends)

    def cut(self, number: int) -> bool:
        """Leaves the turns before `number`, and that one without tokens: the next round continues with it.

        Returns whether the agent has seen what is undone, or has asked after it.
        """
        gone = self._turns[number:]
        self._turns = self._turns[: number + 1]
        self._by_ask = {key: turn for key, turn in self._by_ask.items() if turn.number <= number}
        self._by_path = {path: turn for path, turn in self._by_path.items() if turn.number < number}
        is_ahead = len(gone) > 1 or gone[0].reply is not None
        gone[0].reply = None
        return is_ahead

    def request(self, place: Place, ask: Ask) -> TurnRequest | Reply | None:
        """What follows from a request: a turn to be generated, a reply, or None: the turn is being generated.

        Another ticket is another run of the agent: what equals an earlier request gets the same turn.
        """
        if place[0] != self._ticket:
            self._ticket, self._asks, self._was_refused = place[0], Counter(), False
            for turn in self._turns:
                turn.is_asked, turn.waiting = False, []
        text = ask.key
        key = text, self._asks[text]
        self._asks[text] += 1
        if key in self._by_ask:
            turn = self._by_ask[key]
            turn.is_asked = True
            turn.waiting += [place] if turn.reply is None else []
            return turn.reply
        if self._limits.is_carried and (self._is_concurrent or any(turn.reply is None for turn in self.asked)):
            self._is_concurrent = True
            return Reply(None, error=_ONE_AT_A_TIME, code="one_turn_at_a_time")
        try:
            turn = self._new_turn(ask)
        except (UsageError, ValueError) as error:
            return Reply(None, error=str(error), code="invalid_prompt")
        if turn.limit < 1 or len(self.asked) >= self._limits.turns:
            self._was_refused = True
            limit = f"{self._limits.turns} turns" if turn.limit >= 1 else "the tokens of an episode"
            error = f"This model's maximum context length is exceeded: {limit} are used up"
            return Reply(None, error=error, code=CONTEXT_LENGTH, is_budget=True)
        turn.waiting.append(place)
        equal = sum(other.prompt == turn.prompt for other in self._turns)
        turn.stream = turn_key(self._request.stream_of(turn.depth), turn.prompt, equal)
        self._turns.append(turn)
        self._by_ask[key] = turn
        return self._to_generate(turn)

    def _to_generate(self, turn: AgentTurn) -> TurnRequest:
        known, parent = 0, None
        if turn.parent is not None:
            known, parent = len(turn.parent.row), turn.parent.number
        tokens, stops = turn.prompt[known:], turn.ask.stops
        return TurnRequest(self.number, turn.number, parent, tokens, turn.limit, turn.stream, stops)

    def write(self, number: int, tokens: list[int], logprobs: list[float], finished: bool) -> list[tuple[Place, Reply]]:
        """Takes in what the policy has written of a turn; returns the replies to those that wait for it."""
        turn = self._turns[number]
        text, marked = self._turn_tokens.text(tokens), self._turn_tokens.marked_text(tokens, self._form.all_marks)
        parsed = parse_turn(text, turn.depth, self._form, turn.ask.tools or (), marked)
        finish, is_budget = "stop" if finished else "length", not finished and turn.is_run_limit
        turn.reply = Reply(parsed, finish, turn.prompt, tokens, logprobs, is_budget=is_budget)
        path = digests([*turn.ask.messages, turn.reply.message], turn.ask.tools)[-1]
        self._by_path.setdefault(path, turn)
        waiting, turn.waiting = turn.waiting, []
        return [(place, turn.reply) for place in waiting]

    def facts(self) -> list[dict]:
        """What a checkpoint has to know of the requests, besides the tokens that `AgentEpisode.facts` has."""
        names = "ask", "is_run_limit", "is_rewritten"
        return [{name: getattr(turn, name) for name in names} for turn in self._turns]

    def restore(self, turns: Sequence[dict], asked: Sequence[dict]):
        """Takes in the turns of `AgentEpisode.facts`, and of `facts` what was `asked`.

        KeyError, TypeError or ValueError if they are damaged.
        """
        for number, (fact, of_ask) in enumerate(zip(turns, asked, strict=True)):
            messages, tools, max_tokens, stops = of_ask["ask"]
            ask = Ask(messages, tools, max_tokens, tuple(stops))
            parent = None if fact["parent"] is None else self._turns[fact["parent"]]
            prompt = [*(() if parent is None else parent.row), *fact["prompt"]]
            depth, root_length = (0, len(prompt)) if parent is None else (parent.depth + 1, parent.root_length)
            turn = AgentTurn(
                number, parent, ask, prompt, fact["limit"], of_ask["is_run_limit"], root_length, depth,
                of_ask["is_rewritten"], fact["key"], is_asked=False,
            )  # fmt: skip
            self._turns.append(turn)
            self._by_ask[ask.key, sum(other.ask == ask for other in self._turns[:-1])] = turn
            if not fact["is_open"]:
                self.write(number, fact["tokens"], fact["logprobs"], fact["finished"])

    def _new_turn(self, ask: Ask) -> AgentTurn:
        parent, known = self._continued(ask)
        prompt = None if parent is None else self._following(parent, ask, ask.messages[known:])
        is_rewritten = prompt is None and (parent is not None or self._has_own_turns(ask.messages))
        if prompt is None:
            parent, prompt = None, self._anew(ask)
        root_length = len(prompt) if parent is None else parent.root_length
        own = self._room(parent, prompt, root_length)
        run_limit = min(self._limits.turn, own)
        limit = run_limit if ask.max_tokens is None else min(run_limit, ask.max_tokens)
        depth = 0 if parent is None else parent.depth + 1
        return AgentTurn(
            len(self._turns), parent, ask, prompt, limit, limit == run_limit, root_length, depth, is_rewritten
        )

    def _continued(self, ask: Ask) -> tuple[AgentTurn | None, int]:
        """(the deepest turn that a request continues, how many of its messages that has)."""
        paths = digests(ask.messages, ask.tools)
        for count in range(len(paths), 0, -1):
            turn = self._by_path.get(paths[count - 1])
            if turn is not None and turn.is_asked:
                return turn, count
        return None, 0

    def _following(self, parent: AgentTurn, ask: Ask, fresh: list[Message]) -> list[int] | None:
        """The tokens of a prompt that continues a turn; None if the template would show the turn otherwise."""
        if not fresh or any(message["role"] == "assistant" for message in fresh):
            return None
        last, shown = parent.row[-1], [*self._shown(parent), *fresh]  # a turn that is continued has been written
        following = self._turn_tokens.following(shown, len(fresh), last, ask.tools)
        if following is None:
            return None
        between = [] if last in self._ends else [self._turn_tokens.closing_token()]
        return [*parent.row, *between, *following]

    def _shown(self, turn: AgentTurn) -> list[Message]:
        """The messages up to a turn's own, with the policy's thoughts."""
        assert turn.reply is not None
        before = turn.ask.messages
        if turn.parent is not None:
            shown = self._shown(turn.parent)
            before = [*shown, *before[len(shown) :]]
        return [*before, turn.reply.message]

    def _anew(self, ask: Ask) -> list[int]:
        if not ask.tools and ask.messages == self._conversation:
            return list(self._request.prompt)
        return self._turn_tokens.first_prompt(ask.messages, ask.tools)

    def _has_own_turns(self, messages: list[Message]) -> bool:
        own = {canonical(turn.reply.message) for turn in self._turns if turn.reply is not None}
        return any(message["role"] == "assistant" and canonical(message) in own for message in messages)

    def _room(self, parent: AgentTurn | None, prompt: list[int], root_length: int) -> int:
        """Tokens that a turn may have by the length of its row, and by that of all rows together."""
        allowed = self._max_prompt_length + self._limits.response
        inner = {id(turn.parent) for turn in self.asked}
        others = sum(turn.row_length for turn in self.asked if id(turn) not in inner and turn is not parent)
        of_row = min(root_length, self._max_prompt_length) + self._limits.response - len(prompt)
        return min(of_row, allowed - others - len(prompt))
