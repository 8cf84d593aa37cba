"""The value of --reward: a weighted sum of named terms, such as `model+0.2*format+0*reasoning-gym`.

Imports only the standard library, because flags are parsed before anything else is imported.
"""

import re
from typing import NamedTuple

from megarl import plugins
from megarl.errors import UsageError
from megarl.measurements import value_of
from megarl.rewards import VERIFIERS

MODEL = "model"
JUDGE = "judge"
ENVIRONMENT = "environment"
# Terms computed from a response's length and text and from the scores of the other terms (`shaping`).
COSINE, REPETITION, TRUNCATED, ADAPTIVE = SHAPING = ("cosine", "repetition", "truncated", "adaptive-length")
FORMS = ("format", "length", *SHAPING)  # terms that cannot tell whether an answer is right
UNVERIFIED = (MODEL, JUDGE, ENVIRONMENT, *SHAPING)  # terms that no verifier scores
INFALLIBLE = (MODEL, ENVIRONMENT, *SHAPING)  # terms that score every sample
NONE = "none"  # no term at all
EXACT_MATCH = "exact-match"
NAMES = (MODEL, JUDGE, ENVIRONMENT, *VERIFIERS, *SHAPING)

_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_TERM = re.compile(rf"\s*(?:(?P<weight>{_NUMBER})\s*\*\s*)?(?P<name>[^\s+*]*)\s*(?P<plus>\+?)")


class Term(NamedTuple):
    """One summand. Weight 0: scored and logged, but not added to the reward."""

    weight: float
    name: str


def parse(text: str) -> tuple[Term, ...]:
    """The terms of `weight*name+name+…` in order; the default weight is 1.

    A name is one of `NAMES` or a plug-in, which is imported later. `none` has no terms. UsageError: malformed, an
    unknown name, a name twice, a weight that is not finite, or a term that lacks another.
    """
    if text.strip() == NONE:
        return ()
    terms, position, more = [], 0, True
    while more:
        match = _TERM.match(text, position)
        if not match["name"] or not (match["plus"] or match.end() == len(text)):
            where = text[position:].strip() or "its end"
            raise UsageError(f"--reward {text}: malformed at {where}; write weight*name+name+…; allowed: {_allowed()}")
        terms.append(Term(float(match["weight"] or 1.0), match["name"]))
        position, more = match.end(), bool(match["plus"])
    _check(text, terms)
    return tuple(terms)


def _check(text: str, terms: list[Term]) -> None:
    seen = set()
    for weight, name in terms:
        if "," in name:
            raise UsageError(f"--reward {text}: has a comma in {name}; write weight*name+name+…")
        if name not in NAMES and not plugins.is_plugin(name):
            raise UsageError(f"--reward {text}: {name} is unknown; allowed: {_allowed()}")
        if name in seen:
            raise UsageError(f"--reward {text}: {name} appears twice; give each name one weight")
        try:
            value_of(f"the weight of {name}", weight)
        except ValueError as error:
            raise UsageError(f"--reward {text}: {error}") from None
        seen.add(name)
    others = seen - {TRUNCATED, ADAPTIVE}
    if COSINE in seen and not seen - {*FORMS}:
        raise UsageError(
            f"--reward {text}: {COSINE} needs a term that says which responses are correct, as in 0*math-verify+cosine"
        )
    if seen and not others:
        raise UsageError(f"--reward {text}: {ADAPTIVE} and {TRUNCATED} change the reward of other terms; name one")


def _allowed() -> str:
    return f"{', '.join(NAMES)}, or a plug-in as {plugins.FORMS}"
