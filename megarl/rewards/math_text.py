"""Where a response says its answer, and answers of mathematics in one spelling, before any parser reads them.

What data sets publish and what policies write differs in spaces, signs and marks that math-verify 0.9 reads as products
or sums: `10\\,000` as 0, `1\\,010` as 11. Both sides go through the same functions. An answer is in
the last box, in `<answer>`, or the last formula or number; a formula without delimiters among words is taken whole: of
`it is 2\\sqrt{3}` not the 2.
"""

import re
import unicodedata

from megarl.rewards.text import answer_text

_NAMED = "×times ·cdot ⋅cdot ≤le ≥ge ≠ne ∞infty πpi ∪cup ∩cap ∈in ±pm ∅emptyset ≈approx θtheta αalpha βbeta"
_SIGNS = str.maketrans(
    dict.fromkeys("\u2212\u2010\u2011\u2012\u2013\u2014\ufe63\uff0d", "-")
    | dict.fromkeys("\u200b\u200c\u200d\u2060\ufeff", None)
    | {each[0]: rf"\{each[1:]} " for each in _NAMED.split()}
    | {"÷": "/", "∕": "/", "⁄": "/", "°": r"^{\circ}", "ℝ": r"\mathbb{R}", "ℤ": r"\mathbb{Z}", "％": r"\%"}
    | {"“": '"', "”": '"', "‘": "'", "’": "'"}
)
# Of another width, raised or lowered; a fraction in one sign. NFKC alone would make 10² the number 102.
_RAISED, _LOWERED = "⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺ⁿ", "₀₁₂₃₄₅₆₇₈₉"
_VULGAR = re.compile("[¼-¾⅐-⅞]")
_ROOT = re.compile(r"√\s*(?:\(([^()]*)\)|(\d+(?:\.\d+)?|[A-Za-z]))")
_COMMANDS = [
    (re.compile(r"\\(?:thinspace|negthinspace|medspace|thickspace|enspace|nobreakspace)(?![A-Za-z])\s*"), r"\\,"),
    (re.compile(r"\\[dtc]frac(?![A-Za-z])"), r"\\frac"),
    (re.compile(r"\\(?:textrm|textnormal|textsf|textup|textbf|textit|mbox|hbox)(?=\s*\{)"), r"\\text"),
    (re.compile(r"\\math(?:rm|bf|it|sf)\s*\{\s*([eid])\s*\}"), r" \1 "),  # constants; \mathrm{m} is a unit
    (re.compile(r"\\math(?:rm|sf)(?=\s*\{)"), r"\\text"),
    (re.compile(r"\\(?:displaystyle|textstyle|limits|nolimits|big|Big|bigg|Bigg)(?![A-Za-z])"), ""),
    (re.compile(r"\\(?:quad|qquad)(?![A-Za-z])"), " "),
    (re.compile(r"\\varnothing(?![A-Za-z])"), r"\\emptyset "),
    (re.compile(r"\\(?:degree|textdegree)(?![A-Za-z])"), r"^{\\circ}"),
    (re.compile(r"(?<=[\w)}])\s*(?:\*\*|\^)\s*(-?\d{2,}|-\w)(?![\w}])"), r"^{\1}"),  # powers of plain text
    (re.compile(r"(?<=[\w)}])\*\*(?=[\w({])"), "^"),
    # Money. A dollar sign without a backslash is a delimiter, see `unmarked`.
    (re.compile(r"\\\$|[€£¥₹₽₩₪₫]|\\(?:pounds|euro|textdollar|yen)(?![A-Za-z])"), ""),
]
# Between groups of three digits: LaTeX's spaces, a comma in braces or before a negative space, and any space.
_GAP = r"(?:\\[,;:! ]\s*|~|\{\s*,\s*\}|,\s*\\!\s*|\s)"
_THOUSANDS = re.compile(rf"(?<![\w.,}}^])(\d{{1,3}})((?:(?:{_GAP}|,)\d{{3}})+)(?![\d])(?!\s*[A-Za-z(]*\\frac)")
_MIXED_GAPS = re.compile(_GAP)
_FINE = re.compile(r"(?<=\d)(?:\\[,!]|\u2009|\u202f|\{\\,\})\s*(?=\d{3})")  # in the digits after a decimal point
_DECIMALS = re.compile(r"(?<=\.)\d{3}(?:\\[,!]\s*\d{1,3})+")
_SCIENTIFIC = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?|\.\d+)[eE]([-+]?\d{1,4})(?![\w.])")
_REPEATING = re.compile(r"(?<![\d.])(\d*)\.(\d*)\\(?:overline|bar|dot)\s*\{?(\d+)\}?")
_ORDINAL = re.compile(r"(?<=\d)(?:\^?\{?\\text\{\s*(?:st|nd|rd|th)\s*\}\}?|\s?(?:st|nd|rd|th)(?![A-Za-z]))")
_SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_SCALE = re.compile(rf"(?<=[\d}}])\s*(?:\\text\{{\s*)?({'|'.join(_SCALES)})s?(?![A-Za-z])\s*([^{{}}]*)(\}})?")
_OF_MATHEMATICS = r"\\\(((?:(?!\\\().)*)\\\)", r"\\\[((?:(?!\\\[).)*)\\\]"
_OF_WORDS = r"\\text\s*\{([^{}]*)\}", r"\\mathbf\s*\{([^{}]*)\}", r"\{([^{},]*)\}", r"\*\*(.*)\*\*"
_ENCLOSED = [re.compile(pattern, re.DOTALL) for pattern in (*_OF_MATHEMATICS, *_OF_WORDS)]
_LABEL = re.compile(r"(?:[A-Za-z' ]*\b(?:is|are|equals)\b|[Aa]nswer)\s*:?\s*\$([^$]+)\$\s*\.?")
_BARE_SET = re.compile(r"^\{(?=[^{},]*,)([^{}]*)\}$")
_ABOUT = re.compile(r"^\s*(?:\\(?:approx|sim|bullet)(?![A-Za-z])|~(?!\d{3}))")
_CHOICE = re.compile(r"\(?\s*([A-Z])\s*(?:\)|\.|\):?)?")


