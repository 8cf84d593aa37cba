"""Rewards of TRL, verl and OpenRLHF, called as these do, with the columns of published tables."""

import asyncio
import json

import pyarrow
import pyarrow.parquet
import pytest

from megarl.data.columns import Columns
from megarl.data.prompts import load_prompts
from megarl.rewards import of_openrlhf, of_trl, of_verl
from megarl.rewards.base import Sample, Verifier
from megarl.rewards.chosen_verifiers import check_signature
from megarl.roles.scored import sample_of

MESSAGES = [{"role": "user", "content": "q"}]


def sample_of_row(tmp_path, row: dict, response: str, kind: str, **columns) -> Sample:
    """The sample of a row of a table, as the reward role makes it."""
    path = tmp_path / f"rows.{kind}"
    if kind == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), path)
    else:
        path.write_text(json.dumps(row) + "\n")
    prompt = load_prompts(str(path), columns=Columns(**columns))[0]
    return sample_of(prompt, [{"text": response, "observation": "", "reward": 0.0}], True, 3)


def seen_by_trl(sample: Sample, **options) -> dict:
    found: dict = {}

    def reward(completions, **columns):
        found.update(columns, completions=completions)
        return [1.0]

    assert of_trl(reward, **options)(sample) == [1.0]
    return found


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize("row, named", [
    ({"prompt": "q", "answer": "7", "level": 3}, {"prompt": "prompt"}),  # trl-lib's and GSM8K's names
    ({"prompt": MESSAGES, "solution": "7", "source": "aime"}, {}),  # DeepMath, NuminaMath
    ({"question": "q", "ground_truth": "7"}, {}),
    ({"text": "q", "target": "7", "id": "a"}, {"prompt": "text", "answer": "target"}),
    ({"prompt": "q", "answer": "7", "task": "sums"}, {}),
])  # fmt: skip
def test_a_reward_of_trl_gets_every_column_by_its_own_name(row, named, kind, tmp_path):
    found = seen_by_trl(sample_of_row(tmp_path, row, "7", kind, **named))
    in_messages = isinstance(row.get("prompt"), list)
    completion = [{"role": "assistant", "content": "7"}] if in_messages else "7"
    prompt = row.get("prompt", "q") if "prompt" in row else "q"
    others = {name: [value] for name, value in row.items() if name != "prompt"}
    assert {name: value for name, value in found.items() if name != "prompts"} == {
        **others,
        "completions": [completion],
    }
    assert found["prompts"] == [prompt]


def test_lines_in_megarls_own_fields_give_their_metadata(tmp_path):
    own = {"prompt": "q", "answer": "7", "metadata": {"level": 3}}
    found = seen_by_trl(sample_of_row(tmp_path, own, "7", "jsonl"), messages=True)
    assert (found["answer"], found["level"]) == (["7"], [3])
    assert (found["prompts"], found["completions"]) == ([MESSAGES], [[{"role": "assistant", "content": "7"}]])


def published(completions, answer, **kw):
    """The commonest form of a reward of TRL."""
    return [float(text == truth) for text, truth in zip(completions, answer, strict=True)]


async def judged(prompts, completions, answer, **kw):
    """An async one, which skips some samples."""
    await asyncio.sleep(0)
    return [None if truth == "?" else float(text == truth) for text, truth in zip(completions, answer, strict=True)]


def narrow(completions):
    """One without **kwargs."""
    return [float(len(completions[0]))]


def compute_score(solution_str, ground_truth, method="strict"):
    """As of verl's reward_score/gsm8k.py, without data_source."""
    return {"score": float(solution_str in ground_truth), "acc": solution_str in ground_truth, "pred": solution_str}


def matched(data_source, solution_str, ground_truth, extra_info=None):
    """As verl's prime_math: a tuple that begins with the score."""
    return data_source == "math", True, solution_str


VERL = {
    "data_source": "math", "prompt": MESSAGES, "reward_model": {"style": "rule", "ground_truth": ["7", "8"]},
    "extra_info": {"index": 0},
}  # fmt: skip
TRL = {"prompt": "q", "answer": "7"}


@pytest.mark.parametrize("reward, row, response, expected", [
    (of_trl(published), TRL, "7", 1.0), (of_trl(published), TRL, "8", 0.0), (of_trl(narrow), TRL, "123", 3.0),
    (of_trl(judged), TRL, "7", 1.0), (of_trl(judged), {**TRL, "answer": "?"}, "7", None),
    (of_verl(compute_score), VERL, "8", 1.0), (of_verl(compute_score), VERL, "9", 0.0),
    (of_verl(matched), VERL, "", 1.0),
    (of_openrlhf(lambda queries, prompts, labels: [queries[0] == "q7" and labels == ["7"]]), TRL, "7", 1.0),
])  # fmt: skip
def test_published_rewards_are_read(reward, row, response, expected, tmp_path):
    check_signature("m:f", reward)
    (score,) = Verifier("m:f", reward, 1.0).outcomes([sample_of_row(tmp_path, row, response, "jsonl")])
    assert (None if score.abstains else score.reward) == expected


def test_what_only_trls_trainer_has_is_said():
    with pytest.raises(TypeError, match="needs completion_ids cannot be called"):
        of_trl(lambda completion_ids, **kwargs: [0.0])


def test_trls_own_rewards(tmp_path):
    """Where TRL is installed: `pip install --no-deps trl` is enough."""
    rewards = pytest.importorskip("trl.rewards")
    sample = sample_of_row(tmp_path, {"prompt": "q", "solution": r"$\frac{1}{2}$"}, r"\boxed{0.5}", "jsonl")
    unread = sample_of_row(tmp_path, {"prompt": "q", "solution": "no formula"}, r"\boxed{0.5}", "jsonl")
    verifier = Verifier("trl", of_trl(rewards.accuracy_reward, messages=True))
    right, skipped = verifier.outcomes([sample, unread])
    assert right.reward == 1.0 and skipped.abstains
    (score,) = Verifier("trl", of_trl(rewards.think_format_reward, messages=True)).outcomes([sample])
    assert score.reward == 0.0
    with pytest.raises(TypeError, match="needs completion_ids"):
        of_trl(rewards.get_repetition_penalty_reward())
