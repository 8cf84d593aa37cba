"""Episodes that a round stops: how far they come does not depend on how far they had come, and a file brings them."""

import dataclasses
import itertools
import json
from types import SimpleNamespace

import torch

from megarl.mcore.inference.generation import Completion, GenerationRequest
from megarl.rollout.episodes.episode import EnvironmentResult, Episode, EpisodeLimits
from megarl.rollout.episodes.results import CarriedEpisodes, episodes_to_batch

LIMITS = EpisodeLimits(turns=4, turn=5, response=40)
TURNS = (3, 5, 1, 4)  # tokens; the last token of each ends it
END = 9
WRITTEN = sum(TURNS)


def begun() -> Episode:
    """An episode whose environment has answered the reset."""
    episode = Episode(0, GenerationRequest([1, 2], 7, 0), line=3, limits=LIMITS, key="1/3/0")
    episode.apply(EnvironmentResult(0, [1, 2, 3]))
    return episode


def play(episode: Episode, limit: int, fails_after: int | None = None) -> Episode:
    """Plays on to the end or until it has `limit` new tokens; in its turn after `fails_after` the environment fails."""
    while episode.end is None and episode.new_tokens < limit:
        turn = episode.complete_turns
        before = len(episode.turn_tokens(-1)) if episode.is_open else 0
        whole = [10 * turn + i for i in range(TURNS[turn] - 1)] + [END]
        tokens = whole[before:][: limit - episode.new_tokens]
        assert 1 <= len(tokens) <= episode.next_request().max_new_tokens
        episode.add_turn(Completion(tokens, [-token / 8 for token in tokens], finished=tokens[-1] == END))
        if not episode.is_open:
            is_failed, is_last = turn == fails_after, turn + 1 == len(TURNS)
            episode.apply(EnvironmentResult(0, [50, turn], 0.5 * turn, done=is_last, failed=is_failed))
    return episode


def facts(episode: Episode) -> dict:
    return dataclasses.asdict(dataclasses.replace(episode, request=GenerationRequest([], 0, 0), routes=None))


def test_a_limit_undoes_what_lies_beyond_it():
    """Rounds of all pairs of lengths: each goes far beyond its limit, and is cut to it."""
    opened, ends = set(), set()
    for first, second in itertools.product(range(WRITTEN + 1), repeat=2):
        for fails_after in (None, 1):
            direct, undone = begun(), begun()
            for length in (first, second):
                direct, undone = (e.continued(0, e.request) for e in (direct, undone))
                play(direct, length, fails_after).settle(length)
                play(undone, WRITTEN, fails_after).settle(length)
                assert facts(direct) == facts(undone)
                opened.add(direct.is_open)
                ends.add(direct.end)
                if direct.end is None:
                    assert direct.new_tokens == length
    assert opened == {True, False} and ends == {None, "done", "failed"}


def test_an_answer_counts_as_long_as_its_turn_does():
    episode = play(begun(), WRITTEN)
    assert episode.solved and episode.rewards == [0.0, 0.5, 1.0, 1.5]
    episode.settle(8)
    assert not episode.solved and episode.rewards == [0.0, 0.5] and episode.tokens[-2:] == [50, 1]
    assert episode.end is None and not episode.is_open


def test_a_checkpoint_brings_episodes_of_all_kinds():
    for limit, fails_after in itertools.product(range(WRITTEN + 1), (None, 1)):
        episode = play(begun(), WRITTEN, fails_after)
        episode.settle(limit)
        episode.learn_versions(list(range(len(episode.tokens))))
        carried, loaded = (CarriedEpisodes(LIMITS, None) for _ in range(2))
        carried._client = SimpleNamespace(kept={})
        carried.add([episode])
        found = json.loads(json.dumps(carried.facts([episode.key])))
        batch, is_own = episodes_to_batch([episode]), torch.tensor([True])
        batch.versions = torch.arange(len(batch.tokens), dtype=torch.int32)
        assert loaded.load(found, batch, [episode.key], is_own) == [episode.end is not None]
        assert facts(loaded.get(episode.key)) | {"new_tokens": 0} == facts(episode) | {"new_tokens": 0}
        assert carried.of([episode.key]) == [episode] and episode.replayable
        loaded.retain([])
        assert loaded.get(episode.key) is None
