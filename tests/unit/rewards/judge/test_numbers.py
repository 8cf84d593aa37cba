"""How numbers are read from judgements: each rule, what it takes for a number, and what is none."""

import pytest

from megarl.errors import UsageError
from megarl.rewards.judge.numbers import numbers_rule

JSON, LAST = {"json": "grade"}, {"last-number": True}
GRADE = {"regex": r"Grade:\s*(\S+)"}
CHOICE = {"choice": {"good": 1, "bad": -1.5, "not bad": 0.25}}

READ = [
    (JSON, 'It is fine. {"grade": 7}', 7.0),
    (JSON, '{"grade": 3} no, wait: {"why": {"grade": 9}, "grade": 4.5} and {"other": 1}', 4.5),  # the last one
    (JSON, '{"quote": "{\\"grade\\": 10}", "grade": 2}', 2.0),  # a quoted object is text
    (JSON, '{"quote": {"grade": 10}}', None),  # an inner object is none of the judge's
    (JSON, '{"grade": 10} {"grade": "7"}', None),
    (JSON, '{"grade": true}', None),
    (JSON, '{"grade": null}', None),
    (JSON, '{"grade": 1' + "0" * 400 + "}", None),
    (JSON, '{"grade": 7', None),  # unclosed
    (JSON, '{"a": {"b": [{"grade": 1', None),
    (JSON, '{"' * 3000, None),
    (JSON, '{"grade": [' + "[" * 5000, None),
    (JSON, "grade: 7", None),
    (LAST, "First 3, then 8 of 10.", 10.0),
    (LAST, "about -1,250.5e1 or so", -12505.0),
    (LAST, "3-5", 5.0),
    (LAST, "version v2 and x_3", None),
    (LAST, "1,00", 0.0),
    (LAST, "none", None),
    (GRADE, "Grade: 3\nGrade: 4.5", 4.5),
    (GRADE, "Grade: four", None),
    (GRADE, "4", None),
    ({"regex": r"[0-9]+"}, "1 and 22", 22.0),
    ({"regex": r"(a)?b"}, "b", None),  # the group has no part in the match
    (CHOICE, "It is bad. No: GOOD!", 1.0),
    (CHOICE, "not bad", 0.25),
    (CHOICE, "badly, goodness", None),
]  # fmt: skip


@pytest.mark.parametrize("rule, text, number", READ, ids=range(len(READ)))
def test_numbers(rule, text, number):
    assert numbers_rule(rule, "x", of_several=False)(text) == (None if number is None else [number])


@pytest.mark.parametrize("rule, message", [
    (None, "number: allowed is one of json, regex, last-number, choice with its option"),
    ({"json": "a", "regex": "b"}, "number: allowed is one of"),
    ({"number": "a"}, "number: allowed is one of"),
    ({"json": 3}, "number: json: allowed is the name of a field"),
    ({"regex": "("}, "number: regex: not a regular expression: "),
    ({"regex": 3}, "number: regex: not a regular expression: "),
    ({"last-number": 3}, "number: last-number: allowed is true"),
    ({"choice": {"yes": 1}}, "number: choice: allowed is a mapping of two or more labels to numbers"),
    ({"choice": {True: 1, False: 0}}, "number: choice: the label True is no text; write it in quotes"),
    ({"choice": {"yes": 1, "no": "0"}}, "number: choice: the value '0' of no is no number"),
    ({"choice": {"yes": 1, "Yes": 0}}, "number: choice: two labels differ only in upper and lower case"),
])  # fmt: skip
def test_wrong_rules(rule, message):
    with pytest.raises(UsageError) as caught:
        numbers_rule(rule, "file", of_several=False)
    assert str(caught.value).startswith(f"file: {message}") and "\n" not in str(caught.value)
