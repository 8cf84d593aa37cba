"""The verifier `math-verify`: whether two mathematical expressions are equal, by the package math-verify.

Each response has a process of its own (`isolated`): the package's parser calls sympy's, which evaluates text, and
computes whatever numbers it says. An answer is read whole or compared as text: never is a part of it the answer.
"""

import calendar
import functools
import importlib.util
import logging
import re
from typing import Any, NamedTuple

from megarl.data.prompts import PromptSet
from megarl.errors import UsageError
from megarl.rewards import guard, isolated, math_text
from megarl.rewards.base import BuiltIn, Sample, Score, ScoringError
from megarl.rewards.math_text import spelled, text_key, unmarked
from megarl.rewards.text import check_answers

WRONG = Score(0.0, False, {"math_verify": 0.0})
_SHORT_UNITS = (
    "mm cm dm km ft yd mi kg mg lb lbs oz ml mL mph kph kmh sec min hr hrs Hz kHz MHz eV keV MeV GeV kW kJ Pa kPa atm "
    "mol rad deg"
).split()
_FUNCTIONS = "arcsin arccos arctan sinh cosh tanh sin cos tan cot sec csc ln log exp".split()
_WORDS = re.compile(
    r"(\\text\s*\{[^{}]*\}|\\(?:begin|end|operatorname\*?)\s*\{[^{}]*\}(?:\{[^{}]*\})?|\\[A-Za-z]+)|(?<![A-Za-z])([A-Za-z]{2,})"
)
# At least one of three letters or more, not all capital: `xy` and `ABC` are products or names of points.
_ONLY_WORDS = re.compile(r"(?=.*[A-Za-z]{2}[a-z])(?!(?:sin|cos|tan|cot|sec|csc|log|exp)\b)[A-Za-z][A-Za-z\s,.'~-]*")
_TEXTS = re.compile(r"(?<![_^{])(?<!_\{)\\text\s*\{([^{}]*)\}")
# Units at the end, one or several, as in \text{ m} / \text{s}^2.
_UNIT = r"(?:\s|~|/|\\[,;:! ]|\\cdot)*\\text\s*\{[^{}\\\d]*\}(?:\s*\^\s*(?:\{-?\d\}|-?\d))?"
_UNITS = re.compile(rf"(?:{_UNIT})+\s*$")
_NO_UNIT = re.compile(
    r"\b(?:if|when|unless|for|or|and|is|are|not|no|where|otherwise|to|between|from|than|least|most|plus|minus|times|"
    r"am|pm|[ap]\s?\.\s?m)\b",
    re.IGNORECASE,
)
_MONTHS = "|".join(f"{name[:3]}(?:t?{name[3:]})?" for name in calendar.month_name if name)  # also `Sept.`
_DATE = re.compile(
    r"\d{4}[-/.]\d{1,2}[-/.]\d{1,2}|\d{1,2}[-/.]\d{1,2}[-/.]\d{4}"
    rf"|.*\b(?:{_MONTHS})\b\.?\W+\d.*|\d{{1,2}}(?:st|nd|rd|th)?\W+(?:of\W+)?(?:{_MONTHS})\b.*",
    re.IGNORECASE,
)
_IN_BASE = re.compile(r"\(?(-?\d+(?:\.\d+)?)\)?_\s*\{?\s*(\d{1,2})\s*\}?")
_RATIO = re.compile(r"[^:=]+(?::[^:=]+){2,}")
_PERCENT = re.compile(r"(.*[\d}).])\s*(?:\\?%|\\text\s*\{\s*(?:percent|%)\s*\}|percent)\s*", re.DOTALL)
_TINY = 1e-4  # below it math-verify 0.9 takes different numbers for equal, as of 1.6e-19 and 9.1e-31


class ReadAnswer(NamedTuple):
    """An answer as it is read: its `text`; [sympy object, source], empty if it is no expression; its number's base."""

    text: str
    value: list[Any]
    base: str | None


