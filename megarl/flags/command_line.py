"""A command line with its config files: values of megarl's own flags, other tokens, and the functions that it names."""

import argparse
import functools
import re
from collections.abc import Callable
from typing import NamedTuple

from megarl import plugins
from megarl.algorithms import ESTIMATORS
from megarl.algorithms.estimators import Estimator, estimator_of
from megarl.algorithms.policy_loss import PolicyLoss, policy_loss_of
from megarl.algorithms.policy_losses import POLICY_LOSSES
from megarl.errors import ArgumentParser, UsageError
from megarl.flags import parser, role_flags
from megarl.flags.fields import DATA
from megarl.flags.role_flags import OFF
from megarl.yaml_files import read_mapping


class CommandLine(NamedTuple):
    """A command line with its config files, divided into megarl's own flags and all other tokens."""

    flags: dict[str, parser.Flag]  # megarl's own flags of the program, by name
    values: dict[str, object]  # of those that are given
    others: list[str]  # tokens: Megatron's flags, with or without a role prefix
    check: bool  # --check


def read(argv: list[str], program: str) -> CommandLine:
    """The command line of a program. UsageError for a wrong one."""
    flags = parser.own_flags(program)
    found, others = _parse_own(argv, program, flags)
    name = vars(found).get("policy-loss")
    if name is not None and name not in POLICY_LOSSES:  # a plug-in, which may define further flags
        flags = parser.own_flags(program, named_policy_loss(name))
        found, others = _parse_own(argv, program, flags)
    values = {name: value for name, value in vars(found).items() if name in flags}
    return CommandLine(flags=flags, values=values, others=others, check=found.check)


def _parse_own(argv: list[str], program: str, own: dict[str, parser.Flag]) -> tuple[argparse.Namespace, list[str]]:
    """argparse's `parse_known_args`, with the flags of the config files before those of the command line."""
    own_parser = parser.build_parser(program, own)
    files = read_config_files(own_parser.parse_known_args(argv)[0].config)
    is_other = _is_training_key(program, str(files.get("policy-loss", "")))
    kinds = {name: flag.kind for name, flag in own.items()}
    return own_parser.parse_known_args(config_tokens(files, kinds, is_other) + argv)


def _is_training_key(program: str, policy_loss: str) -> Callable[[str], bool]:
    """Whether a program ignores a key of a config file: evaluation and server accept the config file of a training run.

    `policy_loss`: that of the files; a plug-in's options are training flags, too.
    """
    if program not in ("evaluate", "serve"):
        return lambda key: False
    own, absent = parser.own_flags(program), set(role_flags.ROLES_OF["rl"]) - set(role_flags.ROLES_OF[program])
    others = (parser.own_flags(other) for other in DATA.split())
    names = {name for other in others for name in other} - set(own) | {"pretrained-checkpoint"}
    destinations, training = parser.megatron_options().destinations, parser.megatron_options().training
    names |= {option.removeprefix("--") for option, dest in destinations.items() if dest in training}
    prefixes = [f"{role}-" for role in absent]
    if ":" in policy_loss:
        prefixes.append(policy_loss.rpartition(":")[2].replace("_", "-") + "-")
    return lambda key: key in names or key not in own and key.startswith(tuple(prefixes))


def named_estimator(name: str) -> Estimator:
    """The advantage estimator of a name. UsageError for an unknown one, or a wrong plug-in."""
    return plugins.load_kept("--advantage", name, ESTIMATORS, ("step", "options"), estimator_of)


def named_policy_loss(name: str) -> PolicyLoss:
    """The policy loss of a name with its default options. UsageError as of `named_estimator`."""
    wrap = functools.partial(policy_loss_of, name.rpartition(":")[2])
    return plugins.load_kept("--policy-loss", name, POLICY_LOSSES, ("tokens", "options"), wrap)


def read_config_files(paths: list[str]) -> dict[str, object]:
    """The merged mappings of the files; a later file wins over an earlier one.

    Raises:
        UsageError: a file cannot be read, or is not a mapping of flag names to values.
    """
    return {key: value for key, (value, _) in _merged(paths).items()}


def config_tokens(values: dict[str, object], own: dict[str, type], is_other: Callable[[str], bool]) -> list[str]:
    """The values as command-line tokens. A null unsets the key of an earlier file.

    `own`: type of the value of each of megarl's own flags; `is_other`: whether a key is of another program, so ignored.
    """
    return [token for key, value in values.items() if not is_other(key) for token in _tokens(key, value, own)]


def with_sources(error: UsageError, argv: list[str], defaults: dict[str, object]) -> UsageError:
    """An error that also says which of the flags in its message come from config files, and how to undo that.

    `argv`: the command line, whose flags win over those of its files; `defaults`: of megarl's own flags.
    """
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config", nargs="+", action="extend", default=[])
    try:
        merged = _merged(parser.parse_known_args(argv)[0].config)
    except UsageError:  # the error is about these files
        return error
    on_command_line = {token.partition("=")[0] for token in argv}
    message, notes = str(error), []
    for flag in dict.fromkeys(re.findall(r"--[a-z0-9-]+", message.partition("; did you mean")[0])):
        key = flag.removeprefix("--")
        if key in merged and flag not in on_command_line:
            value, path = merged[key]
            default = defaults.get(key)
            undo = "null in a later file unsets it" if default is None else f"the default is {flag} {_text(default)}"
            notes.append(f"{flag} {_text(value)} is set in {path}; {undo}")
    return UsageError(f"{message} ({'; '.join(notes)})", error.reporting_rank) if notes else error


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _merged(paths: list[str]) -> dict[str, tuple[object, str]]:
    """Key -> its value in the last of the files that has it, and that file."""
    merged: dict[str, tuple[object, str]] = {}
    for path in paths:
        for key, value in _content(path).items():
            merged.pop(key, None)
            merged[key] = value, path
    return merged


def _content(path: str) -> dict[str, object]:
    content, written = read_mapping(path, f"--config {path}", "flag names to values")
    for key, value in written.items():
        if value == "" and content.get(key, "") is None:  # most likely forgotten: null must be explicit
            raise UsageError(f"--config {path}: {key}: has no value; write null to unset an earlier file's key")
    for key, value in content.items():
        if str(key) in ("config", "check"):
            raise UsageError(f"--config {path}: {key}: is allowed on the command line only")
        if isinstance(value, dict):
            raise UsageError(f"--config {path}: {key}: allowed is a value or a list of values, not {value!r}")
    return {str(key): value for key, value in content.items()}


def _tokens(key: str, value, own: dict[str, type]) -> list[str]:
    if value is None and key in own:
        return []
    if value is None or isinstance(value, bool) and own.get(key) is not bool:
        # Megatron's switches have no value. A switch that is off or unset must still be an existing flag.
        return [f"--{key}"] if value else [OFF + key + "=false" * (value is False)]
    values = value if isinstance(value, list) else [value]
    return [f"--{key}", *map(str, values)]
