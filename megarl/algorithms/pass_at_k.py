"""pass@k, mean@k and maj@k, estimated from n responses to a prompt.

All three are unbiased estimates of the result of k fresh responses, 1 ≤ k ≤ n, and deterministic: no subset is sampled.
"""

import math
from collections import Counter
from collections.abc import Sequence


def pass_at_k(n: int, c: int, k: int) -> float:
    """Probability that k of n responses, c of them correct, include a correct one: 1 − C(n−c, k) / C(n, k).

    The unbiased estimator of 2107.03374, eq. 1. Its product form Π (1 − k/i) rounds at every factor; Python integers
    round only once, in the division.
    """
    every = math.comb(n, k)
    return (every - math.comb(n - c, k)) / every


def mean_at_k(correct: Sequence[bool], k: int) -> float:
    """Fraction of correct responses among those that vote in maj@k, so that maj@k − mean@k is the gain of voting.

    These are the first k·⌊n/k⌋ of n responses.
    """
    used = len(correct) // k * k
    return sum(correct[:used]) / used


def maj_at_k(answers: Sequence[str | None], correct: Sequence[bool], k: int) -> float:
    """Probability that the majority of k responses is correct (self-consistency, 2203.11171).

    The mean of `majority` over the ⌊n/k⌋ runs of k consecutive responses. The runs are disjoint, so for i.i.d.
    responses the estimate is unbiased. Arguments as for `majority`, one entry per response.
    """
    runs = [slice(start, start + k) for start in range(0, len(answers) - k + 1, k)]
    return math.fsum(majority(answers[run], correct[run]) for run in runs) / len(runs)


def majority(answers: Sequence[str | None], correct: Sequence[bool]) -> float:
    """Expected correctness of the most frequent answer, with ties broken at random; 0 without any answer.

    Args:
        answers: each response's answer; None (e.g. of a truncated response) does not vote.
        correct: each response's verdict. If verdicts of the same answer differ (e.g. of a verifier that reads the
            whole text), their mean counts.
    """
    votes = Counter(answer for answer in answers if answer is not None)
    right = Counter(answer for answer, good in zip(answers, correct, strict=True) if good)
    top = max(votes.values(), default=0)
    winners = [answer for answer, count in votes.items() if count == top]
    return sum(right[answer] for answer in winners) / (top * len(winners)) if winners else 0.0
