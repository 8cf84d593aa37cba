"""Scores of episodes: what verifiers see of turns, the environment's rewards and verdicts, rows, failed episodes."""

import pytest
import torch

from megarl.batch import Batch
from megarl.data.prompts import load_prompts
from megarl.data.tokenizers import build_tokenizer
from megarl.groups import PromptGroups
from megarl.observe.timers import Timers
from megarl.rewards.base import Score
from megarl.rewards.chosen_verifiers import build_verifiers
from megarl.roles.reward import Reward
from megarl.rollout import round_scores
from tests.helpers.models.role_stubs import LocalStepBatch
from tests.helpers.programs import inputs, program, rl_argv, timeless
from tests.helpers.worlds import SAFETY, run_world

# Prompt, then (text of a turn, its reward, the observation after it), verdict of the environment.
EPISODES = [
    ("1+2=", [("4", -0.25, "+1="), ("3", 0.5, "")], True),
    ("1+2=", [("3", 0.1, "3="), ("7", 0.2, "")], False),  # the observation has the answer, the last turn has not
    ("1+2=", [], False),  # failed
    ("1+2=", [("3", 1.0, "")], True),
]
PLUG_IN = "tests.unit.roles.test_reward:counting"


def counting(sample) -> Score:
    """1 for an episode whose turns are those expected of the prompt file."""
    found = [(turn["text"], turn["reward"], turn["observation"]) for turn in sample.turns]
    expected = [turns for _, turns, _ in EPISODES if turns and turns[0][0] == sample.turns[0]["text"]]
    close = any(
        [(text, pytest.approx(reward), said) for text, reward, said in turns] == found for turns in expected
    )  # fmt: skip
    return Score(float(close), close)


def tokenized(tokenizer) -> Batch:
    """The episodes as a batch; each turn ends with the end token."""
    tokens, mask, rewards, lengths, prompts = [], [], [], [], []
    for prompt, turns, _ in EPISODES:
        row = tokenizer.encode(prompt)
        prompts.append(len(row))
        flags, earned = [False] * len(row), [0.0] * len(row)
        for text, reward, said in turns:
            written, observed = [*tokenizer.encode(text), tokenizer.eos_id], tokenizer.encode(said) if said else []
            row = row + written + observed
            flags += [True] * len(written) + [False] * len(observed)
            earned += [0.0] * (len(written) - 1) + [reward] + [0.0] * len(observed)
        tokens, mask, rewards, lengths = tokens + row, mask + flags, rewards + earned, [*lengths, len(row)]
    done = torch.tensor([bool(turns) for _, turns, _ in EPISODES])
    return Batch(
        sequence_ids=torch.arange(len(EPISODES)), prompt_ids=torch.zeros(len(EPISODES)).long(),
        prompt_lengths=torch.tensor(prompts), lengths=torch.tensor(lengths), tokens=torch.tensor(tokens),
        response_mask=torch.tensor(mask), turn_rewards=torch.tensor(rewards), finished=done,
        solved=torch.tensor([solved for *_, solved in EPISODES]),
    )  # fmt: skip


def scored(rank: int, parsed) -> tuple[Batch, list[dict], dict]:
    from megarl.comm import role_mesh

    place = role_mesh.create_mesh(parsed.roles, SAFETY)["reward"]
    tokenizer = build_tokenizer("SentencePieceTokenizer", parsed.settings.tokenizer_model)
    verifiers = build_verifiers(parsed.settings)
    reward = Reward(parsed.settings, parsed.rewards, place, tokenizer, verifiers, None, Timers())
    batch = tokenized(tokenizer)
    if len(place.replicas) > 1:  # the failed episode is all that the second replica has
        batch = batch.select((batch.lengths - batch.prompt_lengths == 0).eq(place.dp_rank == 1).nonzero().flatten())
    held = LocalStepBatch(reward=batch)
    held.prompts, held.groups = load_prompts(str(inputs() / "sums.jsonl")), PromptGroups([len(EPISODES)])
    reward.score(held)
    return batch, held.rows, reward.metrics


