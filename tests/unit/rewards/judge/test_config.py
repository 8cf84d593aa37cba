"""The file of --judge-config: its defaults, and a line for each thing that may be wrong in it."""

from pathlib import Path

import pytest
import yaml

from megarl.rewards.judge.config import JudgeConfig, JudgeQuestion, order_agreement, questions_of, read_config
from tests.helpers.envs.judges import write
from tests.helpers.texts.refusals import refusal

RIGHT = {"messages": [{"role": "user", "content": "{question} {response}"}], "number": {"last-number": True},
         "range": [0, 10]}  # fmt: skip


def read(folder: Path, **changes):
    """A file with these keys in place of the right ones; None leaves a key out."""
    content = {key: value for key, value in {**RIGHT, **changes}.items() if value is not None}
    (folder / "judge.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
    return read_config(str(folder / "judge.yaml"))


def test_defaults(tmp_path):
    config = read(tmp_path)
    assert (config.temperature, config.samples, config.retries, config.max_tokens) == (0, 1, 0, 256)
    assert (config.low, config.high, config.correct_from, config.response_tokens) == (0, 10, 10, None)
    assert config.places == ("question", "response") and config.numbers("5", 1) == [5]


def test_the_example_is_right():
    config = read_config("configs/judge.yaml")
    assert config.places == ("question", "response") and config.numbers('Good. {"grade": 8}', 1) == [8]


def user(content) -> list:
    return [{"role": "user", "content": content}]


WRONG = {
    "no messages": ({"messages": None}, "messages is missing: it has no default"),
    "no rule": ({"number": None}, "number is missing: it has no default"),
    "no range": ({"range": None}, "range is missing: it has no default"),
    "unknown key": ({"tokens": 3}, "tokens: unknown; allowed: mode, pairs, messages, "),
    "no list": ({"messages": "a"}, "messages 'a': allowed is a list of messages"),
    "no message": ({"messages": []}, "messages []: allowed is a list of messages"),
    "other fields": ({"messages": [{"role": "user", "text": "a"}]}, "message 1: allowed is a mapping with role"),
    "other role": ({"messages": [{"role": "tool", "content": "a"}]}, "message 1: allowed is a role of system, user, "),
    "content": ({"messages": user(["{response}"])}, "message 1: allowed is a role of system, user, "),
    "last message": ({"messages": [*user("{response}"), {"role": "assistant", "content": "a"}]},
                     "the last message must be the user's"),
    "no response": ({"messages": user("{question}")}, "messages: have the place {response} 0 times; "),
    "two": ({"messages": user("{response}{response}")}, "messages: have the place {response} 2 times; "),
    "range": ({"range": [3, 1]}, "range [3, 1]: allowed is the lowest and the highest number, as [1, 10]"),
    "large range": ({"range": [0, 1e300]}, "range [0, 1e+300]: allowed is the lowest and the highest number"),
    "infinite range": ({"range": [0, float("inf")]}, "range [0, inf]: allowed is the lowest and the highest number"),
    "correct": ({"correct-from": 11}, "correct-from 11: allowed is a number of the range, 0 to 10"),
    "tokens": ({"max-tokens": 0}, "max-tokens 0: allowed is a whole number above 0"),
    "response tokens": ({"response-tokens": 1.5}, "response-tokens 1.5: allowed is a whole number above 0"),
    "temperature": ({"temperature": -1}, "temperature -1: allowed is a number of 0 or more"),
    "greedy samples": ({"samples": 2}, "samples 2: needs a temperature above 0"),
    "greedy retries": ({"retries": 1}, "retries 1: needs a temperature above 0"),
    "many samples": ({"samples": 1001, "temperature": 1}, "samples 1001: allowed is a whole number, 1 to 1000"),
    "mode": ({"mode": "all"}, "mode 'all': allowed is single or pair or group"),
    "pairs": ({"mode": "pair", "pairs": "some"}, "pairs 'some': allowed is all or anchor"),
    "pairs of nothing": ({"pairs": "all"}, "pairs all: needs mode: pair"),
    "place of a pair": ({"mode": "pair", "messages": user("{first}")}, "messages: have the place {second} 0 times; "),
    "place of a group": ({"mode": "group", "number": {"json": "a"}}, "messages: have the place {responses} 0 times; "),
    "one number of a group": ({"mode": "group", "messages": user("{responses}")}, "number: allowed is one of json, re"),
    "share": ({"mode": "pair", "messages": user("{first}{second}"), "correct-from": 2},
              "correct-from 2: allowed is a share of wins, 0 to 1"),
    "rule": ({"number": {"json": 1}}, "number: json: allowed is the name of a field"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_wrong_files(case, tmp_path):
    changes, message = WRONG[case]
    assert refusal(read, tmp_path, **changes).startswith(f"--judge-config {tmp_path}/judge.yaml: {message}")


def test_numbers_of_a_pair_are_shares_of_the_win(tmp_path):
    config = read(tmp_path, mode="pair", messages=user("{first}{second}"), range=[-1, 1], number={"last-number": True})
    assert config.numbers("1", 2) == [1, 0] and config.numbers("-0.5", 2) == [0.25, 0.75]
    assert config.numbers("2", 2) is None and config.numbers("none", 2) is None


def test_a_group_needs_a_number_for_each_response(tmp_path):
    config = read(tmp_path, mode="group", messages=user("{responses}"), number={"json": "grades"}, samples=3)
    assert config.numbers('{"grades": [1, 2.5, 10]}', 3) == [1, 2.5, 10] and config.samples == 3  # also if greedy
    for wrong in ("[1, 2]", "[1, 2, 11]", '[1, 2, "3"]', "3", "[]", "[1, 2, null]", "[1, [2], 3]"):
        assert config.numbers(f'{{"grades": {wrong}}}', 3) is None
    config = read(tmp_path, mode="group", messages=user("{responses}"), number={"regex": r"grade ([0-9]+)"})
    assert config.numbers("grade 3, grade 10", 2) == [3, 10] and config.numbers("grade 3", 2) is None


@pytest.mark.parametrize("text, message", [
    ("a: [", "not YAML: "), ("just words", "allowed is a mapping of keys to values"),
    ("range: [1, 2]\nrange: [1, 3]", "range: appears twice"), (None, "cannot be read (No such file or directory)"),
])  # fmt: skip
def test_files_that_are_no_mapping(text, message, tmp_path):
    path = tmp_path / "judge.yaml"
    if text is not None:
        path.write_text(text)
    assert refusal(read_config, str(path)).startswith(f"--judge-config {path}: {message}")


PLACES = {"single": "{response}", "pair": "{first} {second}", "group": "{responses}"}


def config_of(folder: Path, mode: str, **changes) -> JudgeConfig:
    number = {"regex": "[0-9]"} if mode == "group" else {"last-number": True}
    messages = [{"role": "user", "content": PLACES[mode]}]
    return read_config(str(write(folder / "judge.yaml", mode=mode, messages=messages, number=number, **changes)))


GROUPS, IDS = [[0, 1, 2], [3, 4]], [6, 7, 8, 12, 14]


@pytest.mark.parametrize("mode, changes, members", [
    ("single", {}, [(0,), (1,), (2,), (3,), (4,)]),
    ("pair", {}, [(0, 1), (1, 0), (0, 2), (2, 0), (1, 2), (2, 1), (3, 4), (4, 3)]),
    ("pair", {"pairs": "anchor"}, [(0, 1), (1, 0), (0, 2), (2, 0), (3, 4), (4, 3)]),
    ("group", {"samples": 1}, [(0, 1, 2), (3, 4)]),
])  # fmt: skip
def test_questions(mode, changes, members, tmp_path):
    asked = questions_of(config_of(tmp_path, mode, **{"samples": 2, **changes}), IDS, GROUPS)
    assert list(dict.fromkeys(question.members for question in asked)) == members
    assert len({(question.stream, question.sample) for question in asked}) == len(asked)
    # Another replica has the same streams for the same responses.
    other = questions_of(config_of(tmp_path, mode, **{"samples": 2, **changes}), IDS[3:], [[0, 1]])
    moved = [question._replace(members=tuple(i + 3 for i in question.members)) for question in other]
    assert moved and set(moved) <= set(asked)


def test_samples_of_a_group_begin_with_different_responses(tmp_path):
    asked = questions_of(config_of(tmp_path, "group", samples=4), [5, 6, 7], [[0, 1, 2]])
    assert [question.members for question in asked] == [(0, 1, 2), (1, 2, 0), (2, 0, 1), (0, 1, 2)]
    assert [question.sample for question in asked] == [0, 1, 2, 3]


def test_a_response_alone_has_no_pair(tmp_path):
    assert questions_of(config_of(tmp_path, "pair"), [5], [[0]]) == []


def test_orders_agree_if_they_have_the_same_winner():
    pairs = [((0, 1), (1, 0)), ((0, 2), (2, 0)), ((1, 2), (2, 1)), ((3, 4), (4, 3)), ((3, 5), (5, 3))]
    asked = [JudgeQuestion(order, 0, 0) for pair in pairs for order in pair]
    numbers = [[1, 0], [0, 1], [1, 0], [1, 0], [0.5, 0.5], [0.5, 0.5], [0.9, 0.1], [0.4, 0.6], [1, 0], None]
    assert order_agreement(asked, numbers) == (3, 4)  # the second pair: the first response that is read wins
    assert order_agreement([], []) == (0, 0)
