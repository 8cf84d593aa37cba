"""Texts of a policy or a judge are read in time that grows with their length: the kernel ends what backtracks."""

import resource
from collections.abc import Callable
from multiprocessing import get_context

import pytest

from megarl.rewards import math_text, mathematics
from megarl.rewards.base import Sample, Score
from megarl.rewards.judge.numbers import last_number, numbers_rule, own_words
from megarl.rewards.math_text import boxed
from tests.helpers.tiers import by_default

LENGTH = 50_000  # characters; what needs half a second for 8,000 needs 20 for these
SECONDS = 15  # of processor time for all texts of a reader; a few are enough
BEGINNINGS = ("", "1", "{")
UNITS = (
    " ", "\n", "1", "1,", "10,", "1 ", "(", "{", "$", "\\", "`", '"', "**", "<a", "- ", "a ", "1/", "the ", "1 of ",
    r"\, ", r"\text{", r"\boxed{", "^{", "answer ", "million ", ".1",
)  # fmt: skip
READERS: dict[str, Callable[[str], object]] = {
    "spelling": math_text.spelled, "marks": math_text.unmarked, "key": math_text.text_key,
    "boxes": math_text.boxed, "last number": lambda text: last_number(own_words(text), 10),
    "json field": numbers_rule({"json": "score"}, "file", False),
    "choice": numbers_rule({"choice": {"yes": 1, "no": 0}}, "file", False),
    "match": numbers_rule({"regex": r"Score: (\d+)"}, "file", False),
}  # fmt: skip


def _read_all(name: str):
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    for unit in UNITS:
        for beginning in BEGINNINGS:
            READERS[name](beginning + unit * (LENGTH // len(unit)) + "!")


@pytest.mark.parametrize("name", by_default(READERS, ("spelling",)))
def test_long_texts_are_read_in_linear_time(name):
    process = get_context("fork").Process(target=_read_all, args=(name,))
    process.start()
    process.join()
    assert process.exitcode == 0


def reward(reference, response):
    return mathematics.score_inside(Sample("q", response, reference)).reward


# Where a response says its answer: reference, response, reward.
RESPONSES = [
    ("2", r"The answer is 2\sqrt{3}", 0.0),
    (r"2\sqrt{3}", r"The answer is 2\sqrt{3} units.", 1.0),
    ("1", "The answer is x + 1", 0.0),
    ("x+1", "The answer is x + 1.", 1.0),
    ("1", "it is 1/2x", 0.0),
    ("3", r"It is 3\frac{1}{2}", 0.0),
    ("4", "3 or 4", 0.0),
    ("26", "We have $x$ ducks. So the total is 26.", 1.0),
    ("6", "Alice has $5 and Bob has $6", 1.0),
    ("1234", "The total is $1,234.", 1.0),
    ("73", "Final Answer: **73**", 1.0),
    ("5", "The answer is 5. (I used 3 steps)", 1.0),
    ("28", "so it is $28$ %", 1.0),
    ("16", "Thus it costs 16 dollars in all.", 1.0),
    ("7", "6 + 1 = 7", 1.0),
    ("5", "it is a 5", 1.0),
    ("2", r"\boxed{1} and \boxed{2}", 0.0),
    ("1,2", r"$\boxed{1}$ and $\boxed{2}$", 1.0),
    ("4", r"The answer is 4. \boxed{?}", 0.0),
    ("5", r"$5$, in short \boxed{\clubsuit 5 3}", 0.0),
    ("10000", "<answer>10\u202f000</answer>", 1.0),
    ("5", "<answer>The answer is 5</answer>", 1.0),
    ("Evelyn", "<answer>Evelyn</answer>", 1.0),
    ("Evelyn", "Briana, Debra, Evelyn", 0.0),
    ("12", "1. First\n2. Then it is 12", 1.0),
    ("(1,2)", "The point is (1, 2).", 1.0),
    ("2", "The point is (1, 2).", 0.0),
    (r"\frac{1}{x + 1}", r"we get \frac{1}{x + 1}", 1.0),
    ("-3", "it is \u22123", 1.0),
    ("3", "it is \u22123", 0.0),
]  # fmt: skip


@pytest.mark.parametrize(
    "reference, response, expected", RESPONSES, ids=[response[:50] for _, response, _ in RESPONSES]
)
def test_a_response_is_not_judged_by_a_part_of_its_answer(reference, response, expected):
    assert reward(reference, response) == expected


@pytest.mark.parametrize("text, content", [
    (r"\boxed{\{1,2\}}", r"\{1,2\}"), (r"\boxed 5.", "5."), (r"\boxed{1", "1"), ("1", None), (r"\fbox{2}", "2"),
    (r"\boxed{1} or \boxed{\text{x}}", r"1, \text{x}"), (r"\boxed{1} then \boxed{2}", "2"), (r"\boxed{}", ""),
    (r"\boxed{\boxed{2}}", "2"), ("\\boxed{" * 3000, ""),
])  # fmt: skip
def test_the_content_of_boxes(text, content):
    assert boxed(text) == content


@pytest.mark.parametrize("answer, response, reward, extracted", [
    ("1/2", r"So it is \boxed{\frac{1}{2}}.", 1.0, "1/2"), (r"\frac{1}{2}", "it is 0.5", 1.0, "1/2"),
    ("$0.5$", "<think>9</think><answer>50%</answer>", 1.0, "1/2"), ("3", r"\boxed{4}, no: \boxed{3}", 1.0, "3"),
    ("3", r"\boxed{3}, no: \boxed{4}", 0.0, "4"), (r"2\pi", r"2\pi", 1.0, "2*pi"), (r"2\pi", "2", 0.0, "2"),
    ("x=5", "so 5", 1.0, "5"), ("(x+1)^2", "$x^2 + 2x + 1$", 1.0, "x**2 + 2*x + 1"),
    ("1234", "It costs 1,234", 1.0, "1234"), ("3", "No idea", 0.0, None), ("3", "", 0.0, None),
])  # fmt: skip
def test_the_answer_that_votes_is_canonical(answer, response, reward, extracted):
    score = mathematics.score_inside(Sample("q", response, answer))
    assert score == Score(reward, bool(reward), {"math_verify": reward}, extracted)


def test_a_cut_response_and_an_answer_in_words():
    verify = mathematics.score_inside
    assert verify(Sample("q", "3", "3", finished=False)) == Score(0.0, False, {"math_verify": 0.0})
    # Letter by letter, Pairs would be a product equal to Paris.
    assert not verify(Sample("q", "Pairs", "Paris")).correct
    assert verify(Sample("q", "Paris", "Paris")) == Score(1.0, True, {"math_verify": 1.0}, "paris")
