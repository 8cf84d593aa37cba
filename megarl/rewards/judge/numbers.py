"""How a number is read from a judgement: a JSON field, a regular expression, the last number, or a choice of labels.

What the judge quotes is not its verdict, since a response chooses what there is to quote; a part of a number is none.
"""

import json
import re
from collections.abc import Callable
from typing import Any

from megarl.errors import UsageError
from megarl.plain_values import is_plain_number
from megarl.rewards.judge.judgement_text import last_number, numbers_of_matches, own_words

NumbersRule = Callable[[str], list[float] | None]  # judgement -> its number, or one for each response; None: none

_OBJECT = re.compile(r"""\{\s*["'}]""")  # an object begins, perhaps a broken one
_LETTER = re.compile(r"[^\W\d_]{2}")
_TAG = re.compile(r"</?[A-Za-z][\w-]*>")


def numbers_rule(value: Any, where: str, of_several: bool, highest: float | None = None) -> NumbersRule:
    """The rule of the key `number`, a mapping of one kind to its option; `where` begins error messages.

    `of_several`: a judgement has a number for each of several responses, not a single one. `highest`: the end of the
    scale, the only whole out of which a number may be given; None: any.

    Raises:
        UsageError: no rule, several, an unknown kind, or an option that is not allowed.
    """
    rules = _RULES_OF_SEVERAL if of_several else _RULES
    if not isinstance(value, dict) or len(value) != 1 or next(iter(value)) not in rules:
        raise UsageError(f"{where}: number: allowed is one of {', '.join(rules)} with its option")
    (kind, option), = value.items()  # fmt: skip
    try:
        return rules[kind](option, highest)
    except ValueError as error:
        raise UsageError(f"{where}: number: {kind}: {error}") from None


def _json_field(name: Any, _: float | None) -> NumbersRule:
    find = _field_finder(name)
    return lambda text: _all([_number(find(text))])


def _json_list(name: Any, _: float | None) -> NumbersRule:
    find = _field_finder(name)

    def read(text: str) -> list[float] | None:
        found = find(text)
        return _all([_number(item) for item in found]) if isinstance(found, list) else None

    return read


def _field_finder(name: Any) -> Callable[[str], Any]:
    """Finds the field `name` of the last JSON object that has it and is a verdict; objects inside others are none.

    An object inside a line of words is a verdict at the end of the text only. After the beginning of an object that is
    no JSON nothing is: what it quotes cannot be told from what follows it.
    """
    if not isinstance(name, str) or not name:
        raise ValueError("allowed is the name of a field")
    decoder = json.JSONDecoder()

    def read(text: str) -> Any:
        text = _after_reasoning(text)
        found, start = None, _OBJECT.search(text)
        while start:
            try:
                item, end = decoder.raw_decode(text, start.start())
            except (ValueError, RecursionError):
                return None
            if name in item and _is_verdict(text, start.start(), end):
                found = item[name]
            start = _OBJECT.search(text, end)
        return found

    return read


def _is_verdict(text: str, start: int, end: int) -> bool:
    """Whether a JSON object has a line to itself, or ends a line of words and the text, outside quotation marks."""
    before, after = text[:start].rpartition("\n")[2], text[end:].partition("\n")
    alone = not _LETTER.search(before) and not _LETTER.search(after[0])
    last = not _LETTER.search(text[end:])
    return (alone or last) and not before.lstrip().startswith(">") and not before.endswith(("`", '"', "'", "“"))


def _after_reasoning(text: str) -> str:
    """A judgement without `<think>...</think>`; nothing of reasoning without an end."""
    unfinished = text.lstrip().startswith("<think>") and "</think>" not in text
    return "" if unfinished else text.rpartition("</think>")[2]


def _last_match(pattern: Any, highest: float | None) -> NumbersRule:
    expression = _compiled(pattern)
    return lambda text: _all(numbers_of_matches(expression, own_words(text), highest, of_several=False)[-1:])


def _all_matches(pattern: Any, highest: float | None) -> NumbersRule:
    expression = _compiled(pattern)
    return lambda text: _all(numbers_of_matches(expression, own_words(text), highest, of_several=True))


def _compiled(pattern: Any) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except (re.error, TypeError, OverflowError, RecursionError) as error:
        raise ValueError(f"not a regular expression: {error}") from None


def _last_number(option: Any, highest: float | None) -> NumbersRule:
    if option is not True:
        raise ValueError("allowed is true")
    return lambda text: _all([last_number(own_words(text), highest)])


def _choice(values: Any, _: float | None) -> NumbersRule:
    """The value of the label that stands last in the text as whole words, in upper or lower case.

    Labels with a sign, a slash or `or` between them, as in A>B and yes/no, are no choice.
    """
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
    any_label = "|".join(map(re.escape, sorted(by_label, key=len, reverse=True)))
    pattern = re.compile(
        rf"(?<!\w)({any_label})(?!\w)(?:(?P<undecided>\s*(?:[<>=~]+|/|\||\bor\b)\s*)(?=(?:{any_label})(?!\w)))?"
    )

    def read(text: str) -> list[float] | None:
        found = list(pattern.finditer(_TAG.sub(" ", own_words(text)).casefold()))
        if not found or (len(found) > 1 and found[-2]["undecided"]):
            return None
        return [by_label[found[-1][1]]]

    return read


def _number(value: Any) -> float | None:
    """A number of JSON as a float; None if it is none, or too large."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return None


def _all(numbers: list[float | None]) -> list[float] | None:
    """The numbers; None if one is missing, or there are none."""
    found = [number for number in numbers if number is not None]
    return found if found and len(found) == len(numbers) else None


_RULES: dict[str, Callable[[Any, float | None], NumbersRule]] = {
    "json": _json_field, "regex": _last_match, "last-number": _last_number, "choice": _choice,
}  # fmt: skip
_RULES_OF_SEVERAL: dict[str, Callable[[Any, float | None], NumbersRule]] = {"json": _json_list, "regex": _all_matches}
