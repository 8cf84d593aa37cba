"""Episodes on the engine: their text does not depend on when environments answer, nor on the layout."""

import functools
from types import SimpleNamespace

import pytest

from megarl.mcore.inference.generation import GenerationRequest
from megarl.rollout.episodes.episode import EnvironmentResult, Episode, EpisodeLimits
from megarl.rollout.episodes.episode_source import EpisodeSource
from tests.helpers.envs.episodes import END, PROMPTS, answer, content, make_requests, run_episodes, run_rounds
from tests.helpers.exactness import largest_gap_allowed
from tests.helpers.tiers import long
from tests.helpers.worlds import run_world


def run(size=1, *args, **kwargs):
    return run_world(functools.partial(run_episodes, **kwargs), size, *args)


@functools.cache
def undisturbed():
    return run()[0]


def test_sequences_are_prompts_turns_and_answers_as_an_outside_spy_rebuilds_them():
    episodes, client, gap = undisturbed()
    assert gap <= largest_gap_allowed()
    assert sorted(episodes) == list(range(PROMPTS)) and sorted(client.ended) == list(range(PROMPTS))
    ends = set()
    for number, request in make_requests():
        episode, tokens = episodes[number], [1, *request.prompt]
        assert episode.prompt_length == len(tokens)
        for turn, (start, end) in enumerate(episode.turns):
            assert start == len(tokens) and 1 <= end - start <= 6
            written = episode.tokens[start:end]
            assert all(token not in END for token in written[:-1])
            tokens += written
            if turn + 1 < len(episode.turns):
                assert written[-1] in END
                tokens += answer(written)
        assert tokens == episode.tokens and len(tokens) <= episode.prompt_length + 32
        ends.add(episode.end)
    assert {"done", "turn_length"} <= ends


@pytest.mark.parametrize("kwargs", [
    {"order": 1}, {"order": 2}, {"order": 3, "max_requests": 1}, {"max_requests": 2, "max_open": 3},
    {"order": 4, "buffer_gb": 0.0002}, {"order": 5, "max_open": 1},
], ids=str)  # fmt: skip
def test_text_and_log_probs_do_not_depend_on_late_answers_and_concurrency(kwargs):
    episodes, client, gap = run(**kwargs)[0]
    expected, _, _ = undisturbed()
    assert content(episodes) == content(expected) and gap <= largest_gap_allowed()
    assert {n: e.logprobs for n, e in episodes.items()} == {n: e.logprobs for n, e in expected.items()}
    if "order" in kwargs:
        assert client.waits  # some time nothing could be generated


@pytest.mark.parametrize(("size", "flags"), [
    long((2, "--tensor-model-parallel-size 2")), (2, "--pipeline-model-parallel-size 2"), long((2, "")),
    (2, "--num-experts 4 --moe-router-topk 2 --expert-model-parallel-size 2"),
], ids=str)  # fmt: skip
def test_text_does_not_depend_on_the_layout(size, flags):
    experts = "--num-experts 4 --moe-router-topk 2" if "experts" in flags else ""
    expected = content((run(1, experts)[0] if experts else undisturbed())[0])
    found = {}
    for episodes, _, gap in run(size, flags, order=7):
        assert gap <= largest_gap_allowed()
        found |= content(episodes)
    assert found == expected


# -- rounds that stop early ----------------------------------------------------------------------------------------

FAILING = frozenset({4, 7})
EXPERTS = "--num-experts 4 --moe-router-topk 2"


@functools.cache
def rounds(size=1, flags="", **kwargs):
    """(episodes by number, their log-probs, what each round left, answers undone) of all replicas."""
    results = run_world(functools.partial(run_rounds, failing=FAILING, **kwargs), size, flags)
    episodes, left = {}, [{} for _ in results[0][1]]
    for of_rank, stops, _ in results:
        episodes |= of_rank
        for whole, own in zip(left, stops, strict=True):
            whole |= own
    logprobs = {number: episode.logprobs for number, episode in episodes.items()}
    return content(episodes), logprobs, left, sum(undone for _, _, undone in results)


def test_an_episode_of_several_rounds_is_that_of_one():
    episodes, logprobs, left, undone = rounds()
    stops = [state for of_round in left for state in of_round.values()]
    assert {is_open for _, is_open, _ in stops} == {True, False}, "within turns and between them"
    assert len({number for of_round in left for number in of_round}) > 4 and undone
    expected, _, _ = run(failing=FAILING)[0]
    assert episodes == content(expected)
    assert logprobs == {number: episode.logprobs for number, episode in expected.items()}
    assert {number for number, (*_, end, _) in episodes.items() if end == "failed"} == FAILING


@pytest.mark.parametrize("kwargs", [
    {"order": 1}, {"order": 2, "max_requests": 2}, long({"order": 3, "max_requests": 1}),
    {"size": 2, "order": 4}, long({"size": 2, "flags": "--pipeline-model-parallel-size 2", "order": 5}),
    {"size": 2, "flags": f"{EXPERTS} --expert-model-parallel-size 2", "order": 6},
], ids=str)  # fmt: skip
def test_where_a_round_stops_does_not_depend_on_late_answers_and_the_layout(kwargs):
    """Replicas that share experts step together, also while one of them waits for its environments."""
    episodes, logprobs, left, _ = rounds(flags=EXPERTS) if EXPERTS in kwargs.get("flags", "") else rounds()
    found = rounds(**kwargs)
    assert found[2] == left and found[0] == episodes
    assert "pipeline" in kwargs.get("flags", "") or found[1] == logprobs


def test_a_round_does_not_wait_for_answers_that_it_would_undo():
    """They never come."""
    episodes, logprobs, left, _ = rounds()
    turns = {number: len(state[2]) - is_open for number, (state, is_open, _) in left[0].items()}
    results = run_world(functools.partial(run_rounds, failing=FAILING, silent=turns), 1)
    found, stops, undone = results[0]
    assert stops == left and content(found) == episodes
    assert undone < rounds()[3], "some of them were never given"


# -- images --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_leader", [False, True])
def test_the_other_ranks_of_a_replica_learn_images_with_the_tokens(is_leader):
    """The leader knows them since the environment has answered."""
    result, kept = EnvironmentResult(0, [1, -65537], images=(b"an image",)), []
    request = GenerationRequest([1], 0, 4)
    prompts = SimpleNamespace(is_empty=lambda: not waiting, take=lambda room: [(0, waiting.pop())])
    waiting, answers = [request], [[], [result]]
    groups = SimpleNamespace(replica=[0], broadcast_object=lambda results: answers.pop(0))
    client = SimpleNamespace(results=list) if is_leader else None
    images = SimpleNamespace(keep=kept.append)

    def begin(number, request):
        return Episode(number, request, 0, EpisodeLimits(2, 4, 9))

    source = EpisodeSource(prompts, begin, client, groups, 1, images=images)
    asked = [request for _ in range(3) for _, request in source.take(1)]
    assert [each.prompt for each in asked] == [[1, -65537]] and kept == ([] if is_leader else [b"an image"])
