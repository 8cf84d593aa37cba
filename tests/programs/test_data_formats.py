"""Prompts in Parquet, the filter of long prompts and masked responses in whole runs: numbers, files, resume, errors."""

import functools
import json
from pathlib import Path

import pytest
import yaml

from megarl.checkpoint import folders
from megarl.data.prompts import load_prompts
from tests.helpers.evaluation import evaluate_argv, run_evaluate
from tests.helpers.models.lora_models import stored_tensors
from tests.helpers.programs import (
    GRADED,
    PLACED,
    assert_close,
    in_world,
    inputs,
    metrics,
    preferences,
    program,
    reward_argv,
    rl_argv,
    rows_of,
    samples,
    sft_argv,
    timeless,
    train,
    write_lines,
)
from tests.helpers.texts.prompt_tables import write_parquet
from tests.helpers.texts.refusals import refusal
from tests.helpers.worlds import run_world


@functools.cache
def train_rows() -> list[dict]:
    """The rows of the small programs' prompts."""
    return [json.loads(line) for line in (inputs() / "train.jsonl").read_text().splitlines()]


LONG = {"prompt": "1+1+1+1+1+1=", "answer": "6"}


def verl(rows: list[dict]) -> list[dict]:
    """Rows as verl's scripts write them."""
    return [
        {"data_source": "sums", "prompt": row["prompt"], "extra_info": {"index": i},
         "reward_model": {"style": "rule", "ground_truth": row["answer"]}}
        for i, row in enumerate(rows)
    ]  # fmt: skip


@pytest.fixture(scope="module")
def plain_run(folder) -> Path:
    """Two steps on the JSON file."""
    train("rl", rl_argv(folder / "plain", "--train-iters 2 --save-interval 1 --lr-decay-iters 3"))
    return folder / "plain"


def test_a_run_on_parquet_is_the_run_on_json(plain_run, folder, capfd):
    path = write_parquet(folder / "train.parquet", verl(train_rows()))
    (printed,) = train("rl", rl_argv(folder / "parquet", f"--train-iters 2 --lr-decay-iters 3 --prompts {path}"))
    note = (f"--prompts {path}: {len(train_rows())} rows; prompt from prompt, answer from reward_model.ground_truth,"
            " task from data_source, metadata from data_source, extra_info, reward_model")  # fmt: skip
    assert printed.count(f"megarl: {note}\n") == 1
    assert yaml.safe_load((folder / "parquet" / "settings.yaml").read_text())["data"] == [note]
    assert "data" not in yaml.safe_load((plain_run / "settings.yaml").read_text())
    for step in (1, 2):
        assert timeless(metrics(folder / "parquet")[step]) == timeless(metrics(plain_run)[step])
        assert samples(folder / "parquet", step) == samples(plain_run, step)


@pytest.fixture(scope="module")
def filtered_run(folder) -> Path:
    """Two steps on the same prompts and, between them, prompts that the filter drops; on two ranks."""
    path = write_lines(folder / "long.jsonl", [LONG, *train_rows()[:100], LONG, LONG, *train_rows()[100:]])
    flags = f"--train-iters 2 --save-interval 1 --lr-decay-iters 3 --prompts {path} --eval-prompts {path}"
    (printed, other) = train("rl", rl_argv(folder / "filtered", f"{flags} --filter-long-prompts --eval-samples 8"), 2)
    count = len(train_rows()) + 3
    for flag in ("--prompts", "--eval-prompts"):
        assert f"megarl: {flag} {path}: dropped 3 of {count} prompts longer than 6 tokens\n" in printed
    assert "dropped" not in other
    return folder / "filtered"


def test_a_filtered_run_is_the_run_on_the_rest(filtered_run, plain_run):
    found, expected = metrics(filtered_run), metrics(plain_run)
    for step in (1, 2):
        assert_close(found[step], expected[step], PLACED, 2e-4)
    assert samples(filtered_run, 1) == samples(plain_run, 1)
    assert 0 <= found[0]["eval/accuracy"] <= 1


def refused(rank: int, parsed) -> str:
    return refusal(in_world, rank, "rl", parsed)


@pytest.mark.long
def test_a_filtered_run_resumes_with_the_same_prompts_only(filtered_run, folder):
    path, save = folder / "long.jsonl", folder / "on"
    flags = f"--train-iters 3 --load {folders.step_folder(filtered_run, 1)} --eval-prompts {path} --filter-long-prompts"
    train("rl", rl_argv(save, f"{flags} --prompts {path} --eval-samples 8"))
    assert_close(metrics(save)[2], metrics(filtered_run)[2], PLACED, 2e-4)
    assert samples(save, 2) == samples(filtered_run, 2)
    # Another limit drops others: these are other prompts. The file's own bytes have not changed.
    parsed = program("rl", rl_argv(folder / "no", f"{flags} --prompts {path} --max-prompt-length 4"), 1)
    (message,) = run_world(refused, 1, parsed)
    assert message.startswith(f"--eval-prompts {path}: has other content than the checkpoint of --load")


