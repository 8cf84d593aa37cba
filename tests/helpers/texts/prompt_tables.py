"""Files of rows in each format of prompts."""

import json
from pathlib import Path

import pyarrow
from pyarrow import parquet


def write_parquet(path: Path, rows: list[dict], **options) -> str:
    names = dict.fromkeys(name for row in rows for name in row)
    table = pyarrow.table({name: [row.get(name) for row in rows] for name in names})
    parquet.write_table(table, path, **options)
    return str(path)


def write_jsonl(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def write_arrow(path: Path, rows: list[dict], kind: str = "stream", max_chunksize: int = 700) -> str:
    """An Arrow file or stream with record batches of 700 rows."""
    table = pyarrow.Table.from_pylist(rows)
    new = pyarrow.ipc.new_stream if kind == "stream" else pyarrow.ipc.new_file
    with new(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=max_chunksize)
    return str(path)
