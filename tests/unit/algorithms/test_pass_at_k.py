"""pass@k, mean@k and maj@k: against every subset, closed forms and expected values, to the last bit where exact."""

import itertools
import math
import random
from collections import Counter
from fractions import Fraction

import pytest

from megarl.algorithms.pass_at_k import maj_at_k, majority, mean_at_k, pass_at_k

CASES = [(n, c, k) for n in range(1, 10) for c in range(n + 1) for k in range(1, n + 1)]  # 330


def test_pass_at_k_is_the_share_of_subsets_with_a_correct_response():
    assert len(CASES) > 300
    for n, c, k in CASES:
        subsets = list(itertools.combinations([True] * c + [False] * (n - c), k))
        assert pass_at_k(n, c, k) == float(Fraction(sum(map(any, subsets)), len(subsets))), (n, c, k)


def test_pass_at_k_in_closed_form():
    generator = random.Random(0)
    for _ in range(300):
        n = generator.randint(1, 2000)
        c, k = generator.randint(0, n), generator.randint(1, n)
        assert pass_at_k(n, c, 1) == c / n
        assert pass_at_k(n, c, n) == float(c > 0)
        assert pass_at_k(n, 1, k) == k / n
        assert pass_at_k(n, 0, k) == 0 and pass_at_k(n, n, k) == 1
        product = math.prod(1 - k / i for i in range(n - c + 1, n + 1)) if n - c >= k else 0.0
        assert pass_at_k(n, c, k) == pytest.approx(1 - product, rel=0, abs=1e-12)


def test_pass_at_k_rises_with_k_and_with_c():
    for n, c, k in CASES:
        if k < n:
            assert pass_at_k(n, c, k + 1) >= pass_at_k(n, c, k)
        if c < n:
            assert pass_at_k(n, c + 1, k) >= pass_at_k(n, c, k)


def test_pass_at_k_is_unbiased():
    """Over all outcomes of n draws with success p the mean is 1 − (1 − p)^k, also at k = n."""
    for n, k, p in itertools.product((1, 2, 5, 8), range(1, 9), (0.1, 0.37, 0.9)):
        if k <= n:
            weights = [math.comb(n, c) * p**c * (1 - p) ** (n - c) for c in range(n + 1)]
            mean = math.fsum(w * pass_at_k(n, c, k) for c, w in enumerate(weights))
            assert mean == pytest.approx(1 - (1 - p) ** k, rel=0, abs=1e-14)


def test_mean_at_k_counts_the_voting_responses():
    verdicts = [True, False, True, True, False, False, True]
    assert [mean_at_k(verdicts, k) for k in range(1, 8)] == [4 / 7, 3 / 6, 3 / 6, 3 / 4, 3 / 5, 3 / 6, 4 / 7]


def elected(answers, correct) -> Fraction:
    """Expected correctness of the winner, by counting every way to break the tie and to pick one of its voters."""
    votes = Counter(answer for answer in answers if answer is not None)
    if not votes:
        return Fraction(0)
    winners = [answer for answer in votes if votes[answer] == max(votes.values())]
    shares = [[good for a, good in zip(answers, correct, strict=True) if a == winner] for winner in winners]
    return sum(Fraction(sum(share), len(share)) for share in shares) / len(winners)


def test_majority_equals_the_count_over_all_draws():
    for length in range(1, 6):
        for answers in itertools.product((None, "a", "b", "c"), repeat=length):
            verdicts = [answer == "a" for answer in answers]
            assert majority(answers, verdicts) == pytest.approx(float(elected(answers, verdicts)), rel=1e-15)
    generator = random.Random(1)
    for _ in range(300):  # verdicts that differ among responses with one answer
        answers = [generator.choice([None, "a", "b", "c", "d"]) for _ in range(generator.randint(1, 12))]
        verdicts = [answer is not None and generator.random() < 0.5 for answer in answers]
        assert majority(answers, verdicts) == pytest.approx(float(elected(answers, verdicts)), rel=1e-15)


@pytest.mark.parametrize("answers, right, expected", [
    ("aab", "a", 1.0), ("abb", "a", 0.0), ("ab", "a", 0.5), ("abc", "a", 1 / 3), ("aabbc", "a", 0.5),
    ("a--", "a", 1.0), ("---", "a", 0.0), ("-bb", "a", 0.0), ("-ab", "b", 0.5), ("aabb", "c", 0.0),
])  # fmt: skip
def test_majorities_ties_and_abstentions(answers, right, expected):
    given = [None if answer == "-" else answer for answer in answers]
    assert majority(given, [answer == right for answer in given]) == expected


def test_maj_at_k_is_the_mean_over_runs_that_share_nothing():
    answers, verdicts = list("abaabbaac"), [c == "a" for c in "abaabbaac"]
    assert maj_at_k(answers, verdicts, 9) == majority(answers, verdicts) == 1.0
    assert maj_at_k(answers, verdicts, 3) == (1 + 0 + 1) / 3
    assert maj_at_k(answers, verdicts, 4) == (1 + 0.5) / 2  # the last one votes in no run
    assert maj_at_k(answers, verdicts, 5) == 1.0
    assert maj_at_k(answers, verdicts, 1) == mean_at_k(verdicts, 1) == 5 / 9
    assert maj_at_k(answers, verdicts, 2) == (0.5 + 1 + 0 + 1) / 4


@pytest.mark.parametrize("n, k", [(4, 1), (4, 2), (5, 2), (4, 3), (4, 4)])
def test_maj_at_k_and_mean_at_k_are_unbiased(n, k):
    """Averaged over all outcomes of n draws, the estimates equal the expectation over k draws."""
    chances = {"a": 0.45, "b": 0.35, "c": 0.15, None: 0.05}

    def expected(draws, function):
        outcomes = itertools.product(chances, repeat=draws)
        return math.fsum(
            math.prod(chances[a] for a in answers) * function(answers, [a == "a" for a in answers])
            for answers in outcomes
        )

    found = expected(n, lambda answers, verdicts: maj_at_k(answers, verdicts, k))
    assert found == pytest.approx(expected(k, majority), rel=0, abs=1e-14)
    assert expected(n, lambda _, verdicts: mean_at_k(verdicts, k)) == pytest.approx(0.45, rel=0, abs=1e-14)
