"""A command line with its config files: values of megarl's own flags, other tokens, and the functions that it names."""

import argparse
import functools
from collections.abc import Callable
from typing import NamedTuple

from megarl import plugins
from megarl.algorithms.policy_loss import PolicyLoss
from megarl.algorithms.policy_losses import POLICY_LOSSES, policy_loss_of
from megarl.errors import UsageError
from megarl.flags import config_files, megatron_options, parser, role_flags
from megarl.flags.fields import DATA


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
    files = config_files.read(own_parser.parse_known_args(argv)[0].config)
    is_other = _is_training_key(program, str(files.get("policy-loss", "")))
    kinds = {name: flag.kind for name, flag in own.items()}
    return own_parser.parse_known_args(config_files.tokens(files, kinds, is_other) + argv)


def _is_training_key(program: str, policy_loss: str) -> Callable[[str], bool]:
    """Whether a program ignores a key of a config file: evaluation and server accept the config file of a training run.

    `policy_loss`: that of the files; a plug-in's options are training flags, too.
    """
    if program not in ("evaluate", "serve"):
        return lambda key: False
    own, absent = parser.own_flags(program), set(role_flags.ROLES_OF["rl"]) - set(role_flags.ROLES_OF[program])
    others = (parser.own_flags(other) for other in DATA.split())
    names = {name for other in others for name in other} - set(own) | {"pretrained-checkpoint"}
    destinations, training = megatron_options.options().destinations, megatron_options.options().training
    names |= {option.removeprefix("--") for option, dest in destinations.items() if dest in training}
    prefixes = [f"{role}-" for role in absent]
    if ":" in policy_loss:
        prefixes.append(policy_loss.rpartition(":")[2].replace("_", "-") + "-")
    return lambda key: key in names or key not in own and key.startswith(tuple(prefixes))


def named_function(flag: str, name: str, built_in: dict, wrap):
    """The built-in object of that name, or the wrapped plug-in."""
    if name in built_in:
        return built_in[name]
    caller = f"{flag} {name}"
    with plugins.kept(caller):
        found = plugins.load(flag, name, built_in)
    try:
        plug_in = wrap(found)
    except ValueError as error:
        raise UsageError(f"{caller}: {error}") from None
    return plug_in._replace(function=plugins.keeping(caller, plug_in.function))


def named_policy_loss(name: str) -> PolicyLoss:
    """The policy loss of a name with its default options."""
    return named_function(
        "--policy-loss", name, POLICY_LOSSES, functools.partial(policy_loss_of, name.rpartition(":")[2])
    )
