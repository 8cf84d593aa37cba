"""Builds the verifiers of --reward and checks that the prompts have what they need."""

import inspect
import os
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection

from megarl import plugins
from megarl.child_process import parent
from megarl.data.prompts import PromptSet
from megarl.errors import UsageError
from megarl.rewards import VERIFIERS, expression
from megarl.rewards.base import BuiltIn, Options, Verifier
from megarl.rewards.judge.config import read_config
from megarl.rewards.verifier_workers import Workers
from megarl.rewards.verifiers import VerifierSet

_PLUG_IN = BuiltIn(make=None)  # what is not built in
# Parameters by which rewards of other frameworks are known.
_SIGNATURES = {"verl": {"solution_str", "ground_truth"}, "OpenRLHF": {"queries", "prompts"}, "TRL": {"completions"}}


def build_verifiers(settings) -> VerifierSet:
    """The verifiers of all rewards of the run, all terms except those of `expression.UNVERIFIED`.

    Imports plug-ins; workers start with the first call.

    Raises UsageError for a malformed expression, a plug-in that cannot be imported, or a wrong option.
    """
    names = [term.name for term in expression.terms_of_run(settings) if term.name not in expression.UNVERIFIED]
    options = Options.of(settings)
    traits = {name: _built_in(name) or _PLUG_IN for name in names}
    limited = [name for name in names if traits[name].limited]
    threads = {name: max(1, getattr(options, traits[name].threads)) for name in names if traits[name].threads}
    workers = Workers(options.workers, (options, limited)) if options.workers and limited else None
    with plugins.kept(f"--reward {settings.reward}"):
        verifiers = build_named_verifiers(options, names)
    seconds, wrong = dict.fromkeys(limited, options.timeout), {name: traits[name].wrong for name in names}
    wrong = {name: score for name, score in wrong.items() if score}
    timing = [name for name in names if name in wrong or traits[name].isolated]
    return VerifierSet(verifiers, seconds, threads, workers, settings.reward_fallback, wrong, timing)


def needs_whole_groups(settings) -> bool:
    """Whether a term of `--reward` compares the responses to a prompt. UsageError as of `build_verifiers` and
    `read_config`."""
    names = [term.name for term in expression.terms_of_run(settings)]
    if expression.ADAPTIVE in names:
        return True
    if expression.JUDGE in names and read_config(settings.judge_config).compares:
        return True
    plug_ins = [name for name in names if plugins.is_plugin(name)]
    with plugins.kept(f"--reward {settings.reward}"):
        return any(verifier.grouped for verifier in build_named_verifiers(Options.of(settings), plug_ins).values())


def build_named_verifiers(options: Options, names: Sequence[str]) -> dict[str, Verifier]:
    """The verifiers `names`, built-in or plug-in. Raises UsageError as `build_verifiers` does."""
    rows = {name: _built_in(name) for name in names}
    functions = {name: row.make(options) if row else _plug_in(name) for name, row in rows.items()}
    verifiers = {
        name: Verifier(name, function, options.timeout, options.concurrency) for name, function in functions.items()
    }
    for name, verifier in verifiers.items():
        if verifier.batched and verifier.grouped:
            raise UsageError(f"--reward {name}: is marked both batched and grouped; keep the mark of the list it takes")
    return verifiers


def _built_in(name: str) -> BuiltIn | None:
    return plugins.load("--reward", name, VERIFIERS) if name in VERIFIERS else None


def _plug_in(name: str) -> Callable:
    """The function of a plug-in. UsageError if there is none that a verifier can call."""
    function = plugins.load("--reward", name, VERIFIERS, awaits=True)
    check_signature(name, function)
    return function


def check_signature(name: str, function: Callable):
    """UsageError unless a plug-in can be called with one argument, or if it is written for another framework."""
    if inspect.isclass(function):
        raise UsageError(f"--reward {name}: is a class; allowed is a function, or an object that can be called")
    found = plugins.other_signature(function, ["sample"])
    peers = [peer for peer, names in _SIGNATURES.items() if names <= _parameters(function)]
    if peers or found:
        of_peer = f", the signature of a reward of {peers[0]}" if peers else ""
        wrapper = f", with megarl.rewards.of_{peers[0].lower()}" if peers else ""
        raise UsageError(
            f"--reward {name}: takes {inspect.signature(function)}{of_peer}; megarl calls it with one argument, a "
            f"Sample: wrap it{wrapper} (docs/rewards.md)"
        )


def _parameters(function: Callable) -> set[str]:
    try:
        return set(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # of functions in C, which do not tell
        return set()


def check_prompts(settings, prompts: PromptSet, scores_here: bool = False):
    """UsageError with file and line if a prompt lacks what a verifier needs. `scores_here`: this process will score, so
    also import and build what the prompts need.
    """
    for name, own in prompts_of_terms(settings, prompts).items():
        if plugins.is_plugin(name):
            _check_columns(settings, name, own)
        elif name in VERIFIERS:
            built_in = _built_in(name)
            if built_in.check:
                built_in.check(own)
            if built_in.load and scores_here:
                built_in.load(own, Options.of(settings))


def _check_columns(settings, name: str, prompts: PromptSet):
    """UsageError for the first line without a column that a plug-in needs (`frameworks.of_trl`)."""
    with plugins.kept(f"--reward {settings.reward}"):
        needed = getattr(_plug_in(name), "needed_columns", ())
    for prompt in prompts if needed else ():
        if missing := [column for column in needed if column not in prompt.columns]:
            raise UsageError(
                f"{prompts.where(prompt.index)}: --reward {name} needs the column {missing[0]}; the line has "
                f"{', '.join(prompt.columns)}"
            )


def prompts_of_terms(settings, prompts: PromptSet) -> dict[str, PromptSet]:
    """The prompts of a set that each term scores: all, or those of files of a mixture whose reward has it."""
    expressions = expression.expressions_of(settings)
    if not prompts.entries:
        return {term.name: prompts for term in expressions[settings.reward]}
    numbers: dict[str, set[int]] = {}
    for number, reward in enumerate(expression.rewards_of(settings, prompts.entries)):
        for term in expressions[reward]:
            numbers.setdefault(term.name, set()).add(number)
    return {name: prompts.of_entries(own) for name, own in numbers.items()}


def main():
    """A worker of `pool`: serves until the parent is gone, then exits at once, whatever threads a verifier has left."""
    connection = parent()
    try:
        _serve(connection)
    except (EOFError, ConnectionError):
        os._exit(0)


def _serve(connection: Connection):
    """Answer messages: the first holds the options and names of the verifiers, every other one is a Job."""
    options, names = connection.recv()
    verifiers = {}
    try:
        verifiers = build_named_verifiers(options, names)
        answer = "ready"
    except BaseException as error:
        answer = f"{type(error).__name__}: {error}"
    while True:
        connection.send(answer)
        job = connection.recv()
        answer = verifiers[job.name].outcomes(job.samples)


if __name__ == "__main__":
    main()
