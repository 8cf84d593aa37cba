"""Which files a value of `--prompts` names: files, patterns, folders of datasets and their splits; wrong names."""

import csv
import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from megarl.data.sources import find_files, printable
from tests.helpers.texts.refusals import refusal


def touched(folder: Path, *names: str) -> Path:
    """Empty files below a folder."""
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    return folder


def files_of(value) -> list[str]:
    return list(find_files(str(value), "--prompts"))


def error_of(value) -> str:
    said = refusal(files_of, value)
    assert said.startswith("--prompts")
    return said


def test_files_commas_and_patterns(tmp_path):
    touched(tmp_path, "b.jsonl", "a.jsonl", "c,d.jsonl", "x/a.parquet", "x/y/b.parquet", "[z].jsonl", "e:train")
    a, b = f"{tmp_path}/a.jsonl", f"{tmp_path}/b.jsonl"
    assert files_of(b) == [b]
    assert files_of(f"{b},{a}") == [b, a]
    assert files_of(f"{tmp_path}/?.jsonl") == [a, b]
    assert files_of(f"{tmp_path}/**/*.parquet") == [f"{tmp_path}/x/a.parquet", f"{tmp_path}/x/y/b.parquet"]
    # A name that exists is that file, whatever it has in it.
    for name in ("c,d.jsonl", "[z].jsonl", "e:train"):
        assert files_of(tmp_path / name) == [f"{tmp_path}/{name}"]
    assert files_of("nothing.jsonl") == ["nothing.jsonl"]  # reading it says that it does not exist
    assert error_of(f"{tmp_path}/*.csv") == f"--prompts {tmp_path}/*.csv: no file matches"
    assert error_of(f"{a},,{b}").startswith("--prompts: nothing between two commas")
    assert error_of(f"{a},{tmp_path}/?.jsonl") == f"--prompts {a},{tmp_path}/?.jsonl: names {a} twice"


@pytest.mark.parametrize("names, splits", [
    (["data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet", "data/test-00000-of-00001.parquet"],
     {"train": [0, 1], "test": [2]}),
    (["train.jsonl", "validation.jsonl"], {"train": [0], "validation": [1]}),
    (["my_train_set.jsonl.gz", "my-dev-set.jsonl.gz", "README.md"], {"train": [0], "validation": [1]}),
    (["train/0000.parquet", "train/0001.parquet", "test/0000.parquet"], {"train": [0, 1], "test": [2]}),
    (["one.parquet", "two.parquet", "dataset_info.json", ".cache/x.parquet"], {"train": [0, 1]}),
    (["train.jsonl", "hard.jsonl"], {"train": [0], "hard": [1]}),
    (["default/train/0000.parquet"], {"train": [0]}),
    (["trainer.jsonl"], {"train": [0]}),
    (["test_prefs-00000-of-00001.parquet", "train_prefs-00000-of-00001.parquet"],
     {"test_prefs": [0], "train_prefs": [1]}),
])  # fmt: skip
def test_folders_like_those_of_a_hub(names, splits, tmp_path):
    touched(tmp_path, *names)
    found = {split: [f"{tmp_path}/{names[i]}" for i in numbers] for split, numbers in splits.items()}
    assert {split: files_of(f"{tmp_path}:{split}") for split in splits} == found
    if len(splits) == 1:
        assert files_of(tmp_path) == files_of(f"{tmp_path}/") == found["train"]
    else:
        first = min(splits)
        assert error_of(tmp_path) == (
            f"--prompts {tmp_path}: has the splits {', '.join(sorted(splits))}; name one, as in {tmp_path}:{first}"
        )
    assert ":nothing: has no such split; allowed: " in error_of(f"{tmp_path}:nothing")


