"""Rewards of a mixture's files: each response is scored by the reward of its file alone, in every layout."""

import functools
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers.evaluation import evaluate_argv, run_evaluate
from tests.helpers.forked_programs import refusal
from tests.helpers.judges import judge_flags, write
from tests.helpers.programs import addition, metrics, reward_argv, rl_argv, samples, train, write_lines
from tests.helpers.tiers import by_default

SAMPLES, STEPS = 4, 2
FLAGS = (
    "--advantage grpo --kl-coefficient 0 --lr 1e-4 --prompts-per-step 6 --minibatch-size 24 --ppo-epochs 1"
    f" --samples-per-prompt {SAMPLES} --train-iters {STEPS} --reward-length 1 --reward-pattern 1"
)
PLUG_IN = "tests.programs.test_rewards_by_file:picky"
SETS = {"known": "exact-match", "free": f"0.5*{PLUG_IN}+length", "shaped": "0*regex+cosine+0.5*adaptive-length"}


def picky(sample) -> float:
    """Fails on a prompt that is not of its file, as verifiers do that read metadata."""
    assert sample.metadata["file"] == "free"
    return len(sample.response) / 10


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Three files; the answers of `free` and `shaped` are missing, and only `free` has metadata."""
    folder = tmp_path_factory.mktemp("files")
    rows = {"known": [addition(n, 3) for n in range(9)], "free": [], "shaped": []}
    for name, first in (("free", 30), ("shaped", 40)):
        rows[name] = [{"prompt": addition(first + n, 4)["prompt"]} for n in range(5)]
    rows["free"] = [row | {"metadata": {"file": "free"}} for row in rows["free"]]
    for name, lines in rows.items():
        write_lines(folder / f"{name}.jsonl", lines)
    entry = "{0}:\n  prompts: {1}/{0}.jsonl\n"
    own = [entry.format(n, folder) + (f"  reward: {SETS[n]}\n" if n != "known" else "") for n in SETS]
    (folder / "eval.yaml").write_text("".join(own))
    (folder / "mix.yaml").write_text("".join(text + "  weight: 2\n" for text in own))
    return folder


def file_of(row: dict) -> str:
    first = int(row["prompt"].split("+")[0])
    return "known" if first < 30 else "free" if first < 40 else "shaped"


def rows_of(save: Path, step: int) -> list[dict]:
    return [json.loads(line) for line in samples(save, step).splitlines()]


@pytest.fixture(scope="module")
def alone(folder, tmp_path_factory) -> Path:
    save = tmp_path_factory.mktemp("alone") / "run"
    train("rl", rl_argv(save, f"{FLAGS} --prompts {folder / 'mix.yaml'}"))
    return save


def check(rows: list[dict]):
    """The terms of each row, and what they add up to."""
    for row in rows:
        values, name = row["reward_values"], file_of(row)
        if name == "known":
            assert values == {"exact-match": float(row["correct"])} and row["reward"] == values["exact-match"]
        elif name == "free":
            assert values.keys() == {PLUG_IN, "length"} and values[PLUG_IN] == len(row["response"]) / 10
            assert row["reward"] == pytest.approx(0.5 * values[PLUG_IN] + values["length"])
        else:
            assert values.keys() == {"regex", "cosine", "adaptive-length"}
            assert row["reward"] == pytest.approx(values["cosine"] + 0.5 * values["adaptive-length"])
            assert row["correct"] == (values["regex"] == 1.0) == (row["finished"] and "1" in row["response"])
        assert "failure" not in row
    assert {file_of(row) for row in rows} == set(SETS)


def test_each_response_is_scored_by_its_files_reward(alone):
    for step in range(1, STEPS + 1):
        rows, row = rows_of(alone, step), metrics(alone)[step]
        check(rows)
        for name in ("exact-match", PLUG_IN, "cosine"):
            own = [each["reward_values"][name] for each in rows if name in each["reward_values"]]
            assert len(own) == 8 and row[f"reward/{name}/mean"] == pytest.approx(sum(own) / len(own))
        assert row[f"reward/{PLUG_IN}/failures"] == 0 and row["actor/grad_norm"] > 0


LAYOUTS = {
    "two replicas": (2, ""), "four replicas": (4, ""),
    "more replicas than the actor, in workers": (4, "--role-map actor=0;reward=1-3;rollout=0 --reward-workers 1"),
    "a filter": (2, "--group-filter reward"),
    "TP2 apart": (3, "--role-map actor=0-1;reward=2 --actor-tensor-model-parallel-size 2"),
}  # fmt: skip


@pytest.mark.parametrize("layout", by_default(LAYOUTS, ["two replicas"]))
def test_every_layout_scores_the_same(layout, alone, folder, tmp_path):
    size, flags = LAYOUTS[layout]
    train("rl", rl_argv(tmp_path, f"{FLAGS} --prompts {folder / 'mix.yaml'} {flags}"), size)
    names = ("sequence", "response", "reward", "reward_values", "correct")
    found = [[{name: row[name] for name in names} for row in rows_of(run, 1)] for run in (tmp_path, alone)]
    assert found[0] == found[1]


@pytest.mark.parametrize("size", by_default([1, 2], [1]))
def test_evaluations_read_the_rewards_of_files_too(size, folder, tmp_path):
    flags = f"--evals all={folder / 'eval.yaml'} known={folder / 'known.jsonl'} --reward-length 1 --reward-pattern 1"
    command = evaluate_argv(tmp_path, flags)
    place = command.index("--eval-prompts")
    del command[place : place + 2]
    run_evaluate(command, size)
    rows = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    check([row for row in rows if row["eval"] == "all"])
    found = json.loads((tmp_path / "evaluation.json").read_text())["metrics"]
    own = [row["reward_values"]["length"] for row in rows if "length" in row["reward_values"]]
    assert len(own) == 5 and found["eval/all/reward/length"] == pytest.approx(sum(own) / 5)
    of_known = [row for row in rows if file_of(row) == "known"]
    known = [[row["correct"] for row in of_known if row["eval"] == name] for name in ("all", "known")]
    assert known[0] == known[1] and found["eval/known/accuracy"] == pytest.approx(sum(known[1]) / 9)


@pytest.mark.long
@pytest.mark.parametrize("size", [1, 2])
def test_a_reward_model_scores_the_lines_of_its_file_alone(size, folder, tmp_path):
    train("reward", reward_argv(tmp_path / "reward", "--train-iters 2"))
    text = (folder / "mix.yaml").read_text().replace(SETS["free"], "model")
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
def judged(folder, tmp_path_factory) -> Callable[[str, int, str], Path]:
    """(name, ranks, flags) -> folder of a run in which a judge reads the responses to two of three files."""
    base = tmp_path_factory.mktemp("judged")
    text = (folder / "mix.yaml").read_text().replace(SETS["free"], "judge").replace(SETS["shaped"], "0.5*judge+length")
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


REFUSALS = {
    "reward: no-such": "known: reward no-such: no-such is unknown; allowed: model",
    "reward: none": "known: reward none: allowed are terms of --reward",
    "reward: cosine": "known: reward cosine: cosine needs a term that says which responses are correct",
    "reward: code": "known.jsonl:1: --reward code",
    "reward: [1]": "known: reward: must be a text",
}  # fmt: skip


@pytest.mark.parametrize("key", REFUSALS)
def test_wrong_rewards_of_files_are_refused(key, folder, tmp_path):
    (tmp_path / "mix.yaml").write_text(f"known:\n  prompts: {folder / 'known.jsonl'}\n  {key}\n")
    assert REFUSALS[key] in refusal(rl_argv(tmp_path / "run", f"--prompts {tmp_path / 'mix.yaml'}"))


def test_rewards_of_files_and_of_turns_have_one_weight(folder, tmp_path):
    flags = f"{FLAGS} --environment tests.helpers.sum_environments:Sums --prompts {folder / 'mix.yaml'}"
    assert "needs the term environment as often as --reward has it" in refusal(rl_argv(tmp_path / "run", flags))


def test_an_estimator_that_compares_parts_needs_one_reward(folder, tmp_path):
    flags = f"{FLAGS} --prompts {folder / 'mix.yaml'} --advantage gdpo --reward exact-match+length --kl-coefficient 0"
    assert "--advantage gdpo: compares the terms of one --reward" in refusal(rl_argv(tmp_path / "run", flags))
