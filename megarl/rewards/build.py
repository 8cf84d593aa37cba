"""Builds the verifiers of --reward and checks that the prompts have what they need."""

import dataclasses
import importlib
from collections.abc import Callable, Sequence
from typing import Any

from megarl import plugins
from megarl.data.prompts import PromptSet
from megarl.rewards import code, expression, mathematics, tasks, text
from megarl.rewards.base import Sample, Score, Verifier
from megarl.rewards.pool import Workers
from megarl.rewards.verifiers import VerifierSet


@dataclasses.dataclass(frozen=True)
class Options:
    """The `--reward-…` flags that verifiers read. Plain values, because it is pickled to the workers."""

    pattern: str | None
    format: str
    length: int
    url: str | None
    retries: int
    concurrency: int
    memory_mb: int
    timeout: float  # seconds per sample
    workers: int

    @classmethod
    def of(cls, settings) -> "Options":
        """From `megarl.flags.settings.Settings`, whose import would be too slow for a worker."""
        return cls(
            pattern=settings.reward_pattern,
            format=settings.reward_format,
            length=settings.reward_length,
            url=settings.reward_url,
            retries=settings.reward_retries,
            concurrency=settings.reward_concurrency,
            memory_mb=settings.reward_memory_mb,
            timeout=settings.reward_timeout,
            workers=settings.reward_workers,
        )


def _code(options: Options) -> Callable[[Sample], Score]:
    limits = code.Limits(seconds=options.timeout, memory_mb=options.memory_mb)
    return lambda sample: code.check(sample, limits)


def _remote(options: Options) -> Callable[[Sample], Score | float]:
    from megarl.rewards.remote import Remote  # importing urllib3 takes 0.25 s

    return Remote(options.url, options.retries, options.concurrency, options.timeout)


@dataclasses.dataclass(frozen=True)
class _BuiltIn:
    """`make` builds the function; `check` checks the prompts; `load` checks them with what the verifier imports.

    `package`: slow to import, so workers import it at start. `limited`: it can hang, so it needs a time limit.
    `threads`: it enforces the limit itself and may run on this many threads.
    """

    make: Callable[[Options], Callable[[Sample], Score | float]]
    check: Callable[[PromptSet], None] | None = None
    load: Callable[[PromptSet, Options], None] | None = None
    package: str | None = None
    limited: bool = True
    threads: Callable[[Options], int] | None = None


_BUILT_IN = {
    "exact-match": _BuiltIn(
        lambda _: text.exact_match, lambda prompts: text.check_answers("exact-match", prompts), limited=False
    ),
    "regex": _BuiltIn(lambda options: text.regex(options.pattern)),
    "math-verify": _BuiltIn(
        lambda _: mathematics.math_verify, mathematics.check_mathematics,
        lambda prompts, options: mathematics.load_mathematics(prompts, options.timeout), "math_verify",
    ),
    "reasoning-gym": _BuiltIn(
        lambda _: tasks.reasoning_gym, tasks.check_tasks, lambda prompts, _: tasks.load_tasks(prompts), "reasoning_gym"
    ),
    "format": _BuiltIn(lambda options: text.format_match(options.format)),
    "length": _BuiltIn(lambda options: text.length(options.length), limited=False),
    # Each program runs in its own process; a thread waits for it.
    "code": _BuiltIn(
        _code, code.check_code, lambda prompts, _: code.load_code(prompts), limited=False,
        threads=lambda options: max(1, options.workers),
    ),
    "remote": _BuiltIn(_remote, limited=False, threads=lambda options: options.concurrency),
}  # fmt: skip
_PLUG_IN = _BuiltIn(make=None)


def build_verifiers(settings) -> VerifierSet:
    """The verifiers of `--reward`, all terms except `model`. Imports plug-ins; workers start with the first call.

    Raises UsageError for a malformed expression, a plug-in that cannot be imported, or a wrong option.
    """
    names = [term.name for term in expression.parse(settings.reward) if term.name != expression.MODEL]
    options = Options.of(settings)
    traits = {name: _BUILT_IN.get(name, _PLUG_IN) for name in names}
    limited = [name for name in names if traits[name].limited]
    threads = {name: traits[name].threads(options) for name in names if traits[name].threads}
    workers = Workers(options.workers, (options, limited)) if options.workers and limited else None
    verifiers = build_named_verifiers(options, names)
    return VerifierSet(verifiers, dict.fromkeys(limited, options.timeout), threads, workers, settings.reward_fallback)


def build_named_verifiers(options: Options, names: Sequence[str]) -> dict[str, Verifier]:
    """The verifiers `names`, built-in or plug-in. Raises UsageError as `build_verifiers` does."""
    built_in: dict[str, Any] = {name: _BUILT_IN[name].make(options) for name in names if name in _BUILT_IN}
    return {name: Verifier(name, plugins.load("--reward", name, built_in)) for name in names}


def import_packages(names: Sequence[str]):
    """Import the packages of the verifiers `names` now; it takes seconds, which their first sample would pay."""
    for name in names:
        if name in _BUILT_IN and _BUILT_IN[name].package:
            importlib.import_module(_BUILT_IN[name].package)


def check_prompts(settings, prompts: PromptSet, scores_here: bool = False):
    """UsageError with file and line if a prompt lacks what a built-in verifier needs.

    `scores_here`: this process will score, so also import and build what the prompts need.
    """
    for _, name in expression.parse(settings.reward):
        built_in = _BUILT_IN.get(name)
        if built_in and built_in.check:
            built_in.check(prompts)
        if built_in and built_in.load and scores_here:
            built_in.load(prompts, Options.of(settings))
