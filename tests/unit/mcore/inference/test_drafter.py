"""Drafts: true continuations of texts seen before, in fixed memory, and only where a row is worth its time."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.mcore.inference.draft_index import EVIDENCES, KINDS, DraftIndex
from megarl.mcore.inference.drafter import DRAFTED_ROW, DRAFTING_ROWS, FIXED_ROWS, PROBES, Drafter, worthwhile

TEXTS = st.lists(st.tuples(st.integers(0, 2), st.lists(st.integers(0, 3), min_size=1, max_size=40)), max_size=8)
CERTAIN = [1.0] * EVIDENCES


def small_index(texts, bits=8) -> DraftIndex:
    index = DraftIndex(bits)
    for prompt, text in texts:
        index.add(hash((prompt,)), text, 1)
    return index


@given(TEXTS, st.lists(st.integers(0, 3), min_size=1, max_size=12), st.integers(0, 2))
@settings(max_examples=300, deadline=None)
def test_a_guess_has_followed_the_context_in_some_text(texts, context, prompt):
    guess = small_index(texts).guess(hash((prompt,)), context, CERTAIN, 2.0)
    if guess is not None:
        is_own, length = KINDS[guess.evidence >> 3]
        # A context shorter than the n-gram is a whole text so far.
        ngram, is_start = context[-length:], len(context) < length
        known = [text for other, text in texts if other == prompt or not is_own]
        ends = [(t, i) for t in known for i in range(1, len(t)) if t[max(0, i - length) : i] == ngram]
        assert any(t[i] == guess.token for t, i in ends if not is_start or i == len(ngram))


def test_the_same_prompt_is_asked_first_and_the_most_frequent_follower_wins():
    index = DraftIndex(10)
    index.add(1, [5, 6, 7, 8], 1)
    for _ in range(3):
        index.add(2, [5, 6, 7, 9], 1)
    assert index.guess(1, [5, 6, 7], CERTAIN, 0.5).token == 8
    assert index.guess(2, [5, 6, 7], CERTAIN, 0.5).token == 9
    assert index.guess(3, [4, 5, 6, 7], CERTAIN, 0.5).token == 9
    assert index.guess(3, [4, 4, 4], CERTAIN, 0.5) is None
    index.add(2, [5, 6, 7, 8], 1)
    assert index.guess(2, [5, 6, 7], CERTAIN, 0.5).token == 9
    for _ in range(3):
        index.add(2, [5, 6, 7, 8], 1)
    assert index.guess(2, [5, 6, 7], CERTAIN, 0.5).token == 8  # the policy has changed


def test_memory_is_fixed_and_new_texts_replace_old_ones():
    index, generator = DraftIndex(6), random.Random(0)
    for _ in range(50):
        index.add(0, [generator.randrange(1000) for _ in range(100)], 1)
    assert len(index._hashes) == len(index._followers) == 64
    text = [2000, 2001, 2002, 2003]
    index.add(0, text, 1)
    assert index.guess(0, text[:-1], CERTAIN, 2.0).token == 2003


def play(drafter, truth, prompts, max_rows=256):
    """Generates the texts prompt + truth[i]; returns (steps, drafted, accepted)."""
    drafter.reset(())
    for i, prompt in enumerate(prompts):
        drafter.begin(i, prompt)
    texts = [drafter.text_of(i) for i in range(len(prompts))]
    steps = drafted = accepted = 0
    progress = [[] for _ in prompts]
    while open_texts := [i for i, tokens in enumerate(progress) if len(tokens) < len(truth[i])]:
        rest = [truth[i][len(progress[i]) :] for i in open_texts]
        followed = drafter.followed([texts[i] for i in open_texts])
        room = [len(rest[i]) - 1 for i in followed]
        found = drafter.draft([texts[open_texts[i]] for i in followed], room, len(open_texts), max_rows)
        drafts = [[] for _ in open_texts]
        for i, draft in zip(followed, found, strict=True):
            drafts[i] = draft
        steps, drafted = steps + 1, drafted + sum(map(len, drafts))
        assert sum(map(len, drafts)) + len(drafts) <= max_rows
        for i, draft, right in zip(open_texts, drafts, rest, strict=True):
            assert len(draft) < len(right)
            same = next((j for j, token in enumerate(draft) if token != right[j]), len(draft))
            accepted += same
            progress[i] += right[: same + 1]
            if texts[i].is_followed:
                drafter.extend(texts[i], progress[i][len(texts[i].tokens) - len(prompts[i]) :])
    for i, (prompt, response) in enumerate(zip(prompts, truth, strict=True)):
        drafter.finish(i, prompt + response)
    return steps, drafted, accepted


def test_responses_seen_before_are_drafted_and_random_ones_are_not():
    generator, drafter = random.Random(0), Drafter(DraftIndex(16))
    prompts = [[generator.randrange(500) for _ in range(5)] for _ in range(40)]
    fixed = [[generator.randrange(500) for _ in range(60)] for _ in range(40)]
    first, *_, last = (play(drafter, fixed, prompts) for _ in range(12))
    assert first[0] == 60 and last[0] <= 20 and last[2] >= 0.9 * last[1]
    for _ in range(6):
        fresh = [[generator.randrange(500) for _ in range(60)] for _ in range(40)]
        steps, drafted, _ = play(drafter, fresh, prompts)
    assert steps == 60 and drafted <= 0.02 * 40 * 60


def test_the_end_token_is_never_drafted():
    drafter = Drafter(DraftIndex(10))
    for _ in range(40):
        drafter.reset({9})
        drafter.begin(0, [1, 2])
        text = drafter.text_of(0)
        drafter.followed([text])
        (draft,) = drafter.draft([text], [5], 1, 8)
        drafter.finish(0, [1, 2, 3, 4, 9])
    assert draft == [3, 4]


@given(st.lists(st.lists(st.floats(0.01, 1.0), max_size=6), min_size=1, max_size=5), st.integers(5, 24))
@settings(max_examples=200, deadline=None)
def test_rows_are_those_with_the_most_tokens_for_their_time(chances, max_rows):
    chances, rows = [sorted(row, reverse=True) for row in chances], len(chances)

    def speed(accepted):
        overhead = DRAFTING_ROWS if accepted else 0
        return (rows + sum(accepted)) / (FIXED_ROWS + rows + overhead + DRAFTED_ROW * len(accepted))

    depths = worthwhile(chances, 1.0, max_rows)
    chosen = [chance for row, depth in zip(chances, depths, strict=True) for chance in row[:depth]]
    best = sorted((chance for row in chances for chance in row), reverse=True)
    assert rows + len(chosen) <= max_rows
    assert speed(chosen) == pytest.approx(max(speed(best[:n]) for n in range(min(max_rows - rows, len(best)) + 1)))


def test_only_some_prompts_are_followed_while_drafts_gain_nothing():
    generator, drafter = random.Random(1), Drafter(DraftIndex(16))
    prompts = [[i, generator.randrange(100)] for i in range(40)]
    fixed = [[generator.randrange(50) for _ in range(30)] for _ in prompts]

    def follows():
        drafter.reset(())
        for i, prompt in enumerate(prompts):
            drafter.begin(i, prompt)
        return len(drafter.followed([drafter.text_of(i) for i in range(len(prompts))]))

    assert follows() == len(prompts)
    for _ in range(12):
        play(drafter, [[generator.randrange(50) for _ in range(30)] for _ in prompts], prompts)
    few = follows()
    assert 0 < few < len(prompts) / PROBES * 3
    for _ in range(12):  # the probes find that the policy repeats itself
        play(drafter, fixed, prompts)
    assert follows() == len(prompts)
