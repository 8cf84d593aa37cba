"""Rewards of a mixture's files in evaluations, by reward models and judges; those of other runs are in tests/laws."""

import functools
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers.envs.judges import judge_flags, write
from tests.helpers.evaluation import evaluate_argv, run_evaluate
from tests.helpers.programs import metrics, reward_argv, rl_argv, samples, train
from tests.helpers.tiers import by_default
from tests.laws.files import named
from tests.laws.plug_ins import REWARDS, check_terms, file_of

SAMPLES, STEPS = 4, 2
FLAGS = (
    "--advantage grpo --kl-coefficient 0 --lr 1e-4 --prompts-per-step 6 --minibatch-size 24 --ppo-epochs 1"
    f" --samples-per-prompt {SAMPLES} --train-iters {STEPS} --reward-length 1 --reward-pattern 1"
)


@pytest.fixture(scope="module")
def mixture() -> Path:
    """Three files, of which two have rewards of their own."""
    return Path(named("{rewards}"))


def rows_of(save: Path, step: int) -> list[dict]:
    return [json.loads(line) for line in samples(save, step).splitlines()]


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
