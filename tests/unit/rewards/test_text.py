"""Verifiers of text: scores, extracted answers, and that a truncated response scores nothing."""

import pytest

from megarl.flags.settings import Settings
from megarl.rewards.base import Sample, Score
from megarl.rewards.text import format_match, length, regex
from tests.helpers.texts.refusals import refusal


@pytest.mark.parametrize("pattern, response, answer, reward, extracted", [
    (r"\d+", "it is 42.", None, 1.0, "42"), (r"\d+", "it is 42.", " 42 ", 1.0, "42"),
    (r"\d+", "it is 42.", "43", 0.0, "42"), (r"= (\d+)", "6 + 1 = 7 = 8", "7", 1.0, "7"),
    (r"(x)?\d+", "41", "41", 1.0, "41"),  # a group that took no part
    (r"\d+", "none", None, 0.0, None), (r"a*", "b", None, 1.0, None),  # found, but it says nothing
])  # fmt: skip
def test_regex(pattern, response, answer, reward, extracted):
    verify = regex(pattern)
    assert verify(Sample("q", response, answer)) == Score(reward, bool(reward), {"regex": reward}, extracted)
    assert verify(Sample("q", response, answer, finished=False)) == Score(0.0, False, {"regex": 0.0})


def test_format_is_of_the_whole_response():
    verify = format_match(Settings().reward_format)
    good = "<think>a\nb</think>\n<answer>4</answer>\n"
    assert verify(Sample("q", good)) == Score(1.0, True, {"format": 1.0})
    for sample in (Sample("q", good + "!"), Sample("q", "<answer>4</answer>"), Sample("q", good, finished=False)):
        assert verify(sample) == Score(0.0, False, {"format": 0.0})


@pytest.mark.parametrize("make, flag", [(regex, "--reward-pattern"), (format_match, "--reward-format")])
def test_invalid_patterns(make, flag):
    assert refusal(make, "(a").startswith(f"{flag} (a: not a regular expression: missing )")


def test_length_falls_from_the_target_to_twice_as_many():
    verify = length(100)
    rewards = [verify(Sample("q", "a", tokens=tokens)).reward for tokens in (0, 99, 100, 125, 150, 200, 900)]
    assert rewards == [1.0, 1.0, 1.0, 0.75, 0.5, 0.0, 0.0]
    assert verify(Sample("q", "a", tokens=100)).correct and not verify(Sample("q", "a", tokens=101)).correct
    assert verify(Sample("q", "a", tokens=5, finished=False)) == Score(0.0, False, {"length": 0.0})
