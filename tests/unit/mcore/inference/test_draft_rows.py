"""Rows of a decode step with drafts: requests with the same text share them."""

import functools
from dataclasses import replace

from megarl.mcore.inference.engine import RolloutEngine
from tests.helpers.models.tiny_models import VOCAB, build
from tests.helpers.rollout.engines import NEVER, make_requests, settings_of
from tests.helpers.worlds import run_world

LONG = 23  # new tokens: two to four blocks of 16 with the prompt


def rows_of_steps(rank, siblings, **sampling):
    """Rows that each decode step of an engine computes, for 20 requests in groups with the same prompt."""
    model, _, place = build("", "llama")
    requests = make_requests(LONG, 20)
    requests = [replace(request, prompt=requests[i // siblings].prompt) for i, request in enumerate(requests)]
    engine, rows = RolloutEngine(model, place.pg_collection, VOCAB, 48, 0.005, 32, speculative=True), []
    engine.drafter.costs = engine.drafter.costs._replace(looking=1e9, drafting=0.0)
    forward = engine.engine._forward
    engine.engine._forward = lambda inputs: rows.append(engine.context.active_token_count) or forward(inputs)
    engine.generate(requests, NEVER, settings_of(**sampling))
    return rows


def test_the_same_text_is_computed_once():
    def rows(**sampling):
        return run_world(functools.partial(rows_of_steps, siblings=5, **sampling), 1)[0]

    together, apart = rows(greedy=True), rows(temperature=5.0)
    assert together and set(together) == {4}
    assert apart and apart[-1] == 20
