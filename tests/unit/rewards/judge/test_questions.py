"""Which responses are judged together, in which order, and what the agreement of both orders counts."""

from pathlib import Path

import pytest

from megarl.rewards.judge.config import JudgeConfig, read_config
from megarl.rewards.judge.questions import JudgeQuestion, order_agreement, questions_of
from tests.helpers.envs.judges import write

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
