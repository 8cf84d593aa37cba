"""The value of --reward, a weighted sum of named terms as in `model+0.2*format+0*reasoning-gym`; the rewards of a run.

Imports no library that takes long, because flags are parsed before anything else is imported.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from megarl import plugins
from megarl.data.mixture import MixtureEntry, is_mixture, read_mixture
from megarl.data.prompt import RL
from megarl.errors import UsageError
from megarl.measurements import value_of
from megarl.plain_files import parse_named_paths
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
    """The terms of `weight*name+name+…` in order; the default weight is 1. A name is one of `NAMES` or a plug-in, which
    is imported later. `none` has no terms. UsageError: malformed, an unknown name, a name twice, a weight that is not
    finite, or a term that lacks another.
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


# -- the rewards of a run: that of --reward, and those that files of mixtures have instead ---------------------------


def expressions_of(settings) -> dict[str, tuple[Term, ...]]:
    """The terms of each reward by its text, that of `--reward` first. UsageError for a malformed one, a file of a
    mixture that cannot be read, or rewards that cannot be together.
    """
    found = {settings.reward: parse(settings.reward)}
    for where, entry in _entries(settings):
        if entry.reward is not None and entry.reward not in found:
            found[entry.reward] = _parsed(entry.reward, where)
            _check_together(settings, found[entry.reward], found[settings.reward], where)
    return found


def check_parts(settings, needs: Iterable[str]):
    """UsageError for an estimator with these needs that reads the parts of a reward, where files have their own."""
    if "parts" in needs and len(expressions_of(settings)) > 1:
        raise UsageError(
            f"--advantage {settings.advantage}: compares the terms of one --reward in each group; files of the mixture"
            " have rewards of their own"
        )


def terms_of_run(settings) -> tuple[Term, ...]:
    """The terms of all rewards: of several with one name the first that counts, if any does."""
    by_name: dict[str, Term] = {}
    for terms in expressions_of(settings).values():
        for term in terms:
            known = by_name.setdefault(term.name, term)
            by_name[term.name] = known if known.weight else term
    return tuple(by_name.values())


def rewards_of(settings, entries: Sequence[MixtureEntry]) -> list[str]:
    """The text of each entry's reward."""
    return [settings.reward if entry.reward is None else entry.reward for entry in entries]


def _entries(settings) -> Iterator[tuple[str, MixtureEntry]]:
    values = {"--prompts": settings.prompts, "--eval-prompts": settings.eval_prompts}
    named = {} if settings.evals is None else parse_named_paths(settings.evals)
    values |= {f"--evals {name}": path for name, path in named.items()}
    for flag, value in values.items():
        if value and is_mixture(value):
            for entry in read_mixture(value, flag, RL):
                yield f"{flag} {value}: {entry.name}: reward", entry


def _parsed(text: str, where: str) -> tuple[Term, ...]:
    try:
        terms = parse(text)
    except UsageError as error:
        raise UsageError(f"{where}{str(error).removeprefix('--reward')}") from None
    if not terms:
        raise UsageError(f"{where} {text}: allowed are terms of --reward")
    return terms


def _check_together(settings, terms: tuple[Term, ...], common: tuple[Term, ...], where: str):
    own, others = ([term.weight for term in of if term.name == ENVIRONMENT] for of in (terms, common))
    if settings.environment is not None and own != others:
        raise UsageError(f"{where}: needs the term environment as often as --reward has it: turns have one weight")
