"""Episodes on tiny models: a client whose answers are tokens, which come in any order, and the rounds it answers."""

import copy
import hashlib
import random

import torch

from tests.helpers.models.tiny_models import VOCAB
from tests.helpers.rollout.engines import make_engine, settings_of

END = (3, 5, 8, 11, 13, 17)  # each ends a turn
PROMPTS = 12


def answer(tokens) -> list[int]:
    """Tokens of the observation after a turn: a function of what the policy wrote, of 1 to 6 tokens."""
    digest = hashlib.blake2b(bytes(tokens), digest_size=8).digest()
    return [byte % VOCAB for byte in digest[: 1 + digest[0] % 6]]


class ScriptedClient:
    """Stands where `EnvironmentClient` does; `order` decides by its own random numbers which answers are late."""

    def __init__(self, order: int | None = None, failing: frozenset = frozenset(), done_after: int = 3):
        """`order`: seed of the delays; None: every answer is there at once. `failing`: numbers of episodes whose
        environment fails after their first turn."""
        from megarl.rollout.episodes.episode import EnvironmentResult

        self._result, self._random = EnvironmentResult, random.Random(order) if order is not None else None
        self._failing, self._done_after = failing, done_after
        self.pending, self.turns, self.ended, self.waits = [], {}, [], 0
        self.silent = {}  # number of an episode -> turns that its environment answers at most

    def begin(self, number, request):
        self.turns[number] = 0
        self.pending.append(self._result(number, [1, *request.prompt]))

    def go_on(self, episode):
        self.turns[episode.number] = episode.complete_turns

    def step(self, number, tokens):
        self.turns[number] += 1
        if self.turns[number] > self.silent.get(number, self.turns[number]):
            return
        is_done = self.turns[number] == self._done_after + number % 2
        reward = sum(tokens) / 8
        self.pending.append(self._result(number, answer(tokens), reward, is_done, failed=number in self._failing))

    def end(self, number):
        self.ended.append(number)
        self.pending = [item for item in self.pending if item.number != number]

    def wait(self, seconds):
        self.waits += 1

    def results(self):
        if self._random is None:
            come, self.pending = self.pending, []
            return come
        come = [item for item in self.pending if self._random.random() < 0.2]
        self._random.shuffle(come)
        self.pending = [item for item in self.pending if item not in come]
        return come


def make_requests(count=PROMPTS):
    """Numbered requests for first turns, with prompts of 2 to 8 tokens."""
    from megarl.algorithms.token_sampling import stream_keys
    from megarl.mcore.inference.generation import GenerationRequest

    keys = stream_keys(2, 0, torch.arange(count), torch.zeros(count, dtype=torch.int64)).tolist()
    prompts = [[(7 * i + j) % VOCAB for j in range(2 + i % 7)] for i in range(count)]
    return [(i, GenerationRequest(prompts[i], keys[i], 1)) for i in range(count)]


def run_episodes(
    rank, flags="", shape="llama", order=None, limits=(4, 6, 32), max_open=64, routes=False, failing=frozenset(),
    **engine_settings,
):  # fmt: skip
    """(episodes by number, client, gap to the training forward) of a round on this world's actor.

    `limits`: turns, tokens of a turn, tokens of the response.
    """
    from megarl.mcore.inference.engine import RequestList
    from megarl.rollout.episodes.episode import Episode, EpisodeLimits
    from megarl.rollout.episodes.episode_source import EpisodeSource

    engine, model, groups = make_engine(flags, shape, **engine_settings)
    client = ScriptedClient(order, failing) if groups.is_leader else None

    def begin(number, request):
        if client is not None:
            client.begin(number, request)
        return Episode(number, request, line=number, limits=EpisodeLimits(*limits))

    mine = make_requests()[groups.dp_rank :: len(groups.replicas)]
    source = EpisodeSource(RequestList(mine), begin, client, groups, max_open)
    for number, completion in engine.stream(source, END, settings_of(), routes):
        source.turn_ended(number, completion)
    for episode in source.ended:
        episode.settle(None)
    is_whole = "pipeline" not in flags  # a pipeline stage has no scores of its own
    gap = _gap(model, source.ended) if is_whole else 0.0
    return {episode.number: episode for episode in source.ended}, client, gap


