"""Stop strings end a response with the token that completes one, however the engine came to that token."""

import functools
from dataclasses import replace

import pytest

from tests.helpers.engines import NEVER, make_requests, settings_of
from tests.helpers.tiers import long
from tests.helpers.tiny_models import VOCAB, build
from tests.helpers.worlds import run_world

LIMIT = 23


class Letters:
    """A token is a letter."""

    START = ""

    def __init__(self, stops):
        self.stops = stops

    def follow(self, place: str, token: int) -> tuple[str, bool]:
        text = place + chr(97 + token)
        return text[-8:], any(text.endswith(stop) for stop in self.stops)


def spelled(tokens) -> str:
    return "".join(chr(97 + token) for token in tokens)


def cut(text: str, stops) -> str:
    """The text up to the first complete stop string."""
    ends = [i for i in range(1, len(text) + 1) if any(text[:i].endswith(stop) for stop in stops)]
    return text[: ends[0]] if ends else text


def with_stops(rank, flags="", shape="llama", sampling=None, siblings=1, written=0, **settings):
    """(responses without stop strings, those with them, whether each has ended, stop strings)."""
    from megarl.mcore.inference.engine import RolloutEngine

    model, _, place = build(flags, shape)
    sampling, requests = settings_of(**(sampling or {})), make_requests(LIMIT)
    requests = [replace(request, prompt=requests[i // siblings].prompt) for i, request in enumerate(requests)]
    settings = {"buffer_gb": 0.005, "max_requests": 32, **settings}
    speculative = settings.pop("speculative", False)
    common = model, place.pg_collection, VOCAB, 48
    plain = RolloutEngine(*common, **settings).generate(requests, NEVER, sampling)
    # Strings of one to three tokens that some responses have.
    texts = [spelled(completion.tokens) for completion in plain]
    stops = tuple({texts[0][4:6], texts[1][9:12], texts[2][1:3], texts[3][-2:]})
    engine = RolloutEngine(*common, **settings, speculative=speculative, stops=Letters(stops))
    if speculative:
        engine.drafter.costs = engine.drafter.costs._replace(looking=0.0, looking_row=0.0, drafting=0.0)
    asked = [
        replace(r, prompt=r.prompt + c.tokens[:written], max_new_tokens=LIMIT - written, written=written)
        for r, c in zip(requests, plain, strict=True)
    ]  # fmt: skip
    is_open = [not any(stop in text[:written] for stop in stops) for text in texts]
    asked = [request for request, goes_on in zip(asked, is_open, strict=True) if goes_on]
    done = [engine.generate(asked, NEVER, sampling) for _ in range(1 + speculative)][-1]
    blocks = engine.context.kv_block_allocator
    assert blocks.total_avail == blocks.total_count - 1 or settings.get("prefix_caching")
    found = [request.prompt[request.start :] + c.tokens for request, c in zip(asked, done, strict=True)]
    by_prompt = {(tuple(r.prompt), r.key): text for r, text in zip(requests, texts, strict=True)}
    expected = [by_prompt[tuple(r.prompt[: r.start]), r.key] for r in asked]
    others = {}
    with engine.session(NEVER, sampling) as session, session.inference():  # as of a server: no stop string ends them
        for number, request in enumerate(requests[:4]):
            session.add(number, request)
        while len(session):
            others |= dict(session.step())
    drafted = engine.take_decode_counts().accepted
    return (
        expected,
        [spelled(x) for x in found],
        [c.finished for c in done],
        stops,
        others == dict(enumerate(plain[:4])),
        drafted,
    )


@pytest.mark.parametrize(("ranks", "case"), [
    (1, {}),
    (1, {"speculative": True, "siblings": 4, "sampling": {"temperature": 0.3}}),
    long((1, {"speculative": True, "sampling": {"greedy": True}})),
    (1, {"buffer_gb": 0.0001, "max_requests": 6}),
    long((1, {"buffer_gb": 0.0001, "max_requests": 6, "speculative": True, "siblings": 4})),
    (1, {"written": 3, "sampling": {"temperature": 0.7, "top_k": 5}}),
    long((1, {"written": 3, "speculative": True, "prefix_caching": True})),
    long((1, {"chunked_prefill": True, "step_tokens": 40, "max_requests": 4})),
    (2, {"flags": "--tensor-model-parallel-size 2", "speculative": True}),
    long((2, {"flags": "--pipeline-model-parallel-size 2"})),
    long((1, {"shape": "recurrent", "speculative": True, "buffer_gb": 0.002})),
], ids=str)  # fmt: skip
def test_a_response_ends_where_the_text_has_a_stop_string(ranks, case):
    for expected, found, finished, stops, others, drafted in run_world(functools.partial(with_stops, **case), ranks):
        assert found == [cut(text, stops) for text in expected]
        assert finished == [cut(text, stops) != text or text.endswith(stops) for text in expected]
        assert sum(finished) >= 3 and not all(finished) and others
        assert drafted or not case.get("speculative")
