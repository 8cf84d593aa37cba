"""Stop strings end a response, however the engine came to them; forced tokens take the places of drawn ones."""

import functools
from dataclasses import dataclass, replace

import pytest
import torch

from megarl.mcore.model.forward_pass import inference_mode, token_scores
from tests.helpers.models.tiny_models import VOCAB, build
from tests.helpers.rollout.engines import (
    NEVER,
    assert_all_blocks_are_free,
    engine_on,
    make_requests,
    on_device,
    settings_of,
)
from tests.helpers.tiers import long
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


def with_stops(rank, flags="", shape="llama", sampling=None, siblings=1, written=0, speculative=False,
               **settings):  # fmt: skip
    """(responses without stop strings, those with them, whether each has ended, stop strings)."""
    model, _, place = build(flags, shape)
    sampling, requests = settings_of(**(sampling or {})), make_requests(LIMIT, siblings=siblings)
    plain = engine_on(model, place, **settings).generate(requests, NEVER, sampling)
    # Strings of one to three tokens that some responses have.
    texts = [spelled(completion.tokens) for completion in plain]
    stops = tuple({texts[0][4:6], texts[1][9:12], texts[2][1:3], texts[3][-2:]})
    engine = engine_on(model, place, **settings, always_drafts=speculative, stops=Letters(stops))
    asked = [
        replace(r, prompt=r.prompt + c.tokens[:written], max_new_tokens=LIMIT - written, written=written)
        for r, c in zip(requests, plain, strict=True)
    ]
    is_open = [not any(stop in text[:written] for stop in stops) for text in texts]
    asked = [request for request, goes_on in zip(asked, is_open, strict=True) if goes_on]
    done = [engine.generate(asked, NEVER, sampling) for _ in range(1 + speculative)][-1]
    assert_all_blocks_are_free(engine)
    found = [request.prompt[request.start :] + c.tokens for request, c in zip(asked, done, strict=True)]
    by_prompt = {(tuple(r.prompt), r.key): text for r, text in zip(requests, texts, strict=True)}
    expected = [by_prompt[tuple(r.prompt[: r.start]), r.key] for r in asked]
    others = {}
    with engine.session(NEVER, sampling) as session, session.inference():  # as of a server: no stop string ends them
        for number, request in enumerate(requests[:4]):
            session.add(number, request)
        while len(session):
            others |= dict(session.step())
    is_same, drafted = others == dict(enumerate(plain[:4])), engine.take_counts().accepted
    return expected, [spelled(x) for x in found], [c.finished for c in done], stops, is_same, drafted


