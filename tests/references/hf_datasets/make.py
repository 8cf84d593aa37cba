"""Makes the dataset folders beside this file with `datasets` of Hugging Face; expected.json: what it reads in them.

pip install datasets==5.2.0 && python tests/references/hf_datasets/make.py
"""

import datetime
import decimal
import json
import shutil
from pathlib import Path

import datasets

HERE = Path(__file__).parent


def user(text: str) -> dict:
    """A message of the user."""
    return {"role": "user", "content": text}


def assistant(text: str) -> dict:
    """A message of the assistant."""
    return {"role": "assistant", "content": text}


def verl(count: int) -> datasets.Dataset:
    """Prompts as verl's scripts write them; every other `extra_info` lacks an entry, which becomes null."""
    return datasets.Dataset.from_list([
        {
            "data_source": "sums", "prompt": [user(f"{i}+1=")], "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(i + 1)},
            "extra_info": {"index": i, "split": "train"} | ({"hint": "é漢"} if i % 2 else {}),
        }
        for i in range(count)
    ])  # fmt: skip


def odd() -> datasets.Dataset:
    """Columns of types that JSON does not have."""
    return datasets.Dataset.from_dict(
        {
            "question": ["1+1=", "2+2="],
            "answer": [2, 4],
            "level": [1, 0],
            "when": [datetime.datetime(2026, 1, 2, 3, 4, 5), None],
            "price": [decimal.Decimal("1.50"), decimal.Decimal("2.00")],
            "weights": [[0.5, 1.0], []],
            "scores": [[{"name": "a", "value": 1}], []],
            "raw": [b"\x00\xff", b""],
        },
        features=datasets.Features(
            question=datasets.Value("large_string"),
            answer=datasets.Value("int32"),
            level=datasets.ClassLabel(names=["easy", "hard"]),
            when=datasets.Value("timestamp[us]"),
            price=datasets.Value("decimal128(6, 2)"),
            weights=datasets.List(datasets.Value("float32")),
            scores=datasets.List({"name": datasets.Value("string"), "value": datasets.Value("int64")}),
            raw=datasets.Value("binary"),
        ),
    )


def chat() -> datasets.Dataset:
    """Conversations; one has a system message."""
    first = [user("1+1="), assistant("2")]
    return datasets.Dataset.from_list(
        [{"messages": first}, {"messages": [{"role": "system", "content": "s"}, *first, user("2+2="), assistant("4")]}]
    )


def mixed() -> list[dict]:
    """Rows whose values of one name have several shapes, of which `datasets` makes columns of JSON."""
    tool = {"type": "function", "function": {"name": "w", "parameters": {"type": "object", "properties": {}}}}
    shapes = [1, "one", 1.5, True, None, [1, "a", None], {"a": {"b": None}}, {"a": [2]}, "2024-01-01", "007", "1.50",
              1e-7, 1e22, 2**63, "é\n\"q\"/", [], {}, [{"x": 1}, "y"]]  # fmt: skip
    rows = []
    for number, shape in enumerate(shapes):
        call = {"name": "w", "arguments": {"x": None, "city": shape}}
        called = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]}
        rows.append({
            "prompt": [user(f"{number}?")],
            "messages": [user(f"{number}?"), called],
            "tools": [tool | {"meta": shape}],
            "value": shape,
            "inner": {"value": shape, "number": number},
            "listed": [shape, number],
        })  # fmt: skip
    return rows


def write_mixed():
    """Writes the rows of `mixed` as JSON lines, and what `datasets` makes of them."""
    folder = HERE / "mixed"
    folder.mkdir()
    lines = "".join(json.dumps(row) + "\n" for row in mixed())
    (folder / "rows.jsonl").write_text(lines, encoding="utf-8")
    read = datasets.load_dataset("json", data_files=str(folder / "rows.jsonl"), split="train")
    read.save_to_disk(folder / "saved")
    read.to_parquet(folder / "rows.parquet")


def main():
    """Writes all folders anew."""
    for folder in (path for path in HERE.iterdir() if path.is_dir()):
        shutil.rmtree(folder)
    made = {"verl": verl(7), "odd": odd(), "chat": chat()}
    made["verl"].save_to_disk(HERE / "saved", num_shards=3)
    datasets.DatasetDict({"train": made["odd"], "test": made["odd"].select([1])}).save_to_disk(HERE / "saved_splits")
    for split, rows in (("train", range(5)), ("test", range(5, 7))):
        (HERE / "repository" / "data").mkdir(parents=True, exist_ok=True)
        for shard in range(2):
            part = made["verl"].select(rows).shard(2, shard, contiguous=True)
            part.to_parquet(HERE / "repository" / "data" / f"{split}-{shard:05d}-of-00002.parquet")
    (HERE / "lines").mkdir()
    for split, rows in (("train", [0]), ("validation", [1])):
        made["chat"].select(rows).to_json(HERE / "lines" / f"{split}.jsonl")
    write_mixed()
    read = {
        "mixed": datasets.load_from_disk(HERE / "mixed" / "saved"),
        "saved": datasets.load_from_disk(HERE / "saved"),
        "saved_splits:train": datasets.load_from_disk(HERE / "saved_splits")["train"],
        "saved_splits:test": datasets.load_from_disk(HERE / "saved_splits")["test"],
        "repository:train": datasets.load_dataset(str(HERE / "repository"), split="train"),
        "repository:test": datasets.load_dataset(str(HERE / "repository"), split="test"),
        "lines:train": datasets.load_dataset(str(HERE / "lines"), split="train"),
        "lines:validation": datasets.load_dataset(str(HERE / "lines"), split="validation"),
    }
    plain = {bytes: repr, datetime.datetime: lambda value: value.isoformat(), decimal.Decimal: float}
    rows = {name: found.to_list() for name, found in read.items()}
    text = json.dumps(rows, indent=1, ensure_ascii=False, default=lambda value: plain[type(value)](value))
    (HERE / "expected.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
