"""Where a response says its answer: in its last box, in `<answer>`, or as the last formula or number.

A formula without delimiters among words is taken whole: of `it is 2\\sqrt{3}` not the 2.
"""

import re
from typing import NamedTuple

from megarl.rewards.math_text import spelled
from megarl.rewards.text import answer_text

_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s*")
_BETWEEN = re.compile(r"(?:\\text\{\s*(?:and|or)\s*\}|and|or|\\(?:quad|qquad|[()\[\],;])|[\s,;.$*])*")
_CURRENCY = re.compile(r"\$(?=\s*\d)")
_DELIMITED = re.compile(r"\$\$(.+?)\$\$|\$([^$]+?)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
_TEXT = re.compile(r"\\text\s*\{[^{}]*\}")
_COMMAND = re.compile(r"\\[A-Za-z]+")
# Words that are mathematics: names of functions, and short units right after a digit.
WORD = re.compile(r"(?<![A-Za-z\\])(?!(?:sin|cos|tan|cot|sec|csc|ln|log|exp|sqrt|pi)(?![A-Za-z]))[A-Za-z]{2,}")
_LINE_NUMBER = re.compile(r"^[ \t>*#-]*\d+[.)](?=\s)", re.MULTILINE)
_OPERATORS = ("+", "-", "*", "/", "=", "<", ">", "^", r"\times", r"\cdot", r"\le", r"\ge", r"\ne", r"\pm", r"\in")
_ANSWER = re.compile("answer", re.IGNORECASE)
_REACH = 60  # characters between the word `answer` and the formula


class _Formula(NamedTuple):
    start: int
    end: int
    text: str


def boxed(response: str) -> str | None:
    """The content of the last box; of boxes with only `and`, `or`, commas and delimiters between them, of all."""
    contents: list[str] = []
    following = None
    for found in reversed(list(_BOX.finditer(response))):
        content, end = _group(response, found.end())
        if following is not None and not _BETWEEN.fullmatch(response, end, following):
            break
        contents.insert(0, content)
        following = found.start()
    return ", ".join(contents) if contents else None


def written(response: str) -> list[str]:
    """What may be the answer of a response without a box, the best first: its whole text, its last formula."""
    text = answer_text(response)
    formulas = _formulas(text)
    anchors = [anchor.end() for anchor in reversed(list(_ANSWER.finditer(text)))]
    named = (each.text for end in anchors for each in formulas if end <= each.start <= end + _REACH)
    whole = [] if "\n" in text else [text]
    return [*whole, *([next(named, formulas[-1].text)] if formulas else [])]


def _group(text: str, start: int) -> tuple[str, int]:
    """The group of braces at `start` without them, and where it ends; without a brace the word, unclosed the line."""
    if text[start : start + 1] != "{":
        word = re.compile(r"[^\s$]*").match(text, start)
        return word[0], word.end()
    depth = 0
    for place, character in enumerate(text[start:], start):
        escaped = text[place - 1] == "\\" and text[place - 2 : place] != "\\\\"
        depth += ((character == "{") - (character == "}")) * (not escaped)
        if depth == 0:
            return text[start + 1 : place], place + 1
    return text[start + 1 :].split("\n", 1)[0], len(text)


def _formulas(text: str) -> list[_Formula]:
    """All formulas of a text in order; neighbours with only `and`, `or` or a comma between them are one."""
    text = _LINE_NUMBER.sub(lambda found: " " * len(found[0]), _without_currency(text))
    found, end = [], 0
    for match in _DELIMITED.finditer(text):
        found += _bare(text, end, match.start())
        content = next(group for group in match.groups() if group is not None)
        found.append(_Formula(match.start(), match.end(), content))
        end = match.end()
    found += _bare(text, end, len(text))
    merged: list[_Formula] = []
    for formula in found:
        between = text[merged[-1].end : formula.start] if merged else ""
        percent = re.fullmatch(r"\s*(\\?%|percent)\s*", formula.text)
        if merged and (percent or re.fullmatch(r"\s*(?:,\s*)?(?:and|or|,)\s*", between)):
            comma = "" if percent else ", "
            merged[-1] = _Formula(merged[-1].start, formula.end, merged[-1].text + comma + formula.text)
        else:
            merged.append(formula)
    return merged


def _without_currency(text: str) -> str:
    """Spaces for dollar signs before amounts of money: a pair with words between its signs delimits no formula."""
    place = 0
    while (found := _CURRENCY.search(text, place)) is not None:
        closing = text.find("$", found.end())
        inside = text[found.end() : closing]
        place = closing + 1
        if closing < 0 or "\n" in inside or WORD.search(_COMMAND.sub(" ", _TEXT.sub(" ", inside))):
            text, place = text[: found.start()] + " " + text[found.end() :], found.end()
    return text


def _bare(text: str, start: int, end: int) -> list[_Formula]:
    """Formulas without delimiters between two places: runs of words that are numbers, signs, commands and letters."""
    part = _TEXT.sub(lambda found: re.sub(r"\s", "~", found[0]), text[start:end]).replace("**", "  ").replace("`", " ")
    tokens = [(found.start(), found.end(), found[0]) for found in re.finditer(r"\S+", part)]
    kinds = [_is_formula(token) for _, _, token in tokens]
    runs: list[list[tuple[int, int, str]]] = [[]]
    for number, (token, kind) in enumerate(zip(tokens, kinds, strict=True)):
        letter = re.fullmatch(r"-?\(?[A-Za-z]\)?[,;]?", token[2])
        beside = any(0 <= other < len(tokens) and tokens[other][2] in _OPERATORS for other in (number - 1, number + 1))
        if kind or (letter and beside):
            runs[-1].append(token)
        else:
            runs.append([])
        if token[2].endswith((";", ":", "?", "!", ".")):
            runs.append([])
    formulas = []
    for run in runs:
        content = part[run[0][0] : run[-1][1]].rstrip(".,;:!?*") if run else ""
        if re.search(r"\d|\\[A-Za-z]", content):
            formulas.append(_Formula(start + run[0][0], start + run[-1][1], content))
    return formulas


def _is_formula(token: str) -> bool:
    plain = _COMMAND.sub(" ", _TEXT.sub(" ", spelled(token)))
    if WORD.search(plain):
        return False
    return token in _OPERATORS or re.search(r"\d|[=<>^|]|\\[A-Za-z]", token) is not None