def spelled(text: str) -> str:
    """The text with ASCII digits and signs, LaTeX's names for symbols, and numbers without marks between thousands."""
    text = _VULGAR.sub(lambda found: r"\frac{%s}{%s}" % tuple(_compatible(found[0]).split("⁄")), text)  # noqa: UP031
    text = _script(_script(text, _RAISED, "^"), _LOWERED, "_")
    text = _ROOT.sub(lambda found: rf"\sqrt{{{found[1] or found[2]}}}", text.translate(_SIGNS)).replace("√", r"\sqrt ")
    text = "".join(map(_plain, text))
    for pattern, replacement in _COMMANDS:
        text = pattern.sub(replacement, text)
    text = _DECIMALS.sub(lambda found: _FINE.sub("", found[0]), text)
    text = _THOUSANDS.sub(_joined, text)
    text = _SCIENTIFIC.sub(lambda found: rf"{found[1]} \times 10^{{{found[2]}}}", text)
    text = _REPEATING.sub(_fraction, text)
    text = _SCALE.sub(lambda found: rf" \times 10^{{{_SCALES[found[1]]}}}" + _rest(found[2], found[3]), text)
    return _ORDINAL.sub("", text).strip()


def unmarked(text: str) -> str:
    """A spelled answer without what stands around it: delimiters of mathematics, one `\\text{}`, a full stop.

    The letter of a choice loses its parentheses, a rounded number its sign. Of `The mode is $2$.` the formula is left.
    """
    label = _LABEL.fullmatch(text)
    text = label[1] if label else text.replace("$", " ")
    previous = None
    while text != previous:
        previous, text = text, _ABOUT.sub("", text).strip().rstrip(".,;").removesuffix("\\").strip()
        for pattern in _ENCLOSED:
            found = pattern.fullmatch(text)
            text = found[1] if found else text
    choice = _CHOICE.fullmatch(text)
    return choice[1] if choice else _BARE_SET.sub(r"\\{\1\\}", text)