def run_rounds(rank, flags="", order=None, limits=(4, 6, 32), failing=frozenset(), silent=None, **engine_settings):
    """(episodes by number, what each round left unfinished, answers that were undone) of rounds that take two more
    groups of two samples each.

    What a round has left: number -> (`content` of the episode, whether its turn is open, its new tokens). `silent`: of
    the client, in the first round.
    """
    from megarl.mcore.inference.engine import RequestList
    from megarl.rollout.episodes.episode import Episode, EpisodeLimits
    from megarl.rollout.episodes.episode_source import EpisodeSource
    from megarl.rollout.request_queue import UNFINISHED, GroupEarlyStop, shortest_groups
    from megarl.rollout.requests import PromptRequest, RoundRequests

    engine, _, groups = make_engine(flags, **engine_settings)
    client = ScriptedClient(order, failing) if groups.is_leader else None
    if client is not None:
        client.silent = silent or {}
    episodes: dict[int, Episode] = {}
    ended, left, undone = [False] * PROMPTS, [], 0

    def begin(number, request):
        if number in episodes:
            episode = episodes[number].continued(number, request)
            if client is not None:
                client.go_on(episode)
            return episode
        if client is not None:
            client.begin(number, request)
        return Episode(number, request, line=number, limits=EpisodeLimits(*limits))

    for wanted in range(2, PROMPTS // 2 + 1, 2):
        partial = [None if is_ended else 0 for is_ended in ended]
        prompts = [
            PromptRequest(group, (), 2, limits[2], 1, lengths=tuple(partial[2 * group :][:2]))
            for group in range(PROMPTS // 2)
        ]
        requests = RoundRequests(prompts, 1, wanted)
        early_stop = GroupEarlyStop(wanted, requests, groups)
        mine = [
            (number, request) for number, request in make_requests()
            if not ended[number] and number // 2 % len(groups.replicas) == groups.dp_rank
        ]  # fmt: skip
        source = EpisodeSource(RequestList(mine), begin, client, groups, 64, early_stop)
        for number, completion in engine.stream(source, END, settings_of(), response_limit=source.response_limit):
            source.turn_ended(number, completion)
        early_stop.close()
        if client is not None:
            client.silent = {}
        found = {episode.number: episode for episode in [*source.ended, *source.stopped]}
        own = torch.tensor([UNFINISHED if e.end is None else e.new_tokens for e in found.values()], dtype=torch.int64)
        lengths = groups.gather_rows(torch.tensor(list(found), dtype=torch.int64), own, PROMPTS).view(-1, 2).amax(1)
        limit = int(lengths[shortest_groups(lengths, wanted)].max())
        for episode in found.values():
            answers = len(episode.verdicts)
            episode.settle(limit)
            undone += answers - len(episode.verdicts) if episode.end is None else 0
        episodes |= found
        states = content({number: episode for number, episode in found.items() if episode.end is None})
        left.append({n: (state, episodes[n].is_open, episodes[n].new_tokens) for n, state in states.items()})
        numbers = torch.tensor([n for n, e in found.items() if e.end is not None], dtype=torch.int64)
        has_ended = groups.gather_rows(numbers, torch.ones_like(numbers), PROMPTS).tolist()
        ended = [was or bool(now) for was, now in zip(ended, has_ended, strict=True)]
    return episodes, left, undone


def _gap(model, episodes) -> float:
    """Largest difference of the log-probs of turns from those of the training forward."""
    from megarl.mcore.model.forward_pass import inference_mode, token_scores

    lengths = torch.tensor([len(episode.tokens) for episode in episodes])
    tokens = torch.tensor([token for episode in episodes for token in episode.tokens])
    with inference_mode(model):
        scores = token_scores(model, tokens, lengths, 1.0, VOCAB).logprobs.split(lengths.tolist())
    gaps = [
        (row[start:end] - torch.tensor(logprobs)).abs().max()
        for episode, row in zip(episodes, scores, strict=True)
        for (start, end), logprobs in zip(episode.turns, episode.logprobs, strict=True)
    ]
    return float(torch.stack(gaps).max())


def content(episodes):
    """What must be the same in every layout: all but log-probs and routes."""
    names = ("tokens", "prompt_length", "turns", "rewards", "end", "solved")
    # Copies: a later round continues with the same lists.
    return {number: tuple(copy.copy(getattr(e, name)) for name in names) for number, e in sorted(episodes.items())}
