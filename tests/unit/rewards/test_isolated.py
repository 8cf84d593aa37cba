"""Verifiers in confined processes: one process for all of a name, a score like that of the function inside."""

from megarl.confine import warm_process
from megarl.rewards import isolated, mathematics
from megarl.rewards.base import Sample, Score


def test_one_process_scores_for_all_verifiers_of_a_name(monkeypatch):
    half = Sample("q", "$\\frac{1}{2}$", "0.5")
    assert isolated.score("math-verify", 60.0, half) == Score(1.0, True, {"math_verify": 1.0}, "1/2")
    monkeypatch.setattr(warm_process, "_start", None)
    assert isolated.score("math-verify", 60.0, half) == mathematics.score_inside(half)
