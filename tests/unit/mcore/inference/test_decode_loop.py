"""Steps that only decode have the results of Megatron's bookkeeping."""

import pytest

from tests.helpers.exactness import largest_gap_allowed
from tests.helpers.rollout.engines import (
    NEVER,
    largest_gap,
    make_engine,
    make_requests,
    settings_of,
    take_long_steps,
    texts,
)
from tests.helpers.worlds import run_world


def with_megatrons_bookkeeping(rank, is_own, limits):
    """(responses, steps that advanced without the host, steps on megarl's path); the others take Megatron's path."""
    buffer_gb, most = limits
    engine, model, _ = make_engine(buffer_gb=buffer_gb, max_requests=most)
    context, moved, theirs = engine.context, [], []
    advance, step = type(context)._advance, engine.engine.async_step

    def watched(new_tokens):
        moved.append(is_own and advance(context, new_tokens))
        return moved[-1]

    def counted():
        theirs.append(1)
        return step()

    context._advance, engine.engine.async_step = watched, counted
    if not is_own:
        take_long_steps(engine)
    done = engine.generate(make_requests(), NEVER, settings_of())
    free, gap = context.kv_block_allocator.total_avail, largest_gap(model, make_requests(), done, 1.0)
    return texts(done), [c.logprobs for c in done], sum(moved), free, gap, len(theirs)


@pytest.mark.parametrize("limits", [(0.005, 32), (0.00005, 32), (0.005, 4)])
def test_decode_only_steps_equal_megatrons(limits):
    """With room for all, with a cache in which requests wait and are evicted, and with requests that come later."""
    own, theirs = (run_world(with_megatrons_bookkeeping, 1, is_own, limits)[0] for is_own in (True, False))
    assert own[2] > 0 == theirs[2]
    assert own[:2] == theirs[:2] and own[3] == theirs[3]  # no block is lost
    assert own[4] <= largest_gap_allowed()
    assert own[5] < theirs[5]  # some steps did not ask Megatron's engine at all