@pytest.mark.parametrize("name, unit, longer", [("sft", "examples", "6 + 4"), ("reward", "pairs", "10")])
def test_supervised_programs_drop_what_is_too_long(name, unit, longer, folder):
    """Their examples, held-out ones, notes and fingerprints are those of the lines that are left."""
    from megarl.trainers.preference_trainer import RewardModelTrainer
    from megarl.trainers.sft_trainer import SFTTrainer
    from megarl.trainers.supervised_trainer import SupervisedInputs

    argv, trainer = {"sft": (sft_argv, SFTTrainer), "reward": (reward_argv, RewardModelTrainer)}[name]
    own = inputs() / "train.jsonl" if name == "sft" else preferences() / "preferences.jsonl"
    rows = [json.loads(line) for line in own.read_text().splitlines()[:20]]
    pair = {"prompt": LONG["prompt"], "chosen": "6", "rejected": "5"}
    path = write_lines(folder / f"long-{name}.jsonl", [LONG if name == "sft" else pair, *rows])
    flags = f"--prompts {path} --eval-prompts {path} --max-prompt-length 6 --max-response-length 4"
    found = [
        SupervisedInputs(program(name, argv(folder / "no", f"{flags} {more}"), 1), trainer)
        for more in ("--filter-long-prompts", f"--prompts {own} --filter-long-prompts")
    ]
    filtered, whole = found
    assert list(filtered.examples) == list(filtered.held_out) == list(whole.examples)[:20]
    for flag, prompts in zip(("--prompts", "--eval-prompts"), filtered.prompt_sets.values(), strict=True):
        assert prompts.notes == (f"{flag} {path}: dropped 1 of 21 {unit} longer than {longer} tokens",)
    assert (
        filtered.data["prompts"]["sha256"]
        == filtered.prompt_sets["prompts"].sha256()
        != load_prompts(str(path)).sha256()
    )


def test_evaluation_reads_the_same_formats(folder, tmp_path):
    rows = [json.loads(line) for line in (inputs() / "heldout.jsonl").read_text().splitlines()]
    path = write_parquet(folder / "held.parquet", [{"q": row["prompt"], "a": int(row["answer"])} for row in rows])
    run_evaluate(evaluate_argv(tmp_path / "json", "", inputs() / "heldout.jsonl"), 1)
    run_evaluate(evaluate_argv(tmp_path / "table", "--prompt-column q --answer-column a", path), 1)
    expected, found = (json.loads((tmp_path / name / "evaluation.json").read_text()) for name in ("json", "table"))
    assert found["metrics"] == expected["metrics"] and found["prompts"] == expected["prompts"]


@pytest.mark.long
def test_supervised_programs_read_the_same_formats(tmp_path):
    rows = [{"problem": row["prompt"], "completion": row["answer"], "id": i} for i, row in enumerate(train_rows())]
    cases = {
        "sft": (sft_argv, write_parquet(tmp_path / "sft.parquet", rows), "--response-column completion"),
        "reward": (reward_argv, None, "--chosen-column good --rejected-column bad"),
    }
    pairs = [json.loads(line) for line in (preferences() / "preferences.jsonl").read_text().splitlines()]
    pairs = [{"prompt": row["prompt"], "good": row["chosen"], "bad": row["rejected"]} for row in pairs]
    for name, (argv, path, flags) in cases.items():
        path = path or write_parquet(tmp_path / "pairs.parquet", pairs)
        train(name, argv(tmp_path / f"{name}-table", f"--train-iters 3 --prompts {path} {flags}"))
        train(name, argv(tmp_path / f"{name}-json", "--train-iters 3"))
        found, expected = (metrics(tmp_path / f"{name}-{kind}")[3] for kind in ("table", "json"))
        assert timeless(found) == timeless(expected)


# -- masked responses ----------------------------------------------------------------------------------------------

MASKED = f"{GRADED} --mask-truncated-responses --max-response-length 2 --train-iters 2"


@pytest.fixture(scope="module")
def masked(folder) -> dict[int, dict]:
    """Metrics of a run that leaves truncated responses out of the loss."""
    train("rl", rl_argv(folder / "masked", MASKED))
    return metrics(folder / "masked")


def test_masked_fraction_is_that_of_the_samples(masked, folder):
    for step, row in masked.items():
        responses = rows_of(folder / "masked", step)
        cut = sum(response["length"] for response in responses if not response["finished"])
        assert row["rollout/masked_fraction"] == cut / sum(response["length"] for response in responses)
        assert 0 < row["rollout/masked_fraction"] < 1 and row["steps_skipped"] == 0


@pytest.mark.long
def test_masked_fraction_is_the_same_on_two_replicas(masked, folder):
    train("rl", rl_argv(folder / "masked2", MASKED), 2)
    for step, row in metrics(folder / "masked2").items():
        assert_close(row, masked[step], [*PLACED, "rollout/masked_fraction"], 2e-4)


def test_a_run_whose_responses_are_all_cut_changes_no_weight(folder):
    flags = f"{MASKED} --max-response-length 1 --save-interval 1 --weight-decay 0.1"
    train("rl", rl_argv(folder / "cut", flags))
    for row in (metrics(folder / "cut")[step] for step in (1, 2)):
        assert row["rollout/masked_fraction"] == 1 and row["steps_skipped"] == 0
        assert not {"actor/loss", "critic/loss", "actor/grad_norm", "critic/grad_norm"} & row.keys()
        assert row["reward/std"] > 0
    first, second = (stored_tensors(folders.step_folder(folder / "cut", step)) for step in (1, 2))
    weights = [name for name in first if "optimizer" not in name]
    assert weights and all((first[name] == second[name]).all() for name in weights)
