"""Drafts: true continuations of texts seen before, in fixed memory, and only where a row is worth its time."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.mcore.inference.draft_index import (
    EVIDENCES,
    KINDS,
    MAX_CONTEXT,
    MAX_DEPTH,
    NO_TOKEN,
    DraftIndex,
    DraftSequences,
)
from megarl.mcore.inference.drafter import PROBING, Drafter, StepCosts, worthwhile

TEXTS = st.lists(st.tuples(st.integers(0, 2), st.lists(st.integers(0, 3), min_size=1, max_size=40)), max_size=8)
CERTAIN = np.ones(EVIDENCES)
COSTS = StepCosts(step=1000, row=30, looking=60, looking_row=1, drafting=100, drafted_row=32)


def context_of(tokens) -> np.ndarray:
    return np.array([[NO_TOKEN] * MAX_CONTEXT + list(tokens)])[:, -MAX_CONTEXT:]


def key_of(prompt: int) -> np.ndarray:
    return np.array([hash((prompt,)) & ((1 << 64) - 1)], np.uint64)


def add_text(index, prompt, text):
    for end in range(1, len(text)):
        index.add(key_of(prompt), context_of(text[:end]), np.array(text[end : end + 1]))


def guess_of(index, prompt, context, enough=2.0) -> int | None:
    guesses = index.guess(key_of(prompt), context_of(context), CERTAIN, enough)
    return int(guesses.tokens[0]) if guesses.rates[0] > 0 else None


@given(TEXTS, st.lists(st.integers(0, 3), min_size=1, max_size=12), st.integers(0, 2))
@settings(max_examples=300, deadline=None)
def test_a_guess_has_followed_the_context_in_some_text(texts, context, prompt):
    index = DraftIndex(8)
    for other, text in texts:
        add_text(index, other, text)
    guesses = index.guess(key_of(prompt), context_of(context), CERTAIN, 2.0)
    if guesses.rates[0] > 0:
        is_own, length = KINDS[int(guesses.evidence[0]) >> 3]
        # A context shorter than the n-gram is a whole text so far.
        ngram, is_start = context[-length:], len(context) < length
        known = [text for other, text in texts if other == prompt or not is_own]
        ends = [(t, i) for t in known for i in range(1, len(t)) if t[max(0, i - length) : i] == ngram]
        assert any(t[i] == guesses.tokens[0] for t, i in ends if not is_start or i == len(ngram))


def test_the_same_prompt_is_asked_first_and_the_most_frequent_follower_wins():
    index = DraftIndex(10)
    add_text(index, 1, [5, 6, 7, 8])
    for _ in range(3):
        add_text(index, 2, [5, 6, 7, 9])
    assert guess_of(index, 1, [5, 6, 7], 0.5) == 8
    assert guess_of(index, 2, [5, 6, 7], 0.5) == 9
    assert guess_of(index, 3, [4, 5, 6, 7], 0.5) == 9
    assert guess_of(index, 3, [4, 4, 4], 0.5) is None
    add_text(index, 2, [5, 6, 7, 8])
    assert guess_of(index, 2, [5, 6, 7], 0.5) == 9
    for _ in range(3):
        add_text(index, 2, [5, 6, 7, 8])
    assert guess_of(index, 2, [5, 6, 7], 0.5) == 8  # the policy has changed


def test_memory_is_fixed_and_new_texts_replace_old_ones():
    index, generator = DraftIndex(6), random.Random(0)
    for _ in range(50):
        add_text(index, 0, [generator.randrange(1000) for _ in range(100)])
    assert len(index._hashes) == len(index._followers) == 64
    text = [2000, 2001, 2002, 2003]
    add_text(index, 0, text)
    assert guess_of(index, 0, text[:-1]) == 2003


@given(st.lists(st.lists(st.lists(st.integers(0, 50), max_size=5), min_size=3, max_size=3), max_size=6))
@settings(max_examples=100, deadline=None)
def test_texts_are_those_that_were_added_and_only_guesses_after_right_ones_are_checked(steps):
    texts, known = DraftSequences(3, 40), [[7, i] for i in range(3)]
    for i, prompt in enumerate(known):
        texts.begin(i, prompt)
    rows, generator = texts.rows_of(np.arange(3)), random.Random(0)
    for step in steps:
        guesses = [[generator.choice([token, 51]) for token in [*tokens, 0]] for tokens in step]
        for row, guess in zip(rows, guesses, strict=True):
            texts.guessed[row, : len(guess)], texts.guess_counts[row] = guess, len(guess)
            texts.evidence[row, : len(guess)] = range(len(guess))
        flat = np.array([token for tokens in step for token in tokens], np.int32)
        evidence, is_right = texts.extend(rows, np.array([len(tokens) for tokens in step]), flat)
        expected = []
        for tokens, guess in zip(step, guesses, strict=True):
            for place, (token, guessed) in enumerate(zip(tokens, guess, strict=False)):
                expected.append((place, token == guessed))
                if token != guessed:
                    break
        assert list(zip(evidence.tolist(), is_right.tolist(), strict=True)) == expected
        for i, tokens in enumerate(step):
            known[i] += tokens
    for row, text in zip(rows, known, strict=True):
        context = texts.contexts(np.array([row]), np.array([len(text)]))
        assert context.tolist() == context_of(text).tolist()


def test_texts_that_ended_are_indexed_when_their_rows_are_needed():
    texts, index = DraftSequences(2, 8), DraftIndex(8)
    for number in range(5):
        if texts.is_full:
            texts.take_ended()
            texts.index_all((), index)
        texts.begin(number, [1, number])
        texts.end(number, [1, number, 3, 4])
    texts.take_ended()
    texts.index_all((), index)
    assert len(texts._free) == 2
    key = np.array([hash((1, 4)) & ((1 << 64) - 1)], np.uint64)
    guesses = index.guess(key, context_of([1, 4, 3]), CERTAIN, 2.0)
    assert (guesses.tokens[0], guesses.rates[0]) == (4, 1)


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
@settings(max_examples=200, deadline=None)
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