@pytest.mark.parametrize(("ranks", "case"), [
    long((1, {})),
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


EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32"
BUDGET, FORCED = 7, (3, 1, 4, 1, 5)


@dataclass(frozen=True)
class Rule:
    """Forces tokens after `limit` ones whose sum is even."""

    limit: int = BUDGET
    tokens: tuple[int, ...] = FORCED
    text: str = ""

    def forced(self, prompt, response):
        is_due = len(response) >= self.limit and sum(response[: self.limit]) % 2 == 0
        return range(self.limit, self.limit + len(self.tokens)) if is_due else range(0)


class EndsWith:
    """A stop "string" of two tokens."""

    START, stops = (), (b"",)

    def __init__(self, pair):
        self.pair = pair

    def follow(self, place, token):
        return (token,), (*place, token) == self.pair


def walked(engine, requests, end, sampling):
    """The responses by requests of one token each: [(tokens, log-probs, whether it has ended)]."""
    found = [([], [], False) for _ in requests]
    for _ in range(requests[0].max_new_tokens):
        asked = []
        for i, (tokens, logprobs, has_ended) in enumerate(found):
            if not has_ended and len(tokens) in Rule().forced(requests[i].prompt, tokens):
                found[i] = [*tokens, FORCED[len(tokens) - BUDGET]], [*logprobs, 0.0], False
            elif not has_ended:
                asked.append(i)
        ones = [replace(requests[i], prompt=requests[i].prompt + found[i][0], max_new_tokens=1) for i in asked]
        for i, one in zip(asked, engine.generate(ones, end, sampling), strict=True):
            found[i] = found[i][0] + one.tokens, found[i][1] + one.logprobs, one.finished
    return found


def with_budget(rank, flags="", shape="llama", sampling=None, siblings=1, written=0, limit=LIMIT, end=NEVER, pair=None,
                speculative=False, **settings):  # fmt: skip
    """([(tokens, log-probs, whether it has ended)] of responses with the rule; the same token by token; of those that
    the rule does not reach, whether they are as without it; gap to training; accepted drafts)."""
    model, _, place = build(flags, shape)
    sampling, requests = settings_of(**(sampling or {})), make_requests(limit, siblings=siblings)
    plain = engine_on(model, place)
    expected = walked(plain, requests, end, sampling)
    free = plain.generate(requests, end, sampling)
    pairs = zip(((c.tokens, c.logprobs, c.finished) for c in free), expected, strict=True)
    is_same = [one == other for one, other in pairs if not Rule().forced([], other[0])]
    stops = EndsWith(pair) if pair else None
    engine = engine_on(model, place, **settings, always_drafts=speculative, stops=stops)
    asked = [
        replace(r, prompt=r.prompt + tokens[:written], max_new_tokens=limit - written, written=written, thinking=Rule())
        for r, (tokens, _, _) in zip(requests, expected, strict=True)
        if len(tokens) > written
    ]
    done = [engine.generate(asked, end, sampling) for _ in range(1 + speculative)][-1]
    assert_all_blocks_are_free(engine)
    found = [(c.tokens, c.logprobs, c.finished) for c in done]
    rest = [(tokens[written:], logprobs[written:], ended) for tokens, logprobs, ended in expected]
    gap = 0.0 if "pipeline" in flags else gap_of_chosen(model, asked, done, sampling.temperature)
    return found, [each for each in rest if each[0]], is_same, gap, engine.take_counts().accepted


def gap_of_chosen(model, asked, done, temperature):
    """As `largest_gap`, of the tokens that the policy has chosen."""
    rows = [r.prompt + c.tokens for r, c in zip(asked, done, strict=True)]
    lengths = torch.tensor([len(row) for row in rows])
    with inference_mode(model):
        scores = token_scores(model, torch.tensor(sum(rows, [])), lengths, temperature, VOCAB).logprobs
    gaps = []
    for row, of_row, r, c in zip(rows, scores.split(lengths.tolist()), asked, done, strict=True):
        forced = Rule().forced([], row[r.start :])
        is_chosen = [i - r.start not in forced for i in range(len(r.prompt), len(row))]
        gaps += (of_row[len(r.prompt) :] - torch.tensor(c.logprobs)).abs()[is_chosen].tolist()
    return max(gaps)


@pytest.mark.parametrize(("ranks", "case"), [
    long((1, {"end": FORCED[2:3]})),
    (1, {"speculative": True, "siblings": 4, "sampling": {"temperature": 0.3}, "end": (11,)}),
    long((1, {"speculative": True, "sampling": {"greedy": True}})),
    (1, {"pair": FORCED[1:3], "buffer_gb": 0.0001, "max_requests": 6}),
    long((1, {"buffer_gb": 0.0001, "max_requests": 6, "speculative": True, "siblings": 4, "pair": FORCED[:2]})),
    long((1, {"written": BUDGET + 2, "sampling": {"temperature": 0.7, "top_k": 5}})),
    long((1, {"written": 3, "speculative": True, "prefix_caching": True})),
    long((1, {"written": BUDGET, "prefix_caching": True})),
    long((1, {"written": BUDGET + len(FORCED)})),
    long((1, {"limit": BUDGET + 3, "end": FORCED[2:3], "pair": FORCED[1:3]})),
    long((1, {"chunked_prefill": True, "step_tokens": 40, "max_requests": 4})),
    long((2, {"flags": "--tensor-model-parallel-size 2", "speculative": True})),
    long((2, {"flags": "--pipeline-model-parallel-size 2", "pair": FORCED[1:3]})),
    long((2, {"flags": f"{EXPERTS} --expert-model-parallel-size 2", "speculative": True})),
    long((1, {"shape": "recurrent", "speculative": True, "buffer_gb": 0.002})),
], ids=str)  # fmt: skip
def test_a_response_has_the_forced_tokens_where_they_are_due(ranks, case):
    written = case.get("written", 0)
    for found, expected, is_same, gap, drafted in run_world(functools.partial(with_budget, **case), ranks):
        assert found == expected
        places = slice(max(BUDGET - written, 0), BUDGET + len(FORCED) - written)
        part = FORCED[max(written - BUDGET, 0) :][: case.get("limit", LIMIT) - max(written, BUDGET)]
        forced = [tuple(tokens[places]) == part for tokens, _, _ in found]
        assert sum(forced) >= 3 and not all(forced) or not part
        assert is_same and all(is_same) and gap == 0
        assert drafted or not case.get("speculative")


@pytest.mark.parametrize(("ranks", "flags"), [
    (1, ""), (2, "--tensor-model-parallel-size 2"), (2, f"{EXPERTS} --expert-model-parallel-size 2"),
], ids=str)  # fmt: skip
@pytest.mark.long
def test_the_host_plans_the_steps_with_forced_tokens_alone(ranks, flags):
    for found, expected, _, gap, _, device_steps, host_steps in run_world(on_device, ranks, with_budget, flags):
        assert [(tokens, ended) for tokens, _, ended in found] == [(tokens, ended) for tokens, _, ended in expected]
        assert gap < 1e-5 and (device_steps, host_steps) == (2 * (LIMIT - 1) - len(FORCED), len(FORCED))
