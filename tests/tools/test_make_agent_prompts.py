"""tools/make_agent_prompts.py: lines that the environments accept, disjoint files, the same bytes for the same seed."""

import json
import re

import pytest

from megarl.data.prompts import load_prompts
from megarl.environments.adapters.gymnasium_env import FrozenLake
from megarl.environments.built_in import GuessNumber
from megarl.environments.protocol import Task
from tests.references.value_iteration import optimal_values
from tools import make_agent_prompts
from tools._careless_players import PLAYERS

DISCOUNT = 0.9


def made(folder, task, *options, train=40, heldout=10):
    arguments = ["--task", task, "--train", str(train), "--heldout", str(heldout), "--out", str(folder), *options]
    assert make_agent_prompts.main(arguments) == 0
    files = [[json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
             for name in ("train", "heldout")]  # fmt: skip
    assert [len(lines) for lines in files] == [train, heldout]
    assert [len(load_prompts(str(folder / f"{name}.jsonl"))) for name in ("train", "heldout")] == [train, heldout]
    return files


def test_numbers_to_guess(tmp_path):
    train, heldout = made(tmp_path, "guess-number")
    for line in train + heldout:
        assert line["prompt"] == "Guess my number from 1 to 15." and "environment" not in line
        GuessNumber().reset(Task([], metadata=line["metadata"]))
    assert len({line["metadata"]["question_id"] for line in train + heldout}) == 50
    line = made(tmp_path, "guess-number", "--low", "5", "--high", "9", "--guesses", "2", "--prompt", "go")[0][0]
    fields = {name: line["metadata"][name] for name in ("low", "high", "guesses")}
    assert (line["prompt"], fields) == ("go", {"low": 5, "high": 9, "guesses": 2})


@pytest.mark.parametrize("task", sorted(PLAYERS))
def test_careless_players_write_turns_that_their_environment_reads(tmp_path, task):
    made(tmp_path, task, "--conversations", "60")
    talks = [json.loads(line)["messages"] for line in (tmp_path / "conversations.jsonl").read_text().splitlines()]
    assert len(talks) == 60
    for messages in talks:
        roles = [message["role"] for message in messages]
        assert roles[0] == "user" and roles[-1] == "assistant" and set(roles) <= {"user", "assistant", "tool"}
    if task == "products":
        right = [
            talk[1]["content"].count(talk[0]["content"].split("is ")[1].rstrip("?").replace(" ", "")) for talk in talks
        ]
        assert 0 < sum(right) < 60  # some have other factors
        assert all(talk[-1]["content"] == talk[-2]["content"] for talk in talks)
    else:
        assert len({message["content"] for talk in talks for message in talk if message["role"] == "assistant"}) > 3


def test_products(tmp_path):
    train, heldout = made(tmp_path, "products", train=3000, heldout=300)
    pairs = []
    for lines in (train, heldout):
        factors = [tuple(map(int, re.findall(r"\d+", line["prompt"]))) for line in lines]
        assert all(100 <= min(pair) and max(pair) <= 999 for pair in factors)
        assert all(int(line["answer"]) == a * b for line, (a, b) in zip(lines, factors, strict=True))
        pairs.append({tuple(sorted(pair)) for pair in factors})
    assert not pairs[0] & pairs[1] and sum(map(len, pairs)) == 3300
    assert made(tmp_path, "products", "--prompt", "{}=")[0][0]["prompt"].count("*") == 1


def test_maps_have_the_shortest_way_of_value_iteration(tmp_path):
    train, heldout = made(tmp_path, "frozen-lake")
    maps = [tuple(line["metadata"]["map"]) for line in train + heldout]
    assert len(set(maps)) == 50
    for line in train + heldout:
        environment = FrozenLake()
        environment.reset(Task([], metadata=line["metadata"]))
        start = optimal_values(environment.env, DISCOUNT)[0][0]
        assert start == pytest.approx(DISCOUNT ** (line["metadata"]["shortest"] - 1), abs=1e-12)
        assert " ".join(line["metadata"]["map"]) in line["prompt"]
    standard = made(tmp_path, "frozen-lake", "--standard-map")
    assert {tuple(line["metadata"]["map"]) for lines in standard for line in lines} == {
        ("SFFF", "FHFH", "FFFH", "HFFG")
    }


def test_ways_around_holes():
    assert make_agent_prompts.shortest_way(["SFFF", "HHHF", "FFFF", "GHHH"]) == 9
    assert make_agent_prompts.shortest_way(["SH", "HG"]) is None
    assert make_agent_prompts.shortest_way(["SF", "HG"]) == 2


@pytest.mark.parametrize("task", ["guess-number", "products", "frozen-lake"])
def test_the_seed_chooses(tmp_path, task):
    first, second = (made(tmp_path / name, task) for name in "ab")
    assert first == second != made(tmp_path / "c", task, "--seed", "2")
    assert (tmp_path / "a" / "prompts.json").read_bytes() == (tmp_path / "b" / "prompts.json").read_bytes()


def test_wrong_use_is_one_line(tmp_path, refusal):
    (tmp_path / "file").write_text("")
    usual = ["--task", "frozen-lake", "--train", "5", "--heldout", "5", "--out", str(tmp_path / "x")]
    for arguments, message in [
        ([*usual, "--seed", "-1"], "--seed -1: must be at least 0"),
        ([*usual, "--train", "0"], "--train 0: must be at least 1"),
        ([*usual, "--low", "9", "--high", "8"], "--high 8: must be at least --low 9"),
        ([*usual, "--task", "chess"], "chess"),
        ([*usual, "--task", "products", "--train", "500000"], "there are 405450 products"),
        ([*usual, "--out", str(tmp_path / "file")], f"--out {tmp_path}/file: cannot be written"),
        ([], "required: --task"),
    ]:
        assert message in refusal(make_agent_prompts.main, arguments)
    assert not (tmp_path / "x").exists()
