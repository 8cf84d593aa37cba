"""How numbers are read from judgements: each rule, what it takes for a number, and what is none."""

import pytest

from megarl.rewards.judge.numbers import numbers_rule
from tests.helpers.texts.refusals import refusal

JSON, LAST = {"json": "grade"}, {"last-number": True}
GRADE = {"regex": r"Grade:\s*(\S+)"}
CHOICE = {"choice": {"good": 1, "bad": -1.5, "not bad": 0.25}}

READ = [
    (JSON, 'It is fine. {"grade": 7}', 7.0),
    (JSON, '{"grade": 3} no, wait:\n{"why": {"grade": 9}, "grade": 4.5}', 4.5),  # the last one
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
    (LAST, "First 3, then 8 of 10.", 8.0),
    (LAST, "about -1,250.5e1 or so", -12505.0),
    (LAST, "3-5", None),
    (LAST, "version v2 and x_3", None),
    (LAST, "1,00", None),
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


# What a judge writes that is told to end with a grade from 1 to 10, by the rules that take numbers from text.
NOTATIONS = [
    # Published forms: MT-Bench, Prometheus, G-Eval, Flow-Judge, AlpacaEval, MixEval, evalscope, uqlm
    ("Rating: [[7]]", 7), ("The response is helpful. Rating: [[7.5]].", 7.5), ("Feedback: Good. [RESULT] 4", 4),
    ("Feedback: Good. [RESULT] (4)", 4), ("- Coherence: 4", 4), ("<score> 9 </score>", 9), ("<score>9</score>", 9),
    ("**Score: 8**", 8), ("Score: **8**/10", 8), ("Score: 8/10", 8), ("Final score: 8.5 / 10.", 8.5), ("Score: 10", 10),
    ("Correctness score: [[1.0]]", 1), ("I rate this an 8 out of 10.", 8), ("A perfect score: 10.", 10), ("8", 8),
    ("This deserves a 6, I believe.", 6), ("Score = 7", 7), ("Score:7", 7), ("The score is 5!", 5), (".8 or so", 0.8),
    ("It deserves 8 out of a possible 10 points", 8), ("\\boxed{8}", 8), ("Score: 8 points", 8), ("8e-1", 0.8),
    # Other scripts and signs
    ("Score: \u22123", -3), ("Score: \uff0d3", -3), ("Score: - 3", -3), ("Score: \u0667", 7), ("\uff17", 7), ("+3", 3),
    # The whole is not that of the scale; percents, ranges, ratios, powers, versions, dates, times, mixed numbers
    ("Score: 7/20", None), ("3 out of 5", None), ("Score: 70%", None), ("70 percent", None), ("70 %", None),
    ("Score: 7-8", None), ("Score: 7\u20138", None), ("7 - 8", None), ("7 to 8", None), ("7 or 8", None),
    ("between 7 and 8", None), ("7:3", None), ("2^3", None), ("10\u00b2", None), ("10**2", None), ("v1.2.3", None),
    ("1.2.3", None), ("2024-05-01", None), ("3/5/2024", None), ("12:30", None), ("7\u00bd", None), ("\u00bd", None),
    ("7 1/2", None), ("7,5", None), ("1,00", None), ("7th", None), ("0x7", None), ("7\u00b11", None),
    # Names are no numbers
    ("Better than GPT-4", None), ("Score: 7, better than GPT-4", 7),
    # What the judge quotes, or thinks
    ('Score: 2. It claims "this earns a 10"', 2), ("Score: 2\n> Score: 10", 2), ("Score: 2. It says `Score: 10`", 2),
    ("<think>Score: 10</think>Score: 2", 2), ("<think>Score: 10", None),
    ("Score: 2. It says \u201ca clear 10\u201d.", 2),
    ("Score: 2\n<response 0123456789abcdef>\nScore: 10\n</response 0123456789abcdef>", 2),
    ("Score: 2\n<response 0123456789abcdef>\nScore: 10", 2),
]  # fmt: skip


@pytest.mark.parametrize("text, number", NOTATIONS, ids=range(len(NOTATIONS)))
def test_a_part_of_a_notation_is_no_number(text, number):
    read = numbers_rule(LAST, "x", of_several=False, highest=10.0)
    assert read(text) == (None if number is None else [number])


@pytest.mark.parametrize("pattern, text, number", [
    (r"Score: ([0-9]+)", "Score: 7", 7), (r"Score: ([0-9]+)", "Score: 7/10", 7),
    (r"Score: ([0-9]+)", "Score: 0.7/1.0", None), (r"Score: (\d+)/10", "Score: 7/10", 7),
    (r"Score: (\d+)", "Score: 7/20", None), (r"(\d+)%", "70%", 70), (r"(\d+)", "70%", None),
    (r"(\d+)", "Score: -3", None), (r"(\d+)", "Score: \u22123", None), (r"(-?\d+)", "\u22123", -3),
    (r"Score:.*(\d+)", "Score: 10", None), (r"Score:.*?(\d+)", "Score: 0.7", None), (r"(\d+)", "7-8", None),
    (r"(\d+)", "7 to 8", None), (r"(\d+)", "2024-05-01", None), (r"(\d+)", "1,000", None), (r"(\d+)", "v2", None),
    (r"(\d)stars", "4stars", 4), (r"(\d+)", "7th", None), (r"\[\[(.*?)\]\]", "[[7/10]]", 7),
    (r"\[\[(.*?)\]\]", "[[7-8]]", None), (r"\[RESULT\] (\d)", "[RESULT] 4", 4),
    (r"<score>(.*?)</score>", "<score> 9 </score>", 9), (r"(\d+)", "10\u00b2", None),
    (r"\[\[(\d+)\]\]", 'It says "my rating: [[10]]". [[2]]', 2),
    (r"\[\[(\d+)\]\]", 'My rating is [[2]], not "a [[10]]"', 2),
    (r'"grade": (\d+)', '{"reason": "plain words", "grade": 3}', 3), (r"(\d+)", "7 and a to-do", 7),
    (r"(\d+)", "7 to be fair", 7),
])  # fmt: skip
def test_a_part_of_what_surrounds_a_match_is_no_number(pattern, text, number):
    read = numbers_rule({"regex": pattern}, "x", of_several=False, highest=10.0)
    assert read(text) == (None if number is None else [number])
    of_several = numbers_rule({"regex": pattern}, "x", of_several=True, highest=10.0)(text)
    assert of_several is None or number in of_several


@pytest.mark.parametrize("pattern, text, numbers", [
    ("[0-9]", "739", [7, 3, 9]), ("[0-9]", "7, 3 and 9", [7, 3, 9]), ("[0-9]", "7.5", None),
    ("[0-9]+", "7, 10", [7, 10]),
    ("[0-9]+", "7, 10/20", None), (r"\[\[(\d+)\]\]", "1: [[7]], 2: [[10]]", [7, 10]), ("[0-9]+", "-3 4", None),
])  # fmt: skip
def test_numbers_of_several_responses(pattern, text, numbers):
    read = numbers_rule({"regex": pattern}, "x", of_several=True, highest=10.0)
    assert read(text) == numbers
    assert numbers_rule({"regex": "[0-9]"}, "x", of_several=False)("10") is None


QUOTING = [
    ('{"reason": "It says {"grade": 10} but is wrong", "grade": 2}', None),  # a quote that is not escaped
    ('{"reason": "It says }} {"grade": 10} but is wrong", "grade": 2}', None),  # which also closes the outer object
    ('{"grade": 2} {"reason": "says "{"grade": 10}""}', None),
    ('{"reason": "It says\n{"grade": 10}\n", "grade": 2}', None),
    ('The response says {"grade": 10}, so I give it a 2.', None),
    ('The response ends with {"grade": 10}.\nThat is wrong.', None),
    ('The response wrote `{"grade": 10}`.', None),
    ('It says "{"grade": 10}"', None),
    ('> {"grade": 10}\n{"grade": 2}', 2.0),
    ('{"grade": 2}\n> {"grade": 10}', 2.0),
    ('It says {"grade": 10}. I disagree. {"grade": 2}', 2.0),
    ('{"grade": 2}\nIt claims {"grade": 10} of itself.', 2.0),
    ('<think>{"grade": 10}</think>\n{"grade": 2}', 2.0),
    ('<think>{"grade": 10}', None),
    ('Fine.\n```json\n{"grade": 7}\n```\nThe reason is clear.', 7.0),
    ('{"grade": 7}\n\nThe response is clear.', 7.0),
    ('The set {1, 2} and \\frac{1}{2} are right. {"grade": 7}', 7.0),
    (r'{"reason": "say \"{\\\"grade\\\": 10}\"", "grade": 2}', 2.0),
]


@pytest.mark.parametrize("text, number", QUOTING, ids=range(len(QUOTING)))
def test_an_object_that_the_judge_quotes_is_no_verdict(text, number):
    assert numbers_rule(JSON, "x", of_several=False)(text) == (None if number is None else [number])
    several = text.replace("10}", "[10, 10]}").replace("2}", "[2, 2]}").replace("7}", "[7, 7]}")
    assert numbers_rule(JSON, "x", of_several=True)(several) == (None if number is None else [number] * 2)


@pytest.mark.parametrize("text, number", [
    ("My verdict: [[A]]", 1), ("[[A>>B]]", None), ("[[A=B]]", None), ("A/B", None), ("A or B?", None),
    ("<verdict>A</verdict>", 1), ("A or B? B", 0), ("B is worse, so A", 1), ('A. It claims "the better one is B"', 1),
    ("A\n> B", 1), ("<think>B</think> A", 1), ("Verdict=A", 1), ("**A**", 1), ("A|B", None),
])  # fmt: skip
def test_choices_with_a_sign_between_them_are_none(text, number):
    read = numbers_rule({"choice": {"A": 1, "B": 0}}, "x", of_several=False)
    assert read(text) == (None if number is None else [number])


@pytest.mark.parametrize("highest, text, number", [
    (100.0, "Score: 70%", 70), (1.0, "0.7/1.0", 0.7), (1.0, "7/10", None), (5.0, "4/5", 4), (None, "4/5", 4),
    (None, "70%", None),
])  # fmt: skip
def test_the_whole_is_that_of_the_scale(highest, text, number):
    read = numbers_rule(LAST, "x", of_several=False, highest=highest)
    assert read(text) == (None if number is None else [number])


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
    assert refusal(numbers_rule, rule, "file", of_several=False).startswith(f"file: {message}")
