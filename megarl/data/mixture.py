"""Mixtures of prompt files: a YAML file that names files, how often each is drawn, and what holds for its lines.

    math:
      prompts: data/math.jsonl
      weight: 3
    code:
      prompts: data/code/*.parquet
      weight: 1
      reward: code
      max-response-length: 2048

Weights count draws: here three of four prompts are of `math`, whatever the sizes of the files.
"""

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from megarl.data.prompt import RL
from megarl.errors import UsageError
from megarl.plain_values import is_plain_number
from megarl.yaml_files import read_mapping

SUFFIXES = (".yaml", ".yml")
MAX_WEIGHT = 10**9  # and the smallest is its inverse
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_PLAIN = ("prompts", "weight")  # keys that have a meaning in every program
_OF_DRAWS = ("weight", "samples-per-prompt")  # and only in sets that are drawn from
_NUMBERS = ("max-prompt-length", "max-response-length", "samples-per-prompt")
TRAINING = "--prompts"  # the flag of sets that are drawn from; others are read from their start


@dataclasses.dataclass(frozen=True)
class MixtureEntry:
    """Some files of a mixture, under one name. None: what the flags say."""

    name: str
    prompts: str  # a value of --prompts
    weight: Fraction
    environment: str | None = None  # of lines that name none
    max_prompt_length: int | None = None
    max_response_length: int | None = None
    reward: str | None = None  # an expression of --reward
    samples_per_prompt: int | None = None

    def facts(self) -> str:
        """All but the place of its files, of which checkpoints have the hash."""
        return repr(dataclasses.replace(self, prompts=""))


NO_ENTRY = MixtureEntry(name="", prompts="", weight=Fraction(1))  # all is as the flags say


def is_mixture(value: str) -> bool:
    """Whether a value of --prompts names a mixture."""
    return value.endswith(SUFFIXES)


def read_mixture(path: str, flag: str, purpose: str) -> tuple[MixtureEntry, ...]:
    """The entries of a mixture, in the order of the file. `purpose`: of `columns`; without responses there are no
    limits of them, environments and rewards. UsageError: the file cannot be read, or an entry has a wrong name, key or
    value.
    """
    where = f"{flag} {path}"
    content, _ = read_mapping(path, where, "names to prompts, weight and other keys")
    if not content:
        raise UsageError(f"{where}: the mixture names no files")
    fields = {field.name.replace("_", "-") for field in dataclasses.fields(MixtureEntry)} - {"name"}
    known = sorted(fields) if purpose == RL else [*_PLAIN]
    if flag != TRAINING:
        known = [key for key in known if key not in _OF_DRAWS]
    return tuple(_entry(name, keys, where, known) for name, keys in content.items())


def whole_weights(entries: tuple[MixtureEntry, ...]) -> list[int]:
    """The weights as whole numbers in the same proportions."""
    common = math.lcm(*(entry.weight.denominator for entry in entries))
    weights = [int(entry.weight * common) for entry in entries]
    divisor = functools.reduce(math.gcd, weights)
    return [weight // divisor for weight in weights]


def shares(entries: tuple[MixtureEntry, ...], firsts: Sequence[int], where: str) -> list[str]:
    """A line about each entry of a mixture."""
    weights = whole_weights(entries) if entries else []
    sizes, is_drawn = [end - first for first, end in itertools.pairwise(firsts)], where.startswith(f"{TRAINING} ")
    return [
        f"{where}: {entry.name}: {size:,} prompts" + f", {weight / sum(weights):.1%} of the draws" * is_drawn
        for entry, size, weight in zip(entries, sizes, weights, strict=True)
    ]


def _entry(name: Any, keys: Any, where: str, known: list[str]) -> MixtureEntry:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise UsageError(f"{where}: {name}: a name has letters, digits, _, . and -")
    where = f"{where}: {name}"
    if not isinstance(keys, dict):
        raise UsageError(f"{where}: allowed is a mapping of prompts, weight and other keys")
    for key in keys:
        if key not in known:
            raise UsageError(f"{where}: {key} is unknown here; allowed: {', '.join(known)}")
    for key in ("prompts", "environment", "reward"):
        if key in keys and not (isinstance(keys[key], str) and keys[key]):
            raise UsageError(f"{where}: {key}: must be a text")
    if "prompts" not in keys:
        raise UsageError(f"{where}: prompts is missing")
    if is_mixture(keys["prompts"]):
        raise UsageError(f"{where}: prompts: {keys['prompts']} is a mixture, which cannot be part of another")
    limits = {key: _limit(keys[key], f"{where}: {key}") for key in keys if key in _NUMBERS}
    weight = _weight(keys.get("weight", 1), f"{where}: weight")
    others = {key: value for key, value in keys.items() if key not in ("weight", *limits)} | limits
    return MixtureEntry(name=name, weight=weight, **{key.replace("-", "_"): value for key, value in others.items()})


def _limit(value: Any, where: str) -> int:
    if type(value) is not int or value < 1:
        raise UsageError(f"{where}: {value}: allowed is a whole number above 0")
    return value


def _weight(value: Any, where: str) -> Fraction:
    if is_plain_number(value) and Fraction(1, MAX_WEIGHT) <= value <= MAX_WEIGHT:
        return Fraction(str(value))  # the decimal that the user wrote
    raise UsageError(f"{where}: {value}: allowed is a number above 0, from 1e-9 to 1e9")
