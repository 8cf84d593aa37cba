"""Builds the verifiers of --reward and checks that the prompts have what they need."""

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from megarl import plugins
from megarl.data.prompts import PromptSet
from megarl.errors import UsageError
from megarl.rewards import by_file, code, expression, mathematics, tasks, text
from megarl.rewards.base import Sample, Score, Verifier
from megarl.rewards.isolated import Isolated
from megarl.rewards.judge.config import read_config
from megarl.rewards.pool import Workers
from megarl.rewards.verifiers import VerifierSet


@dataclasses.dataclass(frozen=True)
class Options:
    """The flags `--reward-FIELD` that verifiers read. Plain values, because it is pickled to the workers."""

    pattern: str | None
    format: str
    length: int
    url: str | None
    retries: int
    concurrency: int  # requests, or calls of an async function, at a time
    memory_mb: int
    timeout: float  # seconds per sample
    workers: int

    @classmethod
    def of(cls, settings) -> "Options":
        """From `megarl.flags.settings.Settings`, whose import would be too slow for a worker."""
        return cls(
            pattern=settings.reward_pattern, format=settings.reward_format, length=settings.reward_length,
            url=settings.reward_url, retries=settings.reward_retries, concurrency=settings.reward_concurrency,
            memory_mb=settings.reward_memory_mb, timeout=settings.reward_timeout, workers=settings.reward_workers,
        )  # fmt: skip


def _code(options: Options) -> Callable[[Sample], Score]:
    limits = code.Limits(seconds=options.timeout, memory_mb=options.memory_mb)
    return lambda sample: code.check(sample, limits)


def _remote(options: Options) -> Callable[[Sample], Score | float]:
    from megarl.rewards.remote import Remote  # importing urllib3 takes 0.25 s

    return Remote(options.url, options.retries, options.concurrency, options.timeout)


@dataclasses.dataclass(frozen=True)
class _BuiltIn:
    """`make` builds the function; `check` checks the prompts; `load` checks them with what the verifier imports.

    `limited`: it can hang, so it needs a time limit. `threads`: it enforces the limit itself and may run on as many
    threads as this option says. `wrong`: its score of a response with which it takes too long. `isolated`: a process of
    its own scores each response and says whether that took too long.
    """

    make: Callable[[Options], Callable[[Sample], Score | float]]
    check: Callable[[PromptSet], None] | None = None
    load: Callable[[PromptSet, Options], None] | None = None
    limited: bool = True
    threads: str | None = None
    wrong: Score | None = None
    isolated: bool = False


_BUILT_IN = {
    "exact-match": _BuiltIn(
        lambda _: text.exact_match, lambda prompts: text.check_answers("exact-match", prompts), limited=False
    ),
    "regex": _BuiltIn(lambda options: text.regex(options.pattern), wrong=Score(0.0, False, {"regex": 0.0})),
    "math-verify": _BuiltIn(
        lambda options: Isolated("math-verify", options.timeout), mathematics.check_mathematics,
        lambda prompts, options: mathematics.load_mathematics(prompts, options.timeout), limited=False,
        threads="workers", isolated=True,
    ),
    "reasoning-gym": _BuiltIn(
        lambda options: tasks.reasoning_gym(options.timeout), tasks.check_tasks,
        lambda prompts, _: tasks.load_tasks(prompts), limited=False, threads="workers", isolated=True,
    ),
    "format": _BuiltIn(lambda options: text.format_match(options.format), wrong=Score(0.0, False, {"format": 0.0})),
    "length": _BuiltIn(lambda options: text.length(options.length), limited=False),
    # Each program runs in its own process; a thread waits for it.
    "code": _BuiltIn(
        _code, code.check_code, lambda prompts, _: code.load_code(prompts), limited=False, threads="workers"
    ),
    "remote": _BuiltIn(_remote, limited=False, threads="concurrency"),
}  # fmt: skip
_PLUG_IN = _BuiltIn(make=None)
# Parameters by which rewards of other frameworks are known.
_SIGNATURES = {"verl": {"solution_str", "ground_truth"}, "OpenRLHF": {"queries", "prompts"}, "TRL": {"completions"}}


