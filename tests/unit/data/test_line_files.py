"""Folders that Hugging Face's `datasets` wrote: every row is what `datasets` itself reads (references/hf_datasets)."""

import json
from pathlib import Path

import pytest

from megarl.data.columns import SFT, Columns
from megarl.data.prompts import load_prompts

FOLDER = Path(__file__).parents[2] / "references" / "hf_datasets"
EXPECTED = json.loads((FOLDER / "expected.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", ["saved", "repository:train", "repository:test"])
def test_verl_rows(name):
    prompts = load_prompts(f"{FOLDER}/{name}")
    assert len(prompts) == len(EXPECTED[name]) > 1
    for prompt, row in zip(prompts, EXPECTED[name], strict=True):
        assert prompt.prompt == row.pop("prompt")
        assert (prompt.answer, prompt.task) == (row["reward_model"]["ground_truth"], row["data_source"])
        assert prompt.metadata == row


def test_types_that_json_lacks():
    for split in ("train", "test"):
        prompts, rows = load_prompts(f"{FOLDER}/saved_splits:{split}"), EXPECTED[f"saved_splits:{split}"]
        for prompt, row in zip(prompts, rows, strict=True):
            assert (prompt.prompt, prompt.answer) == (row.pop("question"), str(row.pop("answer")))
            del row["raw"]  # bytes
            assert prompt.metadata == {name: value for name, value in row.items() if value is not None}
        assert prompts.notes[0].endswith(
            "prompt from question, answer from answer, metadata from level, when, price, weights, scores; left out, "
            "as they hold bytes: raw"
        )


def test_conversations():
    for name in ("lines:train", "lines:validation"):
        prompts = load_prompts(f"{FOLDER}/{name}", columns=Columns(SFT))
        assert [{"messages": prompt.messages} for prompt in prompts] == EXPECTED[name]


def test_errors_name_the_row_of_the_file():
    prompts = load_prompts(f"{FOLDER}/saved,{FOLDER}/repository:test")
    assert len(prompts) == 9
    assert prompts.where(0) == f"--prompts {FOLDER}/saved/data-00000-of-00003.arrow:1"
    assert prompts.where(6) == f"--prompts {FOLDER}/saved/data-00002-of-00003.arrow:2"
    assert prompts.where(8) == f"--prompts {FOLDER}/repository/data/test-00001-of-00002.parquet:1"
    assert prompts.notes == (
        f"--prompts {prompts.path}: 9 rows of 5 files; prompt from prompt, answer from reward_model.ground_truth, task "
        "from data_source, metadata from data_source, ability, reward_model, extra_info",
    )


MIXED = {"saved": f"{FOLDER}/mixed/saved", "parquet": f"{FOLDER}/mixed/rows.parquet"}
TEXTS = {9: "007", 10: "1.50"}  # which datasets gives as the numbers 7 and 1.5, and stores as they were written


def without_nulls(tools: list[dict]) -> list[dict]:
    return [{name: value for name, value in tool.items() if value is not None} for tool in tools]


@pytest.mark.parametrize("name", MIXED)
def test_values_of_mixed_types(name):
    """Columns of JSON at every depth are the values that datasets gives back, which are those of the JSON lines."""
    prompts, turns = load_prompts(MIXED[name]), load_prompts(MIXED[name], columns=Columns(SFT))
    lines, rows = load_prompts(f"{FOLDER}/mixed/rows.jsonl", columns=Columns(prompt="prompt")), EXPECTED["mixed"]
    assert len(prompts) == len(turns) == len(lines) == len(rows) > 15
    for number, row in enumerate(rows):
        prompt, line = prompts[number], lines[number]
        if number in TEXTS:
            row["value"] = row["listed"][0] = row["inner"]["value"] = row["tools"][0]["meta"] = TEXTS[number]
        tools = without_nulls(row["tools"])
        assert prompt.tools == turns[number].tools == tools == without_nulls(line.tools)
        assert turns[number].messages == row["messages"] == line.metadata["messages"]
        for field in ("value", "inner", "listed"):
            assert prompt.metadata.get(field) == row[field] == line.metadata.get(field)
