"""Requests of a running engine end at their limits and end tokens."""

from dataclasses import replace

import pytest

from megarl.mcore.inference.generation import GenerationRequest
from tests.helpers.rollout.engines import COUNT, LIMIT, NEVER, make_engine, make_requests, settings_of, standard, texts
from tests.helpers.worlds import run_world


def test_the_length_limit_leaves_a_response_unfinished():
    completions, _ = standard()
    assert all(len(c.tokens) == len(c.logprobs) == LIMIT and not c.finished for c in completions)


def until_one_of(rank, ends: tuple[int, ...]):
    """(responses, those to requests whose limits are just the lengths of these)."""
    engine, _, _ = make_engine()
    completions = engine.generate(make_requests(), ends, settings_of())
    limited = [replace(r, max_new_tokens=len(c.tokens)) for r, c in zip(make_requests(), completions, strict=True)]
    return completions, engine.generate(limited, ends, settings_of())


@pytest.mark.parametrize("ends", [(3,), (3, 7, 11)])
def test_a_response_ends_with_the_first_of_its_end_tokens(ends):
    endless, _ = standard()
    completions, at_limit = run_world(until_one_of, 1, ends)[0]
    for completion, whole in zip(completions, endless, strict=True):
        length = next((i + 1 for i, token in enumerate(whole.tokens) if token in ends), len(whole.tokens))
        assert completion.tokens == whole.tokens[:length]
        assert completion.logprobs == whole.logprobs[:length]
        assert completion.finished == (completion.tokens[-1] in ends)
    assert {completion.tokens[-1] for completion in completions} >= set(ends)
    assert 0 < sum(completion.finished for completion in completions) < COUNT
    assert at_limit == completions  # the end token at the last allowed position still finishes


def limits_of_their_own(rank):
    engine, _, _ = make_engine()
    requests = [GenerationRequest(r.prompt, r.key, 1 + i % 5) for i, r in enumerate(make_requests())]
    return texts(engine.generate(requests, NEVER, settings_of())), engine.generate([], NEVER, settings_of())


def test_each_request_has_its_own_limit_and_no_request_is_allowed():
    ((completions, nothing),) = run_world(limits_of_their_own, 1)
    assert completions == [free[: 1 + i % 5] for i, free in enumerate(texts(standard()[0]))]
    assert nothing == []
