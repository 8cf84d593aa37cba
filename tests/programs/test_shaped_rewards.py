"""Rewards shaped by length and truncation: the rows of a run add up, and every layout scores the same."""

import json
from statistics import fmean

import pytest

from tests.helpers.programs import rl_argv, samples, train

SAMPLES, LIMIT = 4, 3  # responses to a prompt; tokens of a response, which truncate some
FLAGS = (
    f"--advantage grpo --kl-coefficient 0 --lr 1e-4 --samples-per-prompt {SAMPLES} --minibatch-size 24 --ppo-epochs 1"
    f" --train-iters 1 --max-response-length {LIMIT} --reward-ngram 2 --reward-length 2"
    " --reward 0*exact-match+cosine+length+0.5*repetition+0.25*truncated+0.5*adaptive-length"
)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The samples of one rank."""
    save = tmp_path_factory.mktemp("shaped") / "run"
    train("rl", rl_argv(save, FLAGS))
    return samples(save, 1)


def test_the_terms_add_up(alone):
    rows = [json.loads(line) for line in alone.splitlines()]
    for group in [rows[i : i + SAMPLES] for i in range(0, len(rows), SAMPLES)]:
        own = []
        for row in group:
            values = row["reward_values"]
            own.append(values["cosine"] + values["length"] + 0.5 * values["repetition"])
            assert values["truncated"] == pytest.approx(0.0 if row["finished"] else -own[-1])
            assert row["finished"] or values["cosine"] == -1.0
        for row, reward in zip(group, own, strict=True):
            values = row["reward_values"]
            assert values["adaptive-length"] == pytest.approx(-fmean(own) * row["length"] / LIMIT)
            expected = reward + 0.25 * values["truncated"] + 0.5 * values["adaptive-length"]
            assert row["reward"] == pytest.approx(expected)
    found = [row["reward_values"] for row in rows]
    assert all(len({row[name] for row in found}) > 1 for name in ("cosine", "truncated", "adaptive-length"))
