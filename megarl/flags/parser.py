"""The parser of megarl's own flags: the fields of `Settings` and the options of the policy losses.

Each loss defines its options in its module, and those of a plug-in are known only once it is named. So `own_flags`
returns the flags of a run as a dictionary.
"""

import argparse
import dataclasses
import difflib
import functools
import importlib.metadata
import json
import math
import types
import typing
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from megarl.algorithms.policy_loss import PolicyLoss, option_kinds
from megarl.algorithms.policy_losses import POLICY_LOSSES
from megarl.errors import ArgumentParser, UsageError
from megarl.flags import fields, role_flags
from megarl.flags.algorithm import of_loss
from megarl.flags.conditions import REWARD_MODEL, SCORING_MODEL, Condition
from megarl.flags.settings import Settings

TABLE = Path(__file__).with_name("megatron_options.json")
PACKAGE = "megatron-core"


class MegatronOptions(NamedTuple):
    """What is known of Megatron's options before any is parsed."""

    destinations: dict[str, str]  # option -> the attribute that it sets
    accepted: tuple[str, ...]  # options that megarl accepts with more than one value
    training: frozenset[str]  # attributes that only a role that learns has a use for


@functools.cache
def megatron_options() -> MegatronOptions:
    """Of the installed version of Megatron, with megarl's additions."""
    table = json.loads(TABLE.read_text(encoding="utf-8"))
    if table[PACKAGE] != importlib.metadata.version(PACKAGE):
        return options_of_parser()
    rows = table["options"]
    return MegatronOptions(
        {option: dest for option, (dest, _, _) in rows.items()},
        tuple(option for option, (_, is_accepted, _) in rows.items() if is_accepted),
        frozenset(dest for dest, _, trains in rows.values() if trains),
    )


def options_of_parser() -> MegatronOptions:
    """From Megatron's own parser."""
    from megarl.mcore.config import megatron_flags, supported_flags

    destinations = megatron_flags.destinations()
    training = supported_flags.training().intersection(destinations.values())
    return MegatronOptions(destinations, tuple(megatron_flags.accepted_options()), training)


def options_table() -> str:
    """The table of the installed version, an option a line."""
    found = options_of_parser()
    rows = [
        f" {json.dumps(option)}: {json.dumps([dest, int(option in found.accepted), int(dest in found.training)])}"
        for option, dest in found.destinations.items()
    ]
    head = json.dumps({PACKAGE: importlib.metadata.version(PACKAGE)})[:-1]
    return head + ', "options": {\n' + ",\n".join(rows) + "\n}}\n"


# Module of each program.
MODULES = {name: f"train_{name}" for name in ("rl", "sft", "reward", "preference")}
MODULES |= {"evaluate": "evaluate", "serve": "serve"}
# What verl, TRL, OpenRLHF, vLLM or their users call a flag -> its name here, where the two do not look alike.
ELSEWHERE = dict(
    pair.split(":")
    for pair in """
    learning-rate:lr max-new-tokens:max-response-length max-completion-length:max-response-length
    num-generations:samples-per-prompt n-samples-per-prompt:samples-per-prompt beta:kl-coefficient
    kl-coef:kl-coefficient init-kl-coef:kl-coefficient tp-size:tensor-model-parallel-size
    tp:tensor-model-parallel-size pp-size:pipeline-model-parallel-size cp-size:context-parallel-size
    ep-size:expert-model-parallel-size model:hf-model model-path:hf-model pretrain:hf-model dataset:prompts
    prompt-data:prompts output-dir:save save-path:save ref-model-sync-steps:reference-update-interval
    ref-model-mixup-alpha:reference-mixup ema-beta:ema-decay num-epochs:train-iters
    """.split()
)


@dataclasses.dataclass(frozen=True)
class Flag:
    """One of megarl's own flags. For a role's flag, `common` is the flag that sets the value of all roles."""

    name: str  # without leading dashes: gamma, critic-max-tokens-per-microbatch
    kind: type
    default: object
    text: str
    check: Callable | None  # returns whether a value is allowed
    allowed: str | None  # the allowed values, in words
    condition: Condition | None  # under which it has an effect
    common: str
    setting: str | None = None  # field of `Settings` that it sets; None for an option of a loss
    several: bool = False  # it takes several words


def own_flags(program: str, plug_in: PolicyLoss | None = None) -> dict[str, Flag]:
    """megarl's own flags of one program (a key of `MODULES`) by name, with the options of a plug-in policy loss.

    UsageError if an option of a loss has the name of another flag.
    """
    found = dict(_of_settings(program))
    if program == "rl":
        for loss in (*POLICY_LOSSES.values(), *([plug_in] if plug_in else [])):
            for flag in _of_loss(loss):
                if found.get(flag.name, flag) != flag:
                    raise UsageError(
                        f"--{flag.name}: is an option of the policy loss {loss.name}, but this flag exists already; "
                        "rename the option"
                    )
                found[flag.name] = flag
    return found


@functools.cache
def _of_settings(program: str) -> dict[str, Flag]:
    """The flags of the fields of `Settings`, with those of roles."""
    roles, found = role_flags.ROLES_OF[program], {}
    texts = {name: text for topic in Settings.__bases__ for name, text in fields.texts(topic).items()}
    for field in dataclasses.fields(Settings):
        if program in field.metadata["programs"]:
            flag = _of_setting(field, texts[field.name])
            found[flag.name] = flag
            for role in field.metadata["roles"]:
                if role in roles:
                    found[f"{role}-{flag.name}"] = _of_role(flag, role)
    return found


