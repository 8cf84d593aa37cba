"""Rows of a decode step with drafts: requests with the same text share them; groups are those requests, or fewer."""

import functools
import random

from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.mcore.inference.draft_rows import SequenceGroups
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


# -- groups ----------------------------------------------------------------------------------------------------------


# Steps of up to 8 requests: which take part, and how many of the tokens that their group shares each accepts.
STEPS = st.lists(st.tuples(st.lists(st.booleans(), min_size=8, max_size=8), st.integers(0, 3)), max_size=12)


@given(STEPS, st.integers(0, 1000), st.integers(1, 4))
@settings(max_examples=300)
def test_requests_of_a_group_have_the_same_text(steps, seed, prompts):
    generator, groups = random.Random(seed), SequenceGroups()
    texts = [[9, i % prompts] for i in range(8)]
    for i, text in enumerate(texts):
        groups.begin(i, text)
    for takes_part, depth in steps:
        ids = [i for i in range(8) if takes_part[i]]
        if not ids:
            continue
        for i in ids:  # the token that every request draws after its text
            texts[i].append(generator.randrange(2))
        found = groups.update(ids, *ends(texts, ids))
        check(found, [texts[i] for i in ids])
        if not depth:
            continue
        drafts = [[generator.randrange(2) for _ in range(depth)] for _ in found.first]
        for i, group in zip(ids, found.of, strict=True):  # right drafts, then another token
            texts[i] += [*drafts[group][: generator.randint(0, depth)], 2 + generator.randrange(2)]
        check(groups.update(ids, *ends(texts, ids), max_growth=depth + 1), [texts[i] for i in ids])


def ends(texts, ids):
    """Lengths and last tokens of some texts."""
    return [len(texts[i]) for i in ids], [texts[i][-1] for i in ids]


def check(groups, texts):
    assert groups.sizes.sum() == len(texts) and len(groups.first) == len(set(groups.of))
    for i, group in enumerate(groups.of):
        assert texts[groups.first[group]] == texts[i]


def test_siblings_stay_together_until_they_draw_another_token():
    groups, ids = SequenceGroups(), range(4)
    assert groups.are_apart
    for i in ids:
        groups.begin(i, [1, 2] if i < 3 else [1])
    assert not groups.are_apart
    assert groups.update(ids, [3, 3, 3, 2], [5, 5, 5, 5]).of.tolist() == [0, 0, 0, 1]
    assert sorted(groups.update(ids, [4, 4, 4, 3], [5, 6, 5, 5]).sizes) == [1, 1, 2] and not groups.are_apart
    assert groups.update(ids, [5, 5, 5, 4], [5, 5, 6, 5]).sizes.tolist() == [1] * 4 and groups.are_apart
    groups.begin(4, [1])
    assert not groups.are_apart
    assert len(groups.update(range(5), [6, 6, 6, 5, 2], [5] * 5).first) == 5 and groups.are_apart


def test_requests_wait_for_their_first_step_together_but_not_for_their_second():
    groups = SequenceGroups()
    for length, sizes in ((2, [2]), (3, [1, 1])):  # one new token of each, and two
        groups.reset()
        groups.begin(0, [3])
        groups.begin(1, [3])
        assert len(groups.update([], [], []).first) == 0 and not groups.are_apart  # none is in a step yet
        assert groups.update([0, 1], [length] * 2, [5, 5]).sizes.tolist() == sizes