def score_inside(sample: Sample) -> Score:
    """1 if the response's answer equals the reference, as `1/2`, `0.5` and `\\frac{1}{2}` do; else 0.

    The answer is the last `\\boxed{...}`, or the last `<answer>...</answer>`, or of these or of the whole response the
    last formula or number. Answers of which one is no expression are compared as texts. `extracted` is the answer's
    canonical form, the same for `0.5` and `1/2`. A response cut by the length limit scores 0. Raises ValueError for a
    reference answer without any text.
    """
    reference = read_reference(sample.answer or "")
    if not reference.text:
        raise ValueError(f"math-verify cannot read the answer {sample.answer!r}")
    answers = _answers(sample.response, reference) if sample.finished else []
    correct = any(_equal(reference, answer) for answer in answers)
    return Score(
        float(correct), correct, {"math_verify": float(correct)}, extracted=_canonical(answers[-1]) if answers else None
    )


def read_reference(text: str) -> ReadAnswer:
    """The answer that a line of a data set gives: all of it, or its last box, or what follows GSM8K's `####`."""
    box = math_text.boxed(text)
    return read_answer(text.rpartition("####")[2] if box is None else box)


@functools.lru_cache(maxsize=4096)
def read_answer(text: str) -> ReadAnswer:
    """An answer of which nothing is left out but delimiters, units and the sign of a currency. Imports sympy."""
    bare = unmarked(spelled(text))
    if not bare or _DATE.fullmatch(bare):
        return ReadAnswer(text_key(bare), [], None)
    based = _IN_BASE.fullmatch(bare)
    formula = based[1] if based else bare
    if _RATIO.fullmatch(formula):
        formula = f"({formula.replace(':', ',')})"  # the package divides 1 : 2 : 3 from the left, and has 1 : 6
    return ReadAnswer(text_key(bare), _value(formula), based[2] if based else None)


def prepare(metadata: dict[str, Any] | None) -> None:
    """Nothing to build: each response is parsed in a child of its own, with the answer."""


def warm_up():
    """Import the package and what it imports with the first expression."""
    score_inside(Sample("", "\\boxed{\\frac{1}{2}}", "0.5"))


def check_mathematics(prompts: PromptSet):
    """UsageError for the first line without an answer, or if the package is missing; does not import it."""
    if importlib.util.find_spec("math_verify") is None:
        raise UsageError("--reward math-verify: the package math-verify is not installed")
    check_answers("math-verify", prompts)


def load_mathematics(prompts: PromptSet, seconds: float):
    """UsageError for the first line whose answer cannot be read within `seconds`, or if responses cannot be."""
    try:
        isolated.prepare("math-verify", {})
    except ScoringError as error:
        raise UsageError(f"--reward math-verify: {error}") from None
    for prompt in prompts:
        try:
            readable, problem = bool(guard.call(read_reference, prompt.answer, seconds).text), ""
        except TimeoutError as error:
            readable, problem = False, f": {error}"
        if not readable:
            where = prompts.where(prompt.index)
            raise UsageError(
                f"{where}: --reward math-verify: cannot read the answer {prompt.answer!r}{problem}; allowed: a number, "
                "LaTeX, or a text"
            )


def _answers(response: str, reference: ReadAnswer) -> list[ReadAnswer]:
    """The response's answer in a list, empty if it has none. A text is one only if it equals the reference."""
    box = math_text.boxed(response)
    if box is not None:
        return [read_answer(box)]
    found = [
        read_answer(text)
        for number, text in enumerate(math_text.written(response))
        if number or reference.text == text_key(unmarked(spelled(text))) or not math_text.WORD.search(_bare(text))
    ]
    return next(([answer] for answer in found if answer.value or answer.text == reference.text), [])


def _bare(text: str) -> str:
    """Without the words and commands of formulas."""
    return re.sub(r"\\text\s*\{[^{}]*\}|\\[A-Za-z]+", " ", spelled(text))