def test_a_folder_that_says_too_little(tmp_path):
    assert "the folder holds no data; expected files named .jsonl" in error_of(tmp_path)
    touched(tmp_path, "main/train.parquet", "socratic/train.parquet")
    assert error_of(tmp_path).endswith(
        "hold several datasets; name one of these folders or their files: main, socratic"
    )
    assert files_of(f"{tmp_path}/main:train") == [f"{tmp_path}/main/train.parquet"]
    touched(tmp_path, "main/train.jsonl")
    assert "holds the same split as .jsonl and as .parquet" in error_of(tmp_path / "main")


def saved(folder: Path, state: object, *names: str) -> Path:
    touched(folder, *names)
    (folder / "state.json").write_text(state if isinstance(state, str) else json.dumps(state))
    return folder


def test_folders_of_save_to_disk(tmp_path):
    state = {"_data_files": [{"filename": "b.arrow"}, {"filename": "a.arrow"}], "_split": "train"}
    one = saved(tmp_path / "one", state, "a.arrow", "b.arrow", "cache-1.arrow")
    assert files_of(one) == files_of(f"{one}:train") == [f"{one}/b.arrow", f"{one}/a.arrow"]  # in the order of the rows
    assert error_of(f"{one}:test").endswith(":test: has no such split; allowed: train")
    several = tmp_path / "several"
    saved(several / "test", {"_data_files": [{"filename": "a.arrow"}], "_split": None}, "a.arrow")
    (several / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    assert files_of(f"{several}:test") == [f"{several}/test/a.arrow"]
    assert error_of(several).endswith(f"has the splits test, train; name one, as in {several}:test")
    assert error_of(f"{several}:train").endswith("train/state.json is missing; the folder is no whole dataset")


@pytest.mark.parametrize("state, message", [
    ("{", "state.json is not a JSON object that can be read"),
    ("[]", "state.json is not a JSON object that can be read"),
    ({}, "_data_files must be a list of names"),
    ({"_data_files": []}, "lists no file"),
    ({"_data_files": [{"filename": "../secret.arrow"}]}, "is '../secret.arrow'; expected a name in this folder"),
    ({"_data_files": ["a.arrow"]}, "expected a name in this folder"),
    ({"_data_files": [{"filename": "b\n.arrow"}]}, "b\N{REPLACEMENT CHARACTER}.arrow, which state.json lists, is miss"),
])  # fmt: skip
def test_damaged_descriptions(state, message, tmp_path):
    assert message in error_of(saved(tmp_path / "one", state, "a.arrow"))


def test_splits_that_lead_elsewhere(tmp_path):
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["../other"]}')
    assert "splits must be a list of names" in error_of(f"{tmp_path}:../other")


def test_names_from_files_are_made_fit_for_a_terminal():
    assert printable("a\x1b[31m\n") == "a\N{REPLACEMENT CHARACTER}[31m\N{REPLACEMENT CHARACTER}"
    assert len(printable("x" * 100)) == 60


@pytest.mark.parametrize("name, between", [("it's a list.csv", ","), ("list.TSV", "\t")])
def test_a_table_of_text_is_refused_with_a_command_that_keeps_every_value(name, between, tmp_path):
    rows = [{"prompt": 'say "a, b"\tc', "answer": "007"}, {"prompt": "two\nlines é", "answer": "2024-01-02"}]
    with open(tmp_path / name, "w", encoding="utf-8-sig", newline="") as file:
        writer = csv.DictWriter(file, ["prompt", "answer"], delimiter=between)
        writer.writeheader()
        writer.writerows(rows)
    message = error_of(str(tmp_path / name))
    assert message.startswith(f"--prompts {tmp_path / name}: has no types; convert it") and "\n" not in message
    command = message.partition("as text: python ")[2]
    subprocess.run(f"{shlex.quote(sys.executable)} {command}", shell=True, check=True)
    made = (tmp_path / name).with_suffix(".jsonl")
    assert [json.loads(line) for line in made.read_text().splitlines()] == rows
    assert find_files(str(made), "--prompts") == (str(made),)
