"""Episodes of several turns in a rollout engine: a turn's request is the last prompt, what it wrote, and a bridge."""

from collections import deque
from dataclasses import dataclass, field

import torch

from tests.helpers.models.tiny_models import VOCAB
from tests.helpers.rollout.engines import NEVER, engine_on, make_requests, settings_of

LONGEST = 160  # tokens of the episodes below, at most: 24 + 4 turns × (12 + 19) + 12
BLOCK = 16  # tokens of a block of the cache


@dataclass
class Episodes:
    """A source of requests that makes the next turn of an episode when its last one has ended.

    Attributes:
        requests: the first turns.
        bridges: token lists by episode: what comes after each turn but the last.
        delays: by number of a continuation, how often `take` is called before it is there; default 0.
    """

    requests: list
    bridges: list[list[list[int]]]
    delays: dict[int, int] = field(default_factory=dict)

    def __post_init__(self):
        self.turns, self.done = len(self.bridges[0]) + 1, {}
        self.sent = {number * self.turns: request for number, request in enumerate(self.requests)}
        self._ready, self._late, self._left = deque(self.sent.items()), [], len(self.requests) * self.turns

    def take(self, room):
        """As of `RequestSource`."""
        self._late = [(calls - 1, item) for calls, item in self._late]
        self._ready.extend(item for calls, item in self._late if calls < 0)
        self._late = [(calls, item) for calls, item in self._late if calls >= 0]
        taken = [self._ready.popleft() for _ in range(min(room, len(self._ready)))]
        self._left -= len(taken)
        return taken

    def is_empty(self):
        """As of `RequestSource`."""
        return not self._left

    def wait(self):
        """As of `RequestSource`: a late turn comes after some calls of `take`."""

    def ended(self, number, completion):
        """Takes the completion of a turn; the next one follows."""
        from megarl.mcore.inference.generation import GenerationRequest

        self.done[number] = completion
        episode, turn = divmod(number, self.turns)
        if turn < self.turns - 1:
            before = self.sent[number]
            prompt = [*before.prompt, *completion.tokens, *self.bridges[episode][turn]]
            request = GenerationRequest(prompt, before.key, before.max_new_tokens)
            self.sent[number + 1] = request
            self._late.append((self.delays.get(number + 1, 0), (number + 1, request)))

    def found_again(self) -> int:
        """Tokens of the prompts that whole blocks of the last turns hold."""
        return sum(
            (len(before.prompt) + len(self.done[number].tokens) - 1) // BLOCK * BLOCK
            for number, before in self.sent.items()
            if number % self.turns < self.turns - 1
        )

    def found_states(self) -> int:
        """Tokens of the prompts before the recurrent states that the prompts of the last turns left."""
        continued = (before for number, before in self.sent.items() if number % self.turns < self.turns - 1)
        return sum((len(before.prompt) - 1) // BLOCK * BLOCK for before in continued)


def make_episodes(count=10, turns=4, limit=12, siblings=1, late=False) -> Episodes:
    """Episodes with ragged prompts and bridges of 1 to 19 tokens; `siblings` have the same prompt."""
    from dataclasses import replace

    generator = torch.Generator().manual_seed(7)
    requests = make_requests(limit, max(count, 5))[:count]
    requests = [replace(one, prompt=requests[i // siblings * siblings].prompt) for i, one in enumerate(requests)]
    lengths = torch.randint(1, 20, (count, turns - 1), generator=generator).tolist()
    bridges = [[torch.randint(0, VOCAB, (n,), generator=generator).tolist() for n in row] for row in lengths]
    delays = torch.randint(0, 30, (count * turns,), generator=generator).tolist() if late else []
    return Episodes(requests, bridges, dict(enumerate(delays)))


def play(engine, episodes: Episodes, end=NEVER, sampling=None, routes=False) -> Episodes:
    """Runs episodes to their ends in one call of the engine."""
    for number, completion in engine.stream(episodes, end, settings_of(**(sampling or {})), routes):
        episodes.ended(number, completion)
    return episodes


def engine_of(model, place, **settings):
    """An engine that has room for the episodes, unless the settings say otherwise."""
    return engine_on(model, place, LONGEST, **{"buffer_gb": 0.01} | settings)
