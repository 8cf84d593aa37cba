"""The rewards of a run: that of --reward, and those that files of mixtures have instead."""

from collections.abc import Iterable, Iterator, Sequence

from megarl.data.column_names import RL
from megarl.data.mixture import MixtureEntry, is_mixture, read_mixture
from megarl.errors import UsageError
from megarl.plain_files import parse_named_paths
from megarl.rewards.expression import ENVIRONMENT, Term, parse


def expressions_of(settings) -> dict[str, tuple[Term, ...]]:
    """The terms of each reward by its text, that of `--reward` first.

    UsageError for a malformed one, a file of a mixture that cannot be read, or rewards that cannot be together.
    """
    found = {settings.reward: parse(settings.reward)}
    for where, entry in _entries(settings):
        if entry.reward is not None and entry.reward not in found:
            found[entry.reward] = _parsed(entry.reward, where)
            _check(settings, found[entry.reward], found[settings.reward], where)
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


def _check(settings, terms: tuple[Term, ...], common: tuple[Term, ...], where: str):
    own, others = ([term.weight for term in of if term.name == ENVIRONMENT] for of in (terms, common))
    if settings.environment is not None and own != others:
        raise UsageError(f"{where}: needs the term environment as often as --reward has it: turns have one weight")
