"""Parquet files whose footers lie: one line within limits, where pyarrow would end the process or take the memory."""

import random
from collections import Counter
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from megarl.data.prompts import load_prompts
from megarl.errors import UsageError
from tests.helpers.folders.parquet_footers import field, join, lying, split
from tests.helpers.texts.refusals import refusal
from tests.helpers.tiers import long
from tests.helpers.worlds import run_world

ROWS = [{"prompt": f"{i}+1=", "answer": str(i + 1), "level": {"a": i, "b": [i, None]}} for i in range(50)]
OPTIONS: list[dict] = [{}, {"compression": "zstd", "use_dictionary": False, "row_group_size": 20}]
FOOTER = "the footer is damaged, or takes more than 10 s, or 1 GiB of memory, to read"


def refused(path: Path) -> str:
    said = refusal(load_prompts, str(path))
    assert said.isprintable() and len(said) < 700
    return said.removeprefix(f"--prompts {path}: ")


def read_liars(rank: int, folder: Path, count: int) -> Counter:
    """How often files with other footers were read, refused, and refused for what their footer does to a process."""
    path, draw, found = folder / "p.parquet", random.Random(1), Counter()
    sources = []
    for options in OPTIONS:
        parquet.write_table(pyarrow.Table.from_pylist(ROWS), path, **options)
        sources.append(path.read_bytes())
        path.write_bytes(join(*split(sources[-1])))
        assert len(load_prompts(str(path))) == 50
    for number in range(count):
        path.write_bytes(lying(sources[number % len(sources)], draw))
        try:
            load_prompts(str(path))
            found["read"] += 1
        except UsageError as error:
            assert str(error).isprintable() and len(str(error)) < 700
            found["ended"] += str(error).endswith(FOOTER)
            found["refused"] += 1
    return found


@pytest.mark.parametrize("count", [12, long(1000)])
def test_no_footer_ends_the_process(count, tmp_path):
    (found,) = run_world(read_liars, 1, tmp_path, count)
    assert found["read"] > count / 10 and found["refused"] > count / 10 and found["ended"] > count / 100, found


def test_one_file_of_many_that_would_end_the_process_is_named(tmp_path):
    parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "0.parquet")
    before, footer = split((tmp_path / "0.parquet").read_bytes())
    metadata = field(field(field(footer, 4)[2][1][0], 1)[2][1][0], 3)[2]
    histogram = field(field(metadata, 16)[2], 3)[2][1]  # of definition levels: pyarrow does not catch what it throws
    histogram.append(1)
    for name in ("1.parquet", "2.parquet"):
        (tmp_path / name).write_bytes(join(before, footer) if name == "1.parquet" else join(*split(
            (tmp_path / "0.parquet").read_bytes())))  # fmt: skip
    assert refusal(load_prompts, f"{tmp_path}/*.parquet") == f"--prompts {tmp_path}/1.parquet: cannot be read: {FOOTER}"


def test_what_a_footer_says_of_rows_and_names(tmp_path):
    path = tmp_path / "p.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(ROWS), path, store_schema=False)
    before, _ = split(path.read_bytes())

    def changed(change) -> Path:
        _, footer = split(path.read_bytes())
        change(footer)
        (tmp_path / "other.parquet").write_bytes(join(before, footer))
        return tmp_path / "other.parquet"

    for rows in (-1, 49, 51, 2**62):
        said = refused(changed(lambda footer, rows=rows: field(footer, 3).__setitem__(2, rows)))
        assert said == f"cannot be read after row 50: its footer says that it has {rows:,} rows"
    schema = lambda footer: field(footer, 2)[2][1]  # noqa: E731
    said = refused(changed(lambda footer: field(schema(footer)[1], 4).__setitem__(2, b"p" * 10**7)))
    assert said.startswith("prompt is missing: ") and "p" * 59 + "…" in said
    group = [[3, 5, 1], [4, 8, b"g"], [5, 5, 1]]
    said = refused(changed(lambda footer: schema(footer).__setitem__(slice(1, 1), [group] * 10000)))
    assert said.startswith("cannot be read: Parquet schema too deeply nested")


def test_many_columns_take_no_time(tmp_path):
    """With a comparison of each with each other they would take minutes."""
    count, path = 50_000, str(tmp_path / "p.arrow")
    names = ["prompt", *map(str, range(count)), "answer", "answer"]
    schema = pyarrow.schema([(name, pyarrow.string()) for name in names])
    with pyarrow.ipc.new_stream(path, schema) as writer:
        writer.write_table(pyarrow.table([pyarrow.array(["1"])] * len(names), schema=schema))
    assert refused(Path(path)) == "has 2 columns named answer"
