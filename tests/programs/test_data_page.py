"""docs/data.md: its commands are accepted, its Python runs, its lines and its tables are what the programs say."""

import gzip
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from megarl.data import columns
from megarl.data.prompt import FIELD_TYPES
from megarl.data.prompts import load_prompts
from megarl.errors import UsageError
from tests.helpers.forked_programs import launch
from tests.helpers.programs import in_world, inputs, preferences, program, reward_argv, rl_argv, sft_argv
from tests.helpers.worlds import run_world

TEXT = (Path(__file__).parents[2] / "docs" / "data.md").read_text()
PROGRAMS = {"train_rl": ("rl", rl_argv), "train_sft": ("sft", sft_argv), "train_reward": ("reward", reward_argv)}
ROWS = [(f"{i}+{i % 9}=", str(i + i % 9)) for i in range(28)]
LONG = ("1+1+1+1+1+1=", "6")


def blocks(language: str) -> list[str]:
    """The contents of the page's code blocks of a language."""
    return [
        text for name, text in re.findall(r"^```(\w*)\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL) if name == language
    ]


def saved(folder: str, rows: list[dict]):
    """A folder of save_to_disk."""
    Path(folder).mkdir(parents=True)
    found = pyarrow.Table.from_pylist(rows)
    with pyarrow.ipc.new_stream(f"{folder}/data-00000-of-00001.arrow", found.schema) as writer:
        writer.write_table(found)
    state = {"_data_files": [{"filename": "data-00000-of-00001.arrow"}], "_split": None}
    Path(folder, "state.json").write_text(json.dumps(state))


def tables() -> dict[str, list[dict]]:
    """The Parquet files that the page names."""
    verl = [
        {"data_source": "sums", "prompt": prompt, "extra_info": {"index": i},
         "reward_model": {"style": "rule", "ground_truth": answer}}
        for i, (prompt, answer) in enumerate([*ROWS, *[LONG] * 12])
    ]  # fmt: skip
    pairs = [{"question": prompt, "better": answer, "worse": answer + "0"} for prompt, answer in ROWS]
    grade_school = [{"question": prompt, "answer": answer} for prompt, answer in ROWS]
    return {
        "gsm8k/main/train-00000-of-00001": grade_school, "gsm8k/main/test-00000-of-00001": grade_school[:5],
        "verl/train": verl, "shards/one": grade_school[:9], "shards/two": grade_school[9:],
        "preferences/train": pairs, "preferences/test": pairs, "text": [{"text": "a", "id": 1}],
        "hole": [{"question": text} for text in ("a", "b", None)],
    }  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder with all files that the page names."""
    inputs(), preferences()
    folder = tmp_path_factory.mktemp("page")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for name, rows in tables().items():
            Path("data", name).parent.mkdir(parents=True, exist_ok=True)
            parquet.write_table(pyarrow.Table.from_pylist(rows), f"data/{name}.parquet")
        lines = "".join(json.dumps({"prompt": prompt, "answer": answer}) + "\n" for prompt, answer in ROWS)
        Path("data/train.jsonl").write_text(lines)
        Path("data/heldout.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
        rows = [{"instruction": prompt, "input": "", "output": answer} for prompt, answer in ROWS]
        Path("data/alpaca.json").write_text(json.dumps(rows))
        for split in ("train", "test"):
            saved(f"data/saved/{split}", [{"task": {"text": prompt, "result": answer}} for prompt, answer in ROWS])
        Path("data/saved/dataset_dict.json").write_text('{"splits": ["train", "test"]}')
        Path("data/pointer.parquet").write_text("version https://git-lfs.github.com/spec/v1\nsize 1\n")
        Path("list.jsonl").write_text('{"prompt": "a", "answer": "b"}\n{"prompt": "a", "answer": "b",}\n')
    return folder


def checked(rank: int, parsed: list) -> list[str]:
    """What the check of each command line ends with."""
    found = []
    for name, config in parsed:
        try:
            in_world(rank, name, config)
        except BaseException as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


def parsed_command(line: str, folder: Path):
    shell, script, name, config, file, *flags = shlex.split(line)
    assert (shell, script, config, file) == ("bash", "launch/run.sh", "--config", "my.yaml")
    program_name, argv = PROGRAMS[name]
    base = [token for token in argv(folder / "run") if token != "--prompts" and "train.jsonl" not in token]
    base = [token for token in base if "preferences.jsonl" not in token]
    return program_name, program(program_name, [*base, *flags, "--check"], 1)


def test_every_command_is_accepted(folder, monkeypatch):
    monkeypatch.chdir(folder)
    lines = blocks("bash")[0].splitlines()
    (found,) = run_world(checked, 1, [parsed_command(line, folder) for line in lines])
    assert len(lines) == 7 and found == ["SystemExit: 0"] * 7


def test_the_python_of_the_page(folder, monkeypatch):
    monkeypatch.chdir(folder)
    path, rows = Path("data/gsm8k/main/train-00000-of-00001.parquet"), tables()["gsm8k/main/train-00000-of-00001"]
    derived = [row | {"answer": f"add\n#### {row['answer']}"} for row in rows]
    parquet.write_table(pyarrow.Table.from_pylist(derived), path)
    (code,) = blocks("python")
    subprocess.run([sys.executable, "-c", code], check=True)  # it starts threads
    assert [(prompt.prompt, prompt.answer) for prompt in load_prompts("data/gsm8k.parquet")] == ROWS


def test_the_lines_that_a_run_prints(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(folder)
    flags = "--prompts data/verl/train.parquet --filter-long-prompts --train-iters 1"
    status, out, err = launch(tmp_path, rl_argv(tmp_path / "run", flags))
    assert status == 0, err
    shown = [line for block in blocks("text") for line in block.splitlines() if not line.startswith("megarl: error")]
    assert len(shown) == 2 and [line for line in out.splitlines() if "--prompts" in line] == shown


def test_the_errors_of_the_page(folder, monkeypatch):
    monkeypatch.chdir(folder)
    shown = [line for block in blocks("text") for line in block.splitlines() if line.startswith("megarl: error: ")]
    for line in shown:
        wrong = line.removeprefix("megarl: error: ")
        named = re.match("--answer-column (.*?): ", wrong)
        value = re.search(r"--prompts (\S+?)(:\d+)?: ", wrong)[1]
        with pytest.raises(UsageError) as caught:
            load_prompts(value, columns=columns.Columns(answer=named and named[1]))
        assert str(caught.value) == wrong
    assert len(shown) == 8


def test_the_tables_of_the_page():
    programs, known = {"`train_rl`, `evaluate`": columns.RL, "`train_sft`": columns.SFT}, {}
    programs |= {"`train_reward`, `train_preference`": columns.REWARD}
    programs |= {"`train_preference` with `kto`, also": columns.LABELLED}
    part = TEXT.partition("## Columns that are recognised")[2].partition("| files of |")[0]
    for row in re.findall(r"^\| (.*?) ?\| (\w+) \| (`.*`) \|$", part, re.MULTILINE):
        purpose = programs.get(row[0]) or purpose  # noqa: F821  of the row above
        known.setdefault(purpose, {})[row[1]] = tuple(re.findall("`(.*?)`", row[2]))
    known[columns.LABELLED] |= known[columns.REWARD]
    of_every_program = ("system", "tools")  # the page names them once
    assert known == {
        purpose: {name: words for name, words in names.items() if name not in of_every_program}
        for purpose, names in columns.NAMES.items()
    }
    own = TEXT.partition("## megarl's own fields")[2].partition("##")[0]
    rows = re.findall(r"^\| (`.*?`) \|", own, re.MULTILINE)
    assert {name for row in rows for name in re.findall("`(.*?)`", row)} == set(FIELD_TYPES)
