"""Parquet and Arrow files of kilobytes that expand to hundreds of megabytes: refused before memory is taken."""

import struct
import subprocess
import sys
from pathlib import Path

import pyarrow
from pyarrow import parquet

from megarl.data.prompts import load_prompts
from tests.helpers.programs import environment


def write_bombs(folder: Path) -> list[Path]:
    """Files of kilobytes with hundreds of megabytes: in pages, in dictionaries that many rows name, in buffers."""
    long = pyarrow.array(["a" * 3_000_000])
    plain = pyarrow.table({"prompt": pyarrow.chunked_array([long] * 100)})
    named = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 1000, pyarrow.int32()), long)
    lists = pyarrow.ListArray.from_arrays(pyarrow.array([0, 1000], pyarrow.int32()), named)
    whole = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0], pyarrow.int32()), pyarrow.array(["a" * 200_000_000]))
    tables = {"pages": plain, "delta": plain, "dictionary": pyarrow.table({"prompt": named}),
              "lists": pyarrow.table({"prompt": lists}), "whole": pyarrow.table({"prompt": whole})}  # fmt: skip
    options: dict[str, dict] = {
        "pages": {"use_dictionary": False},
        "delta": {"use_dictionary": False, "column_encoding": {"prompt": "DELTA_BYTE_ARRAY"}, "data_page_size": 2**30},
    }
    for name in ("pages", "delta", "dictionary", "lists"):
        more = {"dictionary_pagesize_limit": 2**30, "compression": "zstd", "store_schema": False} | options.get(
            name, {}
        )
        parquet.write_table(tables[name], folder / f"{name}.parquet", **more)
    for name in ("pages", "dictionary", "lists", "whole"):
        for new in (pyarrow.ipc.new_stream, pyarrow.ipc.new_file):
            path = str(folder / f"{name}-{new.__name__}.arrow")
            with new(path, tables[name].schema, options=pyarrow.ipc.IpcWriteOptions(compression="zstd")) as writer:
                writer.write_table(tables[name])
    lie = folder / "lie.arrow"
    with pyarrow.ipc.new_stream(
        str(lie), plain.schema, options=pyarrow.ipc.IpcWriteOptions(compression="lz4")
    ) as writer:
        writer.write_table(pyarrow.table({"prompt": ["a" * 5000]}))
    assert len(load_prompts(str(lie))) == 1
    before, length, after = lie.read_bytes().rpartition(struct.pack("<q", 5000))  # of the last buffer, the text
    assert length
    lie.write_bytes(before + struct.pack("<q", 2**40) + after)
    return sorted(folder.iterdir())


def test_tables_that_expand_without_measure_are_refused_before_memory_is_taken(tmp_path):
    paths = write_bombs(tmp_path)
    assert len(paths) == 13 and max(path.stat().st_size for path in paths) < 2**17
    small = tmp_path / "small.parquet"
    parquet.write_table(pyarrow.Table.from_pylist([{"prompt": f"{i}+é="} for i in range(2500)]), small)
    code = (
        "import sys\n"
        "from megarl.data import content_limit, prompts\n"
        "from megarl.errors import UsageError\n"
        "content_limit.MIN_CONTENT = 2**22\n"
        "def peak(): return int(open('/proc/self/status').read().split('VmHWM:')[1].split()[0]) // 1024\n"
        "prompts.load_prompts(sys.argv[1])\n"
        "for path in sys.argv[2:]:\n"
        "    before = peak()\n"
        "    try: print(prompts.load_prompts(path))\n"
        "    except UsageError as error: print(peak() - before, error)\n"
    )
    command = [sys.executable, "-c", code, str(small), *map(str, paths)]
    ended = subprocess.run(command, env=environment(), capture_output=True, text=True, check=True)
    lines = ended.stdout.splitlines()
    for path, line in zip(paths, lines, strict=True):
        megabytes, message = line.split(" ", 1)
        limit = max(2**22, 200 * path.stat().st_size)
        assert message == f"--prompts {path}: expands to more than {limit:,} bytes, 200 times its size"
        assert int(megabytes) < 64, line