def _equal(reference: ReadAnswer, answer: ReadAnswer) -> bool:
    from math_verify import verify

    if answer.text and answer.text == reference.text:
        return True
    if not (reference.value and answer.value) or (reference.base and answer.base and reference.base != answer.base):
        return False
    # The package's own time-outs are alarms, which would cancel the one that limits this verifier.
    equal = verify(reference.value, answer.value, allow_set_relation_comp=True, timeout_seconds=None)
    return equal and _near(reference.value[0], answer.value[0])


def _near(one: Any, other: Any) -> bool:
    """Whether two numbers are equal in relation to their size; True for anything but tiny numbers."""
    try:
        sizes = abs(complex(one.evalf())), abs(complex(other.evalf()))
        difference = abs(complex((one - other).evalf()))
    except Exception:
        return True  # no numbers
    return max(sizes) >= _TINY or difference <= 1e-3 * max(sizes)


def _value(text: str) -> list[Any]:
    """[sympy object, source] of a formula, or an empty list if not all of it is one."""
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse

    _quiet()
    percent = _PERCENT.fullmatch(text)
    if _ONLY_WORDS.fullmatch(text):
        return []
    formula = _with_marked_words(percent[1] if percent else text)
    units = _UNITS.search(formula)
    if units is not None and formula[: units.start()].strip() and not _NO_UNIT.search(units[0]):
        formula = formula[: units.start()]
    formula = re.sub(r"^\\text\s*\{[^{}]*\}\s*=(?!=)", "", formula)  # what the number is of: \text{Area} = 5
    words = (found.strip(" ,~") for found in _TEXTS.findall(formula))
    if any(re.search("[A-Za-z]{2}", each) and each not in ("and", "or") for each in words):
        return []
    # The package's own cut of units takes the t of 2t, and with `8 \text{ hours } 30 \text{ minutes}` the 30.
    rules = NormalizationConfig(
        basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none", equations=False
    )
    source = f"${formula.strip()}$" + (r"\%" if percent else "")
    target = LatexExtractionConfig(boxed_match_priority=-1, normalization_config=rules)
    found = parse(source, [target], "no_fallback", "first_match", parsing_timeout=None)
    return [found[0], formula] if found and not isinstance(found[0], str) else []


def _with_marked_words(text: str) -> str:
    """The formula with words as `\\text{}` and functions as commands. Words of LaTeX's are products of letters."""

    def marked(found: re.Match[str]) -> str:
        command, word = found.groups()
        if command:
            return command
        if word in _FUNCTIONS or word == "pi":
            return f"\\{word} "
        before, after = text[: found.start()], text[found.end() :]
        alone = re.search(r"(?:^|[\s~,(\d}])$", before) and re.match(r"$|[\s~,).^]", after)
        long = len(word) >= 4 and not word.isupper() and not re.search(r"\d$", before)
        is_word = alone and (word in _SHORT_UNITS or long) and word not in ("sqrt", "infinity")
        return rf"\text{{ {word} }}" if is_word else word

    return _WORDS.sub(marked, text)


def _canonical(answer: ReadAnswer) -> str | None:
    """Text of an answer that is the same for equal numbers; None if it is empty."""
    if not answer.value:
        return answer.text or None
    import sympy

    value = answer.value[0]
    try:
        return str(sympy.nsimplify(value.doit(), rational=True) if value.is_number else value)
    except Exception:
        return str(answer.value[-1])  # the source: sympy cannot print, e.g., numbers of thousands of digits


@functools.cache
def _quiet():
    for name in ("math_verify.parser", "math_verify.grader"):
        logging.getLogger(name).setLevel(logging.ERROR)


MATH_VERIFY = BuiltIn(
    lambda options: functools.partial(isolated.score, "math-verify", options.timeout),
    check_mathematics,
    lambda prompts, options: load_mathematics(prompts, options.timeout),
    limited=False,
    threads="workers",
    isolated=True,
)
