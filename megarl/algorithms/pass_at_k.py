"""What k responses to a prompt are worth, estimated from n of them: pass@k, mean@k, maj@k.

All three are unbiased estimates of what k fresh responses would give, and all are deterministic: no subset is drawn.
"""

import math
from collections import Counter
from collections.abc import Sequence


def pass_at_k(n: int, c: int, k: int) -> float:
    """Probability that k of n responses, c of them correct, hold a correct one: 1 − C(n−c, k) / C(n, k).

    The unbiased estimator of 2107.03374, eq. 1. Its product form Π (1 − k/i) rounds at every factor; whole numbers of
    any size round once, in the division.

    Raises:
        ValueError: not 0 ≤ c ≤ n or not 1 ≤ k ≤ n.
    """
    if not 0 <= c <= n:
        raise ValueError(f"{c} of {n} responses are correct; allowed is 0 to {n}")
    _check_k(n, k)
    every = math.comb(n, k)
    return (every - math.comb(n - c, k)) / every


def mean_at_k(correct: Sequence[bool], k: int) -> float:
    """Share of correct responses among those that maj@k votes with: maj@k − mean@k is what voting gains.

    These are the first k·⌊n/k⌋ of n responses, all of them where k divides n. ValueError unless 1 ≤ k ≤ n.
    """
    _check_k(len(correct), k)
    used = len(correct) // k * k
    return sum(correct[:used]) / used


def maj_at_k(answers: Sequence[str | None], correct: Sequence[bool], k: int) -> float:
    """Share of votes of k responses that elect a correct answer (self-consistency, 2203.11171).

    The mean of `majority` over the ⌊n/k⌋ runs of k consecutive responses. They share no response, so for responses
    drawn alike and apart the estimate is unbiased. The arguments are those of `majority`, one of each a response.

    Raises:
        ValueError: not 1 ≤ k ≤ n, or not as many answers as verdicts.
    """
    _check_k(len(answers), k)
    if len(answers) != len(correct):
        raise ValueError(f"{len(answers)} answers and {len(correct)} verdicts")
    runs = [slice(start, start + k) for start in range(0, len(answers) - k + 1, k)]
    return math.fsum(majority(answers[run], correct[run]) for run in runs) / len(runs)


def majority(answers: Sequence[str | None], correct: Sequence[bool]) -> float:
    """Expected correctness of the answer that most responses give, ties decided at random; 0 where none gives any.

    Args:
        answers: each response's answer; None, as of one that was cut off, votes for nothing.
        correct: each response's verdict. Where it differs among responses with one answer, as with a verifier that
            reads the whole text, the answer counts with their mean.
    """
    votes = Counter(answer for answer in answers if answer is not None)
    right = Counter(answer for answer, good in zip(answers, correct, strict=True) if good)
    most = max(votes.values(), default=0)
    winners = [answer for answer, count in votes.items() if count == most]
    return sum(right[answer] for answer in winners) / (most * len(winners)) if winners else 0.0


def _check_k(n: int, k: int):
    if not 1 <= k <= n:
        raise ValueError(f"k is {k}; allowed is 1 to the number of responses, {n}")
