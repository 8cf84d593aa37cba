"""Texts of a policy or a judge are read in time that grows with their length: the kernel ends what backtracks."""

import resource
from collections.abc import Callable
from multiprocessing import get_context

import pytest

from megarl.rewards import math_response, math_text
from megarl.rewards.judge.numbers import last_number, numbers_rule, own_words
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
    "boxes": math_response.boxed, "last number": lambda text: last_number(own_words(text), 10),
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
