"""How a number is read from a judgement: a JSON field, a regular expression, the last number, or a choice of labels.

What the judge quotes is not its verdict, since a response chooses what there is to quote; a part of a number is none.
"""

import json
import re
import unicodedata
from collections.abc import Callable
from typing import Any

from megarl.errors import UsageError
from megarl.plain_values import is_plain_number

NumbersRule = Callable[[str], list[float] | None]  # judgement -> its number, or one for each response; None: none

_OBJECT = re.compile(r"""\{\s*["'}]""")  # an object begins, perhaps a broken one
_LETTER = re.compile(r"[^\W\d_]{2}")
_TAG = re.compile(r"</?[A-Za-z][\w-]*>")


def numbers_rule(value: Any, where: str, of_several: bool, highest: float | None = None) -> NumbersRule:
    """The rule of the key `number`, a mapping of one kind to its option; `where` begins error messages.

    `of_several`: a judgement has a number for each of several responses, not a single one. `highest`: the end of the
    scale, the only whole out of which a number may be given; None: any. UsageError: no rule, several, an unknown kind,
    or an option that is not allowed.
    """
    rules = _RULES_OF_SEVERAL if of_several else _RULES
    if not isinstance(value, dict) or len(value) != 1 or next(iter(value)) not in rules:
        raise UsageError(f"{where}: number: allowed is one of {', '.join(rules)} with its option")
    ((kind, option),) = value.items()
    try:
        return rules[kind](option, highest)
    except ValueError as error:
        raise UsageError(f"{where}: number: {kind}: {error}") from None


def _json_field(name: Any, _: float | None) -> NumbersRule:
    find = _field_finder(name)
    return lambda text: _all([find(text)])


def _json_list(name: Any, _: float | None) -> NumbersRule:
    find = _field_finder(name)

    def read(text: str) -> list[float] | None:
        found = find(text)
        return _all(found) if isinstance(found, list) else None

    return read


def _field_finder(name: Any) -> Callable[[str], Any]:
    """Finds the field `name` of the last JSON object that has it and is a verdict; objects inside others are none. An
    object inside a line of words is a verdict at the end of the text only. After the beginning of an object that is no
    JSON nothing is: what it quotes cannot be told from what follows it.
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
    """The value of the label that stands last in the text as whole words, in upper or lower case. Labels with a sign, a
    slash or `or` between them, as in A>B and yes/no, are no choice.
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


def _all(values: list[Any]) -> list[float] | None:
    """The numbers; None if one is none, or there are none."""
    return [float(value) for value in values] if values and all(map(is_plain_number, values)) else None


_Rules = dict[str, Callable[[Any, float | None], NumbersRule]]
_RULES: _Rules = {"json": _json_field, "regex": _last_match, "last-number": _last_number, "choice": _choice}
_RULES_OF_SEVERAL: _Rules = {"json": _json_list, "regex": _all_matches}


# -- what a judge says for itself, and the numbers in it -------------------------------------------------------------
#
# A number that is a part of a larger notation is read as the whole notation says, or is none: of `7/10` never the 10.

_MINUS = str.maketrans(dict.fromkeys("\u2212\u2010\u2011\u2012\u2013\u2014\ufe63\uff0d", "-"))
_QUOTED = re.compile(r'"(?:[^"\\\n]|\\.)*"|“[^”]*”|«[^»]*»|(?<!`)`[^`\n]*`(?!`)')
_QUOTED_LINE = re.compile(r"^[ \t]*>.*$", re.MULTILINE)
_SHOWN_RESPONSE = re.compile(r"<(response(?: \d+)? [0-9a-f]{16})>.*?(?:</\1>|\Z)", re.DOTALL)
_MARKUP = re.compile(r"</?[A-Za-z][\w-]*>|\*\*(?!(?<=\d\*\*)\d)|__|`")
_NUMBER = r"[-+]?(?:(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?"
_OUT_OF = re.compile(rf"({_NUMBER})(?:/({_NUMBER})|(%))?")
# Notations of several words as one.
_WORDS = [
    (re.compile(r"([:=]\s*)-\s+(?=[\d.])"), r"\1-"),  # a minus sign apart from its number
    (re.compile(r"(?<=\d)\s*/\s*(?=\d)"), "/"),
    (
        re.compile(r"(?<=\d)\s+(?:out\s+)?of\s+(?:(?:the|a|an|total|possible|maximum|max)\s+)*(?=\d)", re.IGNORECASE),
        "/",
    ),
    (re.compile(r"(?<=\d)\s+(?:%|percent\b|per\s+cent\b)", re.IGNORECASE), "%"),
    (re.compile(r"(?<=\d)\s*(?:-|\bto\b|\bor\b|\band\b|±|×|:)\s+(?=[-+]?\.?\d)", re.IGNORECASE), "~"),
    (re.compile(r"(?<=\d)\s+(?=[\u00bc-\u00be\u2150-\u215e]|\d+/\d)"), "~"),  # mixed numbers
]
_WHOLE = re.compile(rf"\s*(?:/|(?:out\s+)?of\b)\s*({_NUMBER})", re.IGNORECASE)
# Around the group of a regular expression: digits always, letters and signs unless the expression has them, too.
_GOES_ON_BEFORE = re.compile(r"(?:\d|\d[.,]|(?<!\w)\.)$")
_IS_JOINED_BEFORE = re.compile(r"(?:[^\W\d]|\^|\*\*|-|\d\s*(?:[-/:%]|\b(?:to|or|of|out\s+of)\b)\s*)$", re.IGNORECASE)
_GOES_ON_AFTER = re.compile(r"\d|[.,]\d|[\u00b2\u00b3\u00b9\u00bc-\u00be]")
_IS_JOINED_AFTER = re.compile(
    r"[^\W\d]|\^|\*\*\d|\s*%|[:-]\d|\s*-\s*\d|\s+(?:to|or)\s+\.?\d|\s+percent\b|/\d+/", re.IGNORECASE
)
_WORD = re.compile(r"[^\s;]+")
_DIGIT = re.compile(r"\d")
_BEFORE = re.compile(r"^[^\d+.-]*[:=(\[{<>\"'|#~](?=[-+.\d])")
_AFTER = re.compile(r"[\])}>\"'|.,:!?*\\]+$")


