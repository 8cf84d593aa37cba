"""How a number is read from a judgement: a JSON field, a regular expression, the last number, or a choice of labels."""

import json
import re
from collections.abc import Callable
from typing import Any

from megarl.errors import UsageError
from megarl.numbers import is_plain_number

NumbersRule = Callable[[str], list[float] | None]  # judgement -> its number, or one for each response; None: none

_NUMBER = re.compile(r"(?<![\w.])[-+]?(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")


def numbers_rule(value: Any, where: str, of_several: bool) -> NumbersRule:
    """The rule of the key `number`, a mapping of one kind to its option; `where` begins error messages.

    `of_several`: a judgement has a number for each of several responses, not a single one.

    Raises:
        UsageError: no rule, several, an unknown kind, or an option that is not allowed.
    """
    rules = _RULES_OF_SEVERAL if of_several else _RULES
    if not isinstance(value, dict) or len(value) != 1 or next(iter(value)) not in rules:
        raise UsageError(f"{where}: number: allowed is one of {', '.join(rules)} with its option")
    (kind, option), = value.items()  # fmt: skip
    try:
        return rules[kind](option)
    except ValueError as error:
        raise UsageError(f"{where}: number: {kind}: {error}") from None


def _json_field(name: Any) -> NumbersRule:
    find = _field_finder(name)
    return lambda text: _all([_number(find(text))])


def _json_list(name: Any) -> NumbersRule:
    find = _field_finder(name)

    def read(text: str) -> list[float] | None:
        found = find(text)
        return _all([_number(item) for item in found]) if isinstance(found, list) else None

    return read


def _field_finder(name: Any) -> Callable[[str], Any]:
    """Finds the field `name` of the last JSON object that has it; objects inside others do not count."""
    if not isinstance(name, str) or not name:
        raise ValueError("allowed is the name of a field")
    decoder = json.JSONDecoder()

    def read(text: str) -> Any:
        found, start = None, text.find("{")
        while start >= 0:
            try:
                item, end = decoder.raw_decode(text, start)
            except (ValueError, RecursionError):
                end = start + 1
            else:
                found = item.get(name, found)
            start = text.find("{", end)
        return found

    return read


def _last_match(pattern: Any) -> NumbersRule:
    find = _match_finder(pattern)
    return lambda text: _all([_float(match) for match in find(text)[-1:]])


def _all_matches(pattern: Any) -> NumbersRule:
    find = _match_finder(pattern)
    return lambda text: _all([_float(match) for match in find(text)])


def _match_finder(pattern: Any) -> Callable[[str], list[str | None]]:
    """Finds the first group of each match, or all of it without a group."""
    try:
        expression = re.compile(pattern)
    except (re.error, TypeError, OverflowError, RecursionError) as error:
        raise ValueError(f"not a regular expression: {error}") from None
    return lambda text: [match[min(expression.groups, 1)] for match in expression.finditer(text)]


def _last_number(option: Any) -> NumbersRule:
    if option is not True:
        raise ValueError("allowed is true")
    return lambda text: _all([_float(number.replace(",", "")) for number in _NUMBER.findall(text)[-1:]])


def _choice(values: Any) -> NumbersRule:
    """The value of the label that stands last in the text as whole words, in upper or lower case."""
    if not isinstance(values, dict) or len(values) < 2:
        raise ValueError("allowed is a mapping of two or more labels to numbers")
    for label, value in values.items():
        if not isinstance(label, str) or not label.strip():
            raise ValueError(f"the label {label!r} is no text; write it in quotes")
        if not is_plain_number(value):
            raise ValueError(f"the value {value!r} of {label} is no number")
    by_label = {label.casefold(): float(value) for label, value in values.items()}
    if len(by_label) < len(values):
        raise ValueError("two labels differ only in upper and lower case")
    longest_first = sorted(by_label, key=len, reverse=True)
    pattern = re.compile(rf"(?<!\w)(?:{'|'.join(map(re.escape, longest_first))})(?!\w)")

    return lambda text: _all([by_label[label] for label in pattern.findall(text.casefold())[-1:]])


def _number(value: Any) -> float | None:
    """A number of JSON as a float; None if it is none."""
    return _float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _all(numbers: list[float | None]) -> list[float] | None:
    """The numbers; None if one is missing, or there are none."""
    found = [number for number in numbers if number is not None]
    return found if found and len(found) == len(numbers) else None


def _float(value: str | float | None) -> float | None:
    """The value as a float; None if it is none."""
    try:
        return None if value is None else float(value)
    except (ValueError, OverflowError):
        return None


_RULES: dict[str, Callable[[Any], NumbersRule]] = {
    "json": _json_field, "regex": _last_match, "last-number": _last_number, "choice": _choice,
}  # fmt: skip
_RULES_OF_SEVERAL: dict[str, Callable[[Any], NumbersRule]] = {"json": _json_list, "regex": _all_matches}