def _flag(name: str, field: dataclasses.Field, kind: type, text: str, condition: Condition | None, **own: Any) -> Flag:
    """The flag of a field that `fields.flag`, `policy_loss.option` or a plug-in has made."""
    default, meta = None if field.default is dataclasses.MISSING else field.default, field.metadata
    check, allowed = meta.get("check"), meta.get("allowed")
    return Flag(name, kind, default, meta.get("help") or text, check, allowed, condition, common=name, **own)


def _of_setting(field: dataclasses.Field, text: str) -> Flag:
    name, meta = field.name.replace("_", "-"), field.metadata
    kind: Any = next((t for t in typing.get_args(field.type) if t is not types.NoneType), field.type)
    return _flag(name, field, kind, text, meta["when"], setting=field.name, several=meta["several"])


def _of_role(flag: Flag, role: str) -> Flag:
    """The role's version of a common flag. The reward role's need a reward model; or a judge, if it reads them."""
    condition = flag.condition
    if role == "reward":
        condition = REWARD_MODEL if flag.name == "max-tokens-per-microbatch" else SCORING_MODEL
    return dataclasses.replace(flag, name=f"{role}-{flag.name}", condition=condition, setting=None)


def _of_loss(loss: PolicyLoss) -> list[Flag]:
    kinds = option_kinds(loss)
    text = f"option of --policy-loss {loss.name}"
    return [_flag(name, field, kinds[name], text, of_loss(name)) for name, field in loss.flags().items()]


def _yes_or_no(text: str) -> bool:
    if text.lower() in ("true", "yes", "1"):
        return True
    if text.lower() in ("false", "no", "0"):
        return False
    raise argparse.ArgumentTypeError(f"{text!r}: allowed true or false")


class _Joined(argparse.Action):
    """Sets the words of a flag as one text, with spaces between them."""

    def __call__(self, parser, namespace, values, option_string=None):
        setattr(namespace, self.dest, " ".join(values))


def build_parser(program: str, own: dict[str, Flag] | None = None) -> argparse.ArgumentParser:
    """The parser of megarl's own flags for one program. `own`: the flags; default: `own_flags(program)`."""
    return _parser_of(program, tuple((own_flags(program) if own is None else own).values()))


@functools.lru_cache(maxsize=len(MODULES))
def _parser_of(program: str, own: tuple[Flag, ...]) -> argparse.ArgumentParser:
    name = f"megarl.{MODULES[program]}"
    epilog = "All other flags are Megatron's; a role prefix (--actor-lr, --critic-lr) sets one for that role."
    parser = ArgumentParser(prog=name, allow_abbrev=False, epilog=epilog)
    config_help = "YAML files of flag names and values; later files and then the command line win; null unsets a key"
    parser.add_argument("--config", nargs="+", action="extend", default=[], metavar="FILE", help=config_help)
    parser.add_argument("--check", action="store_true", help="check all input for WORLD_SIZE ranks, then exit")
    group = parser.add_argument_group("megarl")
    for flag in own:
        extra: dict[str, Any] = {"type": flag.kind}
        if flag.kind is bool:
            extra = {"nargs": "?", "const": True, "type": _yes_or_no}
        elif flag.several:
            extra |= {"nargs": "+", "action": _Joined}
        text = flag.text + ("" if flag.default is None else f" (default {flag.default})")
        if flag.name != flag.common:
            text = f"--{flag.common} of this role only"
        help_text = text.replace("%", "%%")
        group.add_argument(f"--{flag.name}", dest=flag.name, default=argparse.SUPPRESS, help=help_text, **extra)
    return parser


def check_values(values: dict[str, object], own: dict[str, Flag]):
    """UsageError for the first value that its flag does not allow; none allows NaN or an infinity."""
    for name, value in values.items():
        check = own[name].check
        if check is not None and not check(value):
            allowed = f": allowed is {own[name].allowed}" if own[name].allowed else ": is not allowed"
            raise UsageError(f"--{name} {value}{allowed}")
        if isinstance(value, float) and not math.isfinite(value):
            raise UsageError(f"--{name} {value}: allowed is a finite number")


def unknown_flag(flags: Iterable[str], program: str, option: str, name: str) -> UsageError:
    """The error of an unknown flag, with what would be accepted, or the programs that have it.

    `flags`: megarl's own of the program; `name`: the option without a role's prefix.
    """
    own = [f"--{flag}" for flag in flags]
    accepted = [*megatron_options().accepted, *own]
    if option.startswith("--judge-") and "--" + option.removeprefix("--judge-") in accepted:
        of_role = option.replace("--judge-", "--reward-", 1)
        return UsageError(f"{option}: unknown flag; the judge is the model of the role reward: {of_role}")
    others = [other for other in role_flags.ROLES_OF if other != program and name[2:] in own_flags(other)]
    elsewhere = ELSEWHERE.get(name[2:])
    if name not in own and others:
        names = ", ".join(MODULES[other] for other in others)
        return UsageError(f"{option}: unknown flag; {names} {'has' if len(others) == 1 else 'have'} {name}")
    close = [each for each in (name, f"--{elsewhere}") if each in accepted]
    close = close or difflib.get_close_matches(option, accepted, n=1, cutoff=0.8)
    if not close and set("_.") & set(option):  # no flag of megarl or Megatron has such a name
        dashed = option.replace("_", "-")
        close = [each for each in (dashed, f"--{ELSEWHERE.get(dashed[2:])}") if each in accepted]
        close = close or difflib.get_close_matches(dashed, accepted, n=1, cutoff=0.8)
        if not close:
            return UsageError(f"{option}: unknown flag; docs/migrating.md has the names of verl, OpenRLHF and TRL")
    return UsageError(f"{option}: unknown flag" + (f"; did you mean {close[0]}?" if close else ""))