def build_verifiers(settings) -> VerifierSet:
    """The verifiers of all rewards of the run, all terms except those of `expression.UNVERIFIED`.

    Imports plug-ins; workers start with the first call.

    Raises UsageError for a malformed expression, a plug-in that cannot be imported, or a wrong option.
    """
    names = [term.name for term in by_file.terms_of_run(settings) if term.name not in expression.UNVERIFIED]
    options = Options.of(settings)
    traits = {name: _BUILT_IN.get(name, _PLUG_IN) for name in names}
    limited = [name for name in names if traits[name].limited]
    threads = {name: max(1, getattr(options, traits[name].threads)) for name in names if traits[name].threads}
    workers = Workers(options.workers, (options, limited)) if options.workers and limited else None
    with plugins.kept(f"--reward {settings.reward}"):
        verifiers = build_named_verifiers(options, names)
    return VerifierSet(
        verifiers, dict.fromkeys(limited, options.timeout), threads, workers, settings.reward_fallback,
        wrong={name: traits[name].wrong for name in names if traits[name].wrong},
        timing=[name for name in names if traits[name].wrong or traits[name].isolated],
    )  # fmt: skip


def needs_whole_groups(settings) -> bool:
    """Whether a term of `--reward` compares the responses to a prompt. UsageError as of `build_verifiers` and
    `read_config`."""
    names = [term.name for term in by_file.terms_of_run(settings)]
    if expression.ADAPTIVE in names:
        return True
    if expression.JUDGE in names and read_config(settings.judge_config).compares:
        return True
    plug_ins = [name for name in names if name not in _BUILT_IN and name not in expression.UNVERIFIED]
    with plugins.kept(f"--reward {settings.reward}"):
        return any(verifier.grouped for verifier in build_named_verifiers(Options.of(settings), plug_ins).values())


def build_named_verifiers(options: Options, names: Sequence[str]) -> dict[str, Verifier]:
    """The verifiers `names`, built-in or plug-in. Raises UsageError as `build_verifiers` does."""
    built_in: dict[str, Any] = {name: _BUILT_IN[name].make(options) for name in names if name in _BUILT_IN}
    functions = {name: plugins.load("--reward", name, built_in, awaits=True) for name in names}
    for name in functions.keys() - built_in.keys():
        _check_signature(name, functions[name])
    limits = options.timeout, options.concurrency
    verifiers = {name: Verifier(name, function, *limits) for name, function in functions.items()}
    for name, verifier in verifiers.items():
        if verifier.batched and verifier.grouped:
            raise UsageError(f"--reward {name}: is marked both batched and grouped; keep the mark of the list it takes")
    return verifiers


def _check_signature(name: str, function: Callable):
    """UsageError unless a plug-in can be called with one argument, or if it is written for another framework."""
    if inspect.isclass(function):
        raise UsageError(f"--reward {name}: is a class; allowed is a function, or an object that can be called")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # of functions in C, which do not tell
        return
    peers = [peer for peer, names in _SIGNATURES.items() if names <= signature.parameters.keys()]
    try:
        signature.bind(None)
        fits = not peers
    except TypeError:
        fits = False
    if not fits:
        of_peer = f", the signature of a reward of {peers[0]}" if peers else ""
        wrapper = f", with megarl.rewards.of_{peers[0].lower()}" if peers else ""
        raise UsageError(
            f"--reward {name}: takes {signature}{of_peer}; megarl calls it with one argument, a Sample: wrap it"
            f"{wrapper} (docs/rewards.md)"
        )


def check_prompts(settings, prompts: PromptSet, scores_here: bool = False):
    """UsageError with file and line if a prompt lacks what a built-in verifier needs.

    `scores_here`: this process will score, so also import and build what the prompts need.
    """
    for name, own in prompts_of_terms(settings, prompts).items():
        built_in = _BUILT_IN.get(name)
        if built_in and built_in.check:
            built_in.check(own)
        if built_in and built_in.load and scores_here:
            built_in.load(own, Options.of(settings))


def prompts_of_terms(settings, prompts: PromptSet) -> dict[str, PromptSet]:
    """The prompts of a set that each term scores: all, or those of files of a mixture whose reward has it."""
    expressions = by_file.expressions_of(settings)
    if not prompts.entries:
        return {term.name: prompts for term in expressions[settings.reward]}
    numbers: dict[str, set[int]] = {}
    for number, reward in enumerate(by_file.rewards_of(settings, prompts.entries)):
        for term in expressions[reward]:
            numbers.setdefault(term.name, set()).add(number)
    return {name: prompts.of_entries(own) for name, own in numbers.items()}