def score(folder, flags: str, size: int = 1) -> list:
    (inputs() / "sums.jsonl").write_text('{"prompt": "1+2=", "answer": "3"}\n')
    return run_world(scored, size, program("rl", rl_argv(folder, f"--environment x:y {flags}"), size))


def test_the_environment_rewards_and_decides(tmp_path):
    ((batch, rows, metrics),) = score(tmp_path, "")
    sums = [-0.25 + 0.5, float(torch.tensor(0.1)) + float(torch.tensor(0.2)), 0.0, 1.0]
    assert batch.scores.tolist() == torch.tensor(sums, dtype=torch.float64).float().tolist()
    assert batch.correct.tolist() == [True, False, False, True]
    assert [row["reward"] for row in rows] == sums
    assert metrics["reward/environment/mean"] == pytest.approx(sum(sums) / 3)
    assert "reward/environment/failures" not in metrics


def test_verifiers_see_the_last_turn_and_all_turns(tmp_path):
    ((batch, rows, metrics),) = score(tmp_path, f"--reward exact-match+0*{PLUG_IN}+0.5*environment")
    assert [row["reward_values"].get("exact-match") for row in rows] == [1.0, 0.0, None, 1.0]
    assert [row["reward_values"].get(PLUG_IN) for row in rows] == [1.0, 1.0, None, 1.0]
    assert batch.scores.tolist() == pytest.approx([1.125, 0.15, 0.0, 1.5])
    assert batch.correct.tolist() == [True, False, False, True]
    assert metrics["reward/exact-match/mean"] == pytest.approx(2 / 3)


def test_without_the_term_a_verifier_decides(tmp_path):
    ((batch, _, metrics),) = score(tmp_path, "--reward exact-match")
    assert batch.scores.tolist() == [1.0, 0.0, 0.0, 1.0] and not any("environment" in name for name in metrics)


def test_the_overlong_penalty_counts_turns_and_observations(tmp_path):
    ((batch, rows, _),) = score(tmp_path, "--max-response-length 8 --overlong-buffer 4 --overlong-penalty 2")
    assert (batch.lengths - batch.prompt_lengths).tolist() == [7, 6, 0, 2] and batch.response_lengths[0] == 4
    assert [row["reward_parts"].get("overlong") for row in rows] == [-1.5, -1.0, None, 0.0]
    assert batch.scores.tolist() == pytest.approx([0.25 - 1.5, 0.3 - 1.0, 0.0, 1.0])


def test_rows_have_turns(tmp_path):
    ((_, rows, _),) = score(tmp_path, "")
    assert [row["sequence"] for row in rows] == [0, 1, 2, 3]
    assert rows[0]["turns"] == [
        {"text": "4", "observation": "+1=", "reward": -0.25}, {"text": "3", "observation": "", "reward": 0.5},
    ]  # fmt: skip
    assert rows[0]["response"] == "4+1=3" and rows[0]["length"] == 4
    assert [row.get("failed", False) for row in rows] == [False, False, True, False]
    assert (rows[2]["response"], rows[2]["turns"], rows[2]["reward"]) == ("", [], 0.0)


def test_a_replica_may_have_only_failed_episodes(tmp_path):
    ((_, alone, metrics),) = score(tmp_path, "--reward exact-match+environment")
    results = score(tmp_path, "--reward exact-match+environment", 2)
    assert [row["sequence"] for row in results[1][1]] == [2]
    assert sorted((row for _, rows, _ in results for row in rows), key=lambda row: row["sequence"]) == alone
    for _, _, found in results:
        assert timeless(found) == pytest.approx(timeless(metrics))


def test_the_group_filter_ignores_failed_episodes():
    values = torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 0.0], [0.5, 0.5, 0.5]])
    valid = torch.tensor([[1, 1, 0], [1, 1, 0], [0, 1, 0], [0, 0, 0], [1, 1, 1]]).bool()
    assert round_scores.differ(values, valid).tolist() == [False, True, False, False, False]
    assert round_scores.differ(values, torch.ones_like(valid)).tolist() == [True, True, True, False, False]
