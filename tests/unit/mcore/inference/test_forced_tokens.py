"""Forced tokens take the places of drawn ones, and all else is as if the policy had drawn them."""

import functools
from dataclasses import dataclass, replace

import pytest
import torch

from tests.helpers.engines import NEVER, make_requests, on_device, settings_of
from tests.helpers.tiers import long
from tests.helpers.tiny_models import VOCAB, build
from tests.helpers.worlds import run_world

EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32"
LIMIT, BUDGET, FORCED = 23, 7, (3, 1, 4, 1, 5)


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


def walked(engine, request, end, sampling):
    """The response by requests of one token each: (tokens, log-probs, whether it has ended)."""
    rule, tokens, logprobs = Rule(), [], []
    while len(tokens) < request.max_new_tokens:
        forced = rule.forced(request.prompt, tokens)
        if len(tokens) in forced:
            tokens.append(FORCED[len(tokens) - BUDGET])
            logprobs.append(0.0)
            continue
        one = replace(request, prompt=request.prompt + tokens, max_new_tokens=1)
        (done,) = engine.generate([one], end, sampling)
        tokens, logprobs = tokens + done.tokens, logprobs + done.logprobs
        if done.finished:
            return tokens, logprobs, True
    return tokens, logprobs, False


def with_budget(rank, flags="", shape="llama", sampling=None, siblings=1, written=0, limit=LIMIT, end=NEVER, pair=None,
                **settings):  # fmt: skip
    """([(tokens, log-probs, whether it has ended)] of responses with the rule; the same token by token; of those that
    the rule does not reach, whether they are as without it; gap to training; accepted drafts)."""
    from megarl.mcore.inference.engine import RolloutEngine

    model, _, place = build(flags, shape)
    sampling, requests = settings_of(**(sampling or {})), make_requests(limit)
    requests = [replace(request, prompt=requests[i // siblings].prompt) for i, request in enumerate(requests)]
    settings, common = {"buffer_gb": 0.005, "max_requests": 32, **settings}, (model, place.pg_collection, VOCAB, 48)
    stops = EndsWith(pair) if pair else None
    plain = RolloutEngine(*common, buffer_gb=0.005, max_requests=32)
    expected = [walked(plain, request, end, sampling) for request in requests]
    free = plain.generate(requests, end, sampling)
    pairs = zip(((c.tokens, c.logprobs, c.finished) for c in free), expected, strict=True)
    is_same = [one == other for one, other in pairs if not Rule().forced([], other[0])]
    engine = RolloutEngine(*common, **settings, stops=stops)
    if is_speculative := settings.get("speculative", False):
        engine.drafter.costs = engine.drafter.costs._replace(looking=0.0, looking_row=0.0, drafting=0.0)
    asked = [
        replace(r, prompt=r.prompt + tokens[:written], max_new_tokens=limit - written, written=written,
                thinking=Rule())
        for r, (tokens, _, _) in zip(requests, expected, strict=True) if len(tokens) > written
    ]  # fmt: skip
    done = [engine.generate(asked, end, sampling) for _ in range(1 + is_speculative)][-1]
    blocks = engine.context.kv_block_allocator
    assert blocks.total_avail == blocks.total_count - 1 or settings.get("prefix_caching")
    found = [(c.tokens, c.logprobs, c.finished) for c in done]
    rest = [(tokens[written:], logprobs[written:], ended) for tokens, logprobs, ended in expected]
    gap = 0.0 if "pipeline" in flags else gap_of_chosen(model, asked, done, sampling.temperature)
    return found, [each for each in rest if each[0]], is_same, gap, engine.take_decode_counts().accepted


def gap_of_chosen(model, asked, done, temperature):
    """As `largest_gap`, of the tokens that the policy has chosen."""
    from megarl.mcore.model.forward_pass import inference_mode, token_scores

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
