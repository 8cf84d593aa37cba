"""Drafts are tried only where a row is worth its time."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.mcore.inference.draft_index import MAX_DEPTH, DraftIndex
from megarl.mcore.inference.drafter import PROBING, Drafter, StepCosts, worthwhile

COSTS = StepCosts(step=1000, row=30, looking=60, looking_row=1, drafting=100, drafted_row=32)


def play(drafter, truth, prompts, max_rows=256):
    """Generates the texts prompt + truth[i]; returns (steps, drafted, accepted)."""
    drafter.reset(())
    for i, prompt in enumerate(prompts):
        drafter.begin(i, prompt)
    answers = [[*prompt, *response] for prompt, response in zip(prompts, truth, strict=True)]
    lengths, ends = np.array([len(p) + 1 for p in prompts]), np.array([len(answer) for answer in answers])
    steps = drafted = accepted = 0
    while (lengths < ends).any():
        active = np.flatnonzero(lengths < ends)
        counts = np.zeros(len(active), np.int64)
        if drafter.should_look(len(active)):
            rows = drafter.rows_of(active)
            last = np.array([answers[i][lengths[i] - 1] for i in active])

            def tail(i, size, active=active):
                end = lengths[active[i]]
                return answers[active[i]][end - size : end]

            drafter.catch_up(rows, lengths[active], last, tail)
            found = drafter.draft(rows, ends[active] - lengths[active] - 1, np.ones(len(rows), int), max_rows)
            drafts = np.split(found.tokens, found.counts.cumsum()[:-1])
            assert len(found.tokens) + len(active) <= max_rows
            for place, (i, draft) in enumerate(zip(active, drafts, strict=True)):
                right = answers[i][lengths[i] :]
                assert len(draft) < len(right)
                counts[place] = next((j for j, token in enumerate(draft) if token != right[j]), len(draft))
            drafted, accepted = drafted + len(found.tokens), accepted + int(counts.sum())
        steps, lengths[active] = steps + 1, lengths[active] + counts + 1
    for i, answer in enumerate(answers):
        drafter.finish(i, answer)
    return steps, drafted, accepted


def small_drafter(bits=16) -> Drafter:
    drafter = Drafter(COSTS, 64, 100)
    drafter.index = DraftIndex(bits)
    return drafter


def test_responses_seen_before_are_drafted_and_random_ones_are_not():
    generator, drafter = random.Random(0), small_drafter()
    prompts = [[generator.randrange(500) for _ in range(5)] for _ in range(40)]
    fixed = [[generator.randrange(500) for _ in range(60)] for _ in range(40)]
    first, *_, last = (play(drafter, fixed, prompts) for _ in range(12))
    assert first[0] == 59 and last[0] <= 12 and last[2] >= 0.9 * last[1]
    for _ in range(6):
        fresh = [[generator.randrange(500) for _ in range(60)] for _ in range(40)]
        steps, drafted, _ = play(drafter, fresh, prompts)
    assert steps == 59 and drafted <= 0.02 * 40 * 60


def test_the_end_token_is_never_drafted():
    drafter = small_drafter(10)
    for _ in range(40):
        drafter.reset({9})
        drafter.begin(0, [1, 2])
        rows = drafter.rows_of(np.array([0]))
        drafts = drafter.draft(rows, np.array([5]), np.array([1]), 8)
        drafter.finish(0, [1, 2, 3, 4, 9])
    assert drafts.tokens.tolist() == [3, 4]


GROUPS = st.lists(st.tuples(st.integers(1, 4), st.lists(st.floats(0.01, 1.0), max_size=6)), min_size=1, max_size=5)


@given(GROUPS, st.integers(5, 24))
@settings(max_examples=200)
def test_rows_are_those_with_the_most_tokens_for_their_time(groups, max_rows):
    sizes, m = np.array([size for size, _ in groups]), len(groups)
    table, n = np.zeros((m, MAX_DEPTH)), sizes.sum()
    for i, (_, row) in enumerate(groups):
        table[i, : len(row)] = sorted(row, reverse=True)

    def speed(accepted):
        shared = COSTS.plain(m) + COSTS.drafting
        time = shared + COSTS.drafted_row * len(accepted) if accepted else min(shared, COSTS.plain(n))
        return (n + sum(accepted)) / time

    depths, gain = worthwhile(table, sizes, COSTS, max_rows)
    tokens = table * sizes[:, None]
    chosen = [x for row, depth in zip(tokens, depths, strict=True) for x in row[:depth]]
    best = sorted(tokens[tokens > 0], reverse=True)
    fastest = max(speed(best[:count]) for count in range(max(min(max_rows - m, len(best)), 0) + 1))
    assert m + len(chosen) <= max_rows
    assert speed(chosen) == pytest.approx(fastest)
    assert gain == pytest.approx(n / COSTS.plain(n) * (1 / speed([]) - 1 / fastest))


def test_drafts_are_looked_for_in_few_steps_while_they_gain_nothing():
    generator, drafter = random.Random(1), small_drafter()
    prompts = [[i, generator.randrange(100)] for i in range(40)]
    fixed = [[generator.randrange(50) for _ in range(30)] for _ in prompts]

    def looks():
        return sum(drafter.should_look(len(prompts)) for _ in range(300)) / 300

    assert looks() == 1
    for _ in range(40):
        play(drafter, [[generator.randrange(50) for _ in range(30)] for _ in prompts], prompts)
    few = looks()
    assert 0 < few * (COSTS.looking + COSTS.looking_row * len(prompts)) <= PROBING * COSTS.plain(len(prompts))
    for _ in range(60):  # the few steps find that the policy repeats itself
        play(drafter, fixed, prompts)
    assert looks() == 1
