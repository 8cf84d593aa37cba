"""Flags with patterns of parameter names: what is frozen, and factors of learning rates and weight decays.

A name is that of Megatron's model without its parallel layout: layers are numbered over all pipeline stages, the
experts of a layer share one name, and a head tied to the embedding has the embedding's name. `*` stands for any text,
as in a shell. The flags join Megatron's parser, so they may carry role prefixes.
"""

import argparse
import fnmatch
import math
import re
from collections.abc import Iterable

FREEZE, LEARNING_RATES, WEIGHT_DECAYS = "freeze", "lr_multipliers", "weight_decay_multipliers"
ATTRIBUTES = frozenset({FREEZE, LEARNING_RATES, WEIGHT_DECAYS})
_EXPERT = re.compile(r"\.local_experts\.\d+")


def add_to(parser: argparse.ArgumentParser):
    """Adds the flags to an argparse parser."""
    group = parser.add_argument_group("parameters by name")
    group.add_argument("--freeze", nargs="+", metavar="PATTERN",
                       help="parameters that are not trained, as embedding.* 'decoder.layers.0.*'")  # fmt: skip
    for flag, what in (("lr", "learning rates"), ("weight-decay", "weight decays")):
        group.add_argument(f"--{flag}-multipliers", nargs="+", type=_checked, metavar="PATTERN=FACTOR",
                           help=f"factors of the {what} of parameters, as '*.mlp.router.*=0.1'; of several patterns"
                           " that name a parameter the last one counts")  # fmt: skip


def is_multiplier(text: str) -> bool:
    """Whether a text is `PATTERN=FACTOR` with a factor of 0 or more."""
    try:
        pattern, factor = factor_of(text)
    except ValueError:
        return False
    return bool(pattern) and 0 <= factor < math.inf


def _checked(text: str) -> str:
    """`PATTERN=FACTOR` as it is; argparse.ArgumentTypeError for another text."""
    if not is_multiplier(text):
        raise argparse.ArgumentTypeError(f"{text!r}: allowed is PATTERN=FACTOR with a factor of 0 or more")
    return text


def factor_of(text: str) -> tuple[str, float]:
    """(pattern, factor) of a checked `PATTERN=FACTOR`."""
    pattern, _, number = text.rpartition("=")
    return pattern, float(number)


def patterns_of(args, attribute: str) -> list[str]:
    """The patterns of a flag, in their order; [] if it is not given. `args`: a role's Megatron namespace."""
    texts = getattr(args, attribute, None) or []
    return list(texts) if attribute == FREEZE else [factor_of(text)[0] for text in texts]


def layout_free(name: str) -> str:
    """The name that patterns are matched with, of one with layers numbered over the whole model."""
    return _EXPERT.sub("", name)


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether one of the patterns names a parameter; `name`: as of `layout_free`."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def is_frozen(args, name: str) -> bool:
    """Whether a role does not train a parameter; `name`: as of `layout_free`."""
    return matches(name, patterns_of(args, FREEZE))


def multiplier(args, attribute: str, name: str) -> float:
    """The factor of a parameter's learning rate or weight decay; 1 if no pattern names it."""
    factors = map(factor_of, reversed(getattr(args, attribute, None) or []))
    return next((factor for pattern, factor in factors if matches(name, [pattern])), 1.0)
