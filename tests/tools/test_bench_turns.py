"""The comparison of engines with and without the cache of earlier turns, on a small model."""

import pytest

from tests.helpers.tiers import long
from tests.helpers.tools import SMALL
from tests.helpers.worlds import run_world
from tools.bench import common, turns

SMALL_CASE = "--episodes 6 --turns 3 --observations 5-9 --written 20 --prompt-length 18 --buffer-gb 0.01 --rounds 2"


def measured(rank: int, flags: str) -> dict:
    return turns.measure(turns.parse(f"{SMALL_CASE} {flags}".split()), SMALL)


@pytest.mark.parametrize(("flags", "found_again"), [long(("", 0)), ("--samples 3", 4)])
def test_both_sides_generate_the_same_from_different_amounts_of_reading(flags, found_again):
    (found,) = run_world(measured, 1, flags)
    assert {name: len(side["seconds"]) for name, side in found["sides"].items()} == {"reuse": 2, "read again": 2}
    read = found["read_tokens"]
    episodes = turns.episodes_of(turns.parse(SMALL_CASE.split()), SMALL.vocab)
    observed = [[len(tokens) for tokens in row] for row in episodes.observations]
    assert all(5 <= length <= 9 for row in observed for length in row) and len(set(sum(observed, []))) > 1
    prompts = sum(18 + (38 + first) + (58 + first + second) for first, second in observed)
    kept = sum((18 + 20 - 1) // 16 + (58 + first - 1) // 16 for first, _ in observed) + found_again
    assert read == {"read again": prompts, "reuse": prompts - 16 * kept} and found["reused_tokens"] == 16 * kept
    assert found["read_ratio"] == read["read again"] / read["reuse"] and found["work"] == {"tokens": 6 * 3 * 20}


def different(rank: int) -> str:
    """The message if one engine gets other observations."""
    make, made = turns.episodes_of, []

    def episodes_of(args, vocab):
        made.append(make(args, vocab))
        made[-1].observations[0][0][0] = len(made) % 7
        return made[-1]

    turns.episodes_of = episodes_of
    with pytest.raises(common.Unusable) as ended:
        turns.measure(turns.parse(SMALL_CASE.split()), SMALL)
    return str(ended.value)


def test_different_responses_are_not_compared():
    assert run_world(different, 1) == ["turns.py: responses with reuse differ from those without"]


def test_wrong_flags(refusal):
    cases = (("--turns 0", "--turns 0: must be at least 1"), ("--rounds 0", "--rounds 0: must be at least 1"),
             ("--observations 9-5", "--observations 9-5: allowed is MIN-MAX, at least 1"),
             ("--observations 7", "--observations 7: allowed is MIN-MAX, at least 1"))  # fmt: skip
    for flags, message in cases:
        assert message in refusal(turns.parse, flags.split())
