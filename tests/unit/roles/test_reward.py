"""Scores of episodes: what verifiers see of turns, the environment's rewards and verdicts, rows, failed episodes."""

import functools
import json
from collections.abc import Callable
from pathlib import Path

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
from tests.helpers.envs.judges import judge_flags, write
from tests.helpers.evaluation import evaluate_argv, run_evaluate
from tests.helpers.models.role_stubs import LocalStepBatch
from tests.helpers.programs import inputs, metrics, program, reward_argv, rl_argv, rows_of, timeless, train
from tests.helpers.tiers import by_default
from tests.helpers.worlds import SAFETY, run_world
from tests.laws.files import named
from tests.laws.plug_ins import REWARDS, check_terms, file_of

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
    reward = Reward(parsed.settings, parsed.rewards, place, tokenizer.decode, verifiers, None, Timers())
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


# -- rewards of a mixture's files ----------------------------------------------------------------------------------


SAMPLES, STEPS = 4, 2
FLAGS = (
    "--advantage grpo --kl-coefficient 0 --lr 1e-4 --prompts-per-step 6 --minibatch-size 24 --ppo-epochs 1"
    f" --samples-per-prompt {SAMPLES} --train-iters {STEPS} --reward-length 1 --reward-pattern 1"
)


@pytest.fixture(scope="module")
def mixture() -> Path:
    """Three files, of which two have rewards of their own."""
    return Path(named("{rewards}"))


@pytest.mark.parametrize("size", by_default([1, 2], [1]))
def test_evaluations_read_the_rewards_of_files_too(size, mixture, tmp_path):
    (tmp_path / "eval.yaml").write_text(mixture.read_text().replace("  weight: 2\n", ""))
    known = mixture.with_name("known.jsonl")
    flags = f"--evals all={tmp_path / 'eval.yaml'} known={known} --reward-length 1 --reward-pattern 1"
    command = evaluate_argv(tmp_path, flags)
    place = command.index("--eval-prompts")
    del command[place : place + 2]
    run_evaluate(command, size)
    rows = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    check_terms([row for row in rows if row["eval"] == "all"])
    found = json.loads((tmp_path / "evaluation.json").read_text())["metrics"]
    own = [row["reward_values"]["length"] for row in rows if "length" in row["reward_values"]]
    assert len(own) == 5 and found["eval/all/reward/length"] == pytest.approx(sum(own) / 5)
    of_known = [row for row in rows if file_of(row) == "known"]
    known = [[row["correct"] for row in of_known if row["eval"] == name] for name in ("all", "known")]
    assert known[0] == known[1] and found["eval/known/accuracy"] == pytest.approx(sum(known[1]) / 9)


@pytest.mark.long
@pytest.mark.parametrize("size", [1, 2])
def test_a_reward_model_scores_the_lines_of_its_file_alone(size, mixture, tmp_path):
    train("reward", reward_argv(tmp_path / "reward", "--train-iters 2"))
    text = mixture.read_text().replace(REWARDS["free"], "model")
    (tmp_path / "mix.yaml").write_text(text)
    flags = f"{FLAGS} --prompts {tmp_path / 'mix.yaml'} --reward-model {tmp_path / 'reward'} --reward-normalize"
    train("rl", rl_argv(tmp_path / "run", flags), size)
    for step in range(1, STEPS + 1):
        for row in rows_of(tmp_path / "run", step):
            assert ("model" in row["reward_values"]) == (file_of(row) == "free")
        own = [row["reward_values"].get("model") for row in rows_of(tmp_path / "run", step)]
        values = [value for value in own if value is not None]
        assert metrics(tmp_path / "run")[step]["reward/model/mean"] == pytest.approx(sum(values) / len(values))


@pytest.fixture(scope="module")
def judged(mixture, tmp_path_factory) -> Callable[[str, int, str], Path]:
    """(name, ranks, flags) -> folder of a run in which a judge reads the responses to two of three files."""
    base = tmp_path_factory.mktemp("judged")
    text = mixture.read_text().replace(REWARDS["free"], "judge").replace(REWARDS["shaped"], "0.5*judge+length")
    (base / "mix.yaml").write_text(text)
    flags = f"{FLAGS} --prompts {base / 'mix.yaml'} --reward-failure fallback --reward-max-failures 1"
    config = write(base / "judge.yaml", messages=[{"role": "user", "content": "{question}{response}="}])

    @functools.cache
    def run(name: str, size: int, more: str) -> Path:
        train("rl", rl_argv(base / name, judge_flags(config, f"{flags} {more}", "exact-match")), size)
        return base / name

    return run


JUDGED = {
    "two replicas": (2, ""), "as they end": (2, "--role-map actor=0;rollout=0;reward=1"),
    "as they end, a filter": (2, "--role-map actor=0;rollout=0;reward=1 --group-filter reward"),
}  # fmt: skip


@pytest.mark.parametrize("layout", by_default(JUDGED, ["as they end"]))
def test_a_judge_reads_the_lines_of_its_files_alone(layout, judged):
    """Also while the rollout generates, each response once."""
    runs = [judged("alone", 1, ""), judged(layout, *JUDGED[layout])]
    names = ("sequence", "response", "reward", "reward_values", "correct", "judgements")
    found = [[{name: row.get(name) for name in names} for row in rows_of(run, 1)] for run in runs]
    assert found[0] == found[1]
    for row in rows_of(runs[0], 1):
        assert ("judge" in row["reward_values"]) == ("judgements" in row) == (file_of(row) != "known")
        judge = row["reward_values"].get("judge")
        expected = {"known": float(row["correct"]), "free": judge}.get(file_of(row))
        assert row["reward"] == (0.5 * judge + row["reward_values"]["length"] if expected is None else expected)
    assert any(row.get("judgements") for row in rows_of(runs[0], 1))
    assert metrics(runs[0])[1]["judge/tokens"] == metrics(runs[1])[1]["judge/tokens"] > 0