def text_key(text: str) -> str:
    """A text for comparison with others: lower case, no space, nothing of LaTeX's that only changes looks."""
    text = re.sub(r"\\(?:left|right)(?![A-Za-z])|\\[,;:! ]|~|['\"]", " ", text)
    text = re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", text)
    text = re.sub(r"\\text\{([^{}]*)\}", r"\1", text)
    return text.rstrip(".").casefold()


def _plain(character: str) -> str:
    """ASCII for a digit of any script, a sign of full width, and any space."""
    if character.isascii():
        return character
    if character.isdecimal():
        return str(unicodedata.decimal(character))
    if "\uff01" <= character <= "\uff5e":
        return _compatible(character)
    # Thin spaces stay apart from others: they may stand in decimals.
    return r"\," if character in "\u2009\u202f\u2006\u200a" else " " if character.isspace() else character


def _compatible(text: str) -> str:
    return unicodedata.normalize("NFKC", text)


def _script(text: str, characters: str, mark: str) -> str:
    return re.sub(
        f"[{characters}]+", lambda found: mark + "{" + _compatible(found[0]).replace("\u2212", "-") + "}", text
    )


def _joined(found: re.Match[str]) -> str:
    """A number without marks between thousands; as it is, if its marks are bare commas or it begins with 0.

    The parser reads `10,000`, and knows that in `\\{10,200\\}` a comma stands between two numbers.
    """
    if found[1].startswith("0") or not _MIXED_GAPS.search(found[2]):
        return found[0]
    return found[1] + re.sub(r"\D", "", found[2])


def _fraction(found: re.Match[str]) -> str:
    whole, first, period = found.groups()
    below = (10 ** len(period) - 1) * 10 ** len(first)
    above = int(whole + first + period) - int((whole + first) or "0")
    return rf"\frac{{{above}}}{{{below}}}"


def _rest(words: str, closing: str | None) -> str:
    return rf"\text{{ {words}}}" if closing and words.strip() else words


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
    named = (formula for end in anchors for start, _, formula in formulas if end <= start <= end + _REACH)
    whole = [] if "\n" in text else [text]
    return [*whole, *([next(named, formulas[-1][2])] if formulas else [])]


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


def _formulas(text: str) -> list[tuple[int, int, str]]:
    """(start, end, formula) of all formulas of a text; neighbours with only `and`, `or` or a comma between are one."""
    text = _LINE_NUMBER.sub(lambda found: " " * len(found[0]), _without_currency(text))
    found, end = [], 0
    for match in _DELIMITED.finditer(text):
        found += _bare(text, end, match.start())
        content = next(group for group in match.groups() if group is not None)
        found.append((match.start(), match.end(), content))
        end = match.end()
    found += _bare(text, end, len(text))
    merged: list[tuple[int, int, str]] = []
    for start, end, formula in found:
        between = text[merged[-1][1] : start] if merged else ""
        percent = re.fullmatch(r"\s*(\\?%|percent)\s*", formula)
        if merged and (percent or re.fullmatch(r"\s*(?:,\s*)?(?:and|or|,)\s*", between)):
            first, _, before = merged[-1]
            merged[-1] = first, end, before + ("" if percent else ", ") + formula
        else:
            merged.append((start, end, formula))
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


def _bare(text: str, start: int, end: int) -> list[tuple[int, int, str]]:
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
            formulas.append((start + run[0][0], start + run[-1][1], content))
    return formulas


def _is_formula(token: str) -> bool:
    plain = _COMMAND.sub(" ", _TEXT.sub(" ", spelled(token)))
    if WORD.search(plain):
        return False
    return token in _OPERATORS or re.search(r"\d|[=<>^|]|\\[A-Za-z]", token) is not None