def own_words(text: str) -> str:
    """A judgement after its reasoning (`</think>`), with spaces for what it quotes, and ASCII digits and minus signs.
    Quotes are lines that begin with `>`, the response between the lines with its code, and several words in quotation
    marks or backticks. Of reasoning without an end nothing is left. The length stays that of the text after reasoning.
    """
    text = _after_reasoning(text)
    for pattern in (_SHOWN_RESPONSE, _QUOTED_LINE):
        text = pattern.sub(_spaces, text)
    text = _QUOTED.sub(lambda found: _spaces(found) if re.search(r"\s", found[0]) else found[0], text)
    return "".join(map(_ascii, text))


def last_number(text: str, highest: float | None) -> float | None:
    """The number in the last word with a digit, of a judge's own words; None if that is another notation. `highest`:
    the end of the scale. `7/10` and `7 out of 10` are 7 on a scale to 10, `70%` is 70 on one to 100; of other wholes
    none. None: any whole, and no percents. Words that begin with a letter, as GPT-4, are names.
    """
    text = _MARKUP.sub(" ", text)
    for pattern, replacement in _WORDS:
        text = pattern.sub(replacement, text)
    for word in filter(_DIGIT.search, reversed(_WORD.findall(text))):
        word = _AFTER.sub("", _BEFORE.sub("", word)).lstrip("([{\"'|<>#~$*")
        if not word[:1].isalpha() and word[:1] != "_":
            return number_of(word, highest)
    return None


def number_of(text: str, highest: float | None) -> float | None:
    """The number that a text is, with or without the whole that it is a part of (see `last_number`); else None."""
    found = _OUT_OF.fullmatch(text.strip())
    if found is None:
        return None
    number, whole, percent = found.groups()
    if (percent and highest != 100) or (whole and highest is not None and _float(whole) != highest):
        return None
    return _float(number)


def numbers_of_matches(
    expression: re.Pattern[str], text: str, highest: float | None, of_several: bool
) -> list[float | None]:
    """For each match the number in its first group, or in all of it; None if a larger notation goes on around it. What
    the expression itself has beside the group, such as `/10` or `%`, is its author's decision. So are matches without
    anything between them where there are `of_several` responses, as of `[0-9]` in `739`: three numbers.
    """
    found, group = list(expression.finditer(text)), min(expression.groups, 1)
    starts, ends = {each.start() for each in found}, {each.end() for each in found}
    numbers = []
    for each in found:
        start, end = each.span(group)
        before = "" if of_several and start in ends else text[max(start - 20, 0) : max(start, 0)]
        after = "" if of_several and end in starts else text[end : end + 40]
        numbers.append(None if start < 0 else _number_of_match(each, group, highest, before, after))
    return numbers


def _number_of_match(found: re.Match[str], group: int, highest: float | None, before: str, after: str) -> float | None:
    """`before`, `after`: the text around the group."""
    start, end = found.span(group)
    if _GOES_ON_BEFORE.search(before) or _GOES_ON_AFTER.match(after):
        return None
    if start == found.start() and _IS_JOINED_BEFORE.search(before):
        return None
    if end == found.end():
        if _IS_JOINED_AFTER.match(after):
            return None
        whole = _WHOLE.match(after)
        if whole is not None:
            return number_of(f"{found[group]}/{whole[1]}", highest)
    return number_of(found[group].strip().rstrip(".,;:!"), highest)


def _spaces(found: re.Match[str]) -> str:
    return re.sub(r"\S", " ", found[0])


def _ascii(character: str) -> str:
    """An ASCII digit for one of any script, a minus sign for other dashes."""
    return str(unicodedata.decimal(character)) if character.isdecimal() else character.translate(_MINUS)


def _float(text: str) -> float | None:
    try:
        return float(text.replace(",", ""))
    except (ValueError, OverflowError):
        return None
