"""Answers of mathematics in one spelling, before any parser reads them.

What data sets publish and what policies write differs in spaces, signs and marks that math-verify 0.9 reads as products
or sums: `10\\,000` as 0, `1\\,010` as 11. Both sides go through the same functions.
"""

import re
import unicodedata

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
