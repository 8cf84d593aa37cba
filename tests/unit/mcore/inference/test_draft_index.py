"""The index of n-grams: true continuations of texts seen before, in fixed memory; and the sequences of requests."""

import random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.mcore.inference.draft_index import EVIDENCES, KINDS, MAX_CONTEXT, NO_TOKEN, DraftIndex, DraftSequences

TEXTS = st.lists(st.tuples(st.integers(0, 2), st.lists(st.integers(0, 3), min_size=1, max_size=40)), max_size=8)


CERTAIN = np.ones(EVIDENCES)


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
@settings(max_examples=300)
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
@settings(max_examples=100)
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
