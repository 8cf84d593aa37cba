"""Rows of a decode step with drafts: requests with the same text share them."""

import functools

from tests.helpers.rollout.engines import NEVER, make_engine, make_requests, settings_of
from tests.helpers.worlds import run_world

LONG = 23  # new tokens: two to four blocks of 16 with the prompt


def rows_of_steps(rank, siblings, **sampling):
    """Rows that each decode step of an engine computes, for 20 requests in groups with the same prompt."""
    (engine, *_), rows = make_engine(speculative=True), []
    engine.drafter.costs = engine.drafter.costs._replace(looking=1e9, drafting=0.0)
    forward = engine.engine._forward
    engine.engine._forward = lambda inputs: rows.append(engine.context.active_token_count) or forward(inputs)
    engine.generate(make_requests(LONG, siblings=siblings), NEVER, settings_of(**sampling))
    return rows


def test_the_same_text_is_computed_once():
    def rows(**sampling):
        return run_world(functools.partial(rows_of_steps, siblings=5, **sampling), 1)[0]

    together, apart = rows(greedy=True), rows(temperature=5.0)
    assert together and set(together) == {4}
    assert apart and apart[-1] == 20
