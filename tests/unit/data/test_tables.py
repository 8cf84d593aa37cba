"""Formats of prompt files: the same prompts from each, damaged files, rows that are read in pieces, no new threads."""

import gzip
import json
import os
import random
import re
import subprocess
import sys
import tracemalloc
from collections import Counter
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from megarl.data import node_files
from megarl.data.columns import REWARD, Columns
from megarl.data.prompts import load_prompts
from megarl.errors import UsageError
from tests.helpers.programs import environment
from tests.helpers.texts.character_tokenizer import PLAIN
from tests.helpers.texts.prompt_tables import write_arrow, write_parquet
from tests.helpers.texts.refusals import refusal
from tests.helpers.tiers import long
from tests.helpers.worlds import run_world

ROWS = [{"prompt": f"{i}+é=", "answer": str(i), "metadata": {"level": i % 3}} for i in range(2500)]
LINES = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS).encode()


def compressed(kind: str, data: bytes) -> bytes:
    if kind == "gz":
        return gzip.compress(data)
    return pyarrow.compress(data, codec="zstd", asbytes=True)


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, Path]:
    """The same prompts in every format."""
    folder = tmp_path_factory.mktemp("formats")
    (folder / "p.jsonl").write_bytes(LINES)
    (folder / "p.json").write_text(json.dumps(ROWS))
    for kind, suffix in (("gz", ".gz"), ("zstd", ".zst")):
        (folder / f"p.jsonl{suffix}").write_bytes(compressed(kind, LINES))
    # Two members or frames, one after the other, are one file.
    half = LINES.index(b"\n", len(LINES) // 2) + 1
    (folder / "p.json.gz").write_bytes(gzip.compress(LINES[:half]) + gzip.compress(LINES[half:]))
    (folder / "p.json.zst").write_bytes(compressed("zstd", LINES[:half]) + compressed("zstd", LINES[half:]))
    write_parquet(folder / "p.parquet", ROWS, row_group_size=900)
    write_parquet(folder / "zstd.parquet", ROWS, compression="zstd", use_dictionary=False)
    write_arrow(folder / "p.arrow", ROWS)
    write_arrow(folder / "file.arrow", ROWS, "file")
    return {path.name: path for path in folder.iterdir()}


NAMES = ["p.json", "p.jsonl.gz", "p.jsonl.zst", "p.json.gz", "p.json.zst", "p.parquet", "zstd.parquet", "p.arrow",
         "file.arrow"]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_every_format_gives_the_same_prompts(name, files):
    expected, found = load_prompts(str(files["p.jsonl"])), load_prompts(str(files[name]))
    assert list(found) == list(expected) and len(found) == 2500
    assert found.where(2345) == f"--prompts {files[name]}:2346"
    assert found.encode(PLAIN, 10).arrays().keys() == {"values", "offsets"}
    assert list(found.encode(PLAIN, 10)) == list(expected.encode(PLAIN, 10))
    assert expected.notes == () and len(found.notes) == (name.endswith((".parquet", ".arrow")))


def test_several_files(files):
    value = f"{files['p.parquet']},{files['p.jsonl']},{files['p.arrow']}"
    prompts, expected = load_prompts(value), [row["prompt"] for row in ROWS]
    assert [prompt.prompt for prompt in prompts] == expected * 3 and prompts[7400].index == 7400
    assert [prompts.where(i).rpartition("/")[2] for i in (0, 2499, 2500, 4999, 5000, 7499)] == [
        "p.parquet:1", "p.parquet:2500", "p.jsonl:1", "p.jsonl:2500", "p.arrow:1", "p.arrow:2500"
    ]  # fmt: skip
    # One note for the two that were recognised in the same way.
    assert prompts.notes == (
        f"--prompts {files['p.parquet']}, {files['p.arrow']}: 5,000 rows of 2 files; prompt from prompt, answer from "
        "answer, metadata from metadata",
    )


def test_the_hash_of_prompts(files, tmp_path):
    (tmp_path / "copy.jsonl").write_bytes(LINES)
    (tmp_path / "other.jsonl").write_bytes(LINES.replace(b"2499", b"2498"))
    found = {path.name: load_prompts(str(path)).sha256() for path in [*files.values(), *tmp_path.iterdir()]}
    # That of an uncompressed JSON file is the file's, as in checkpoints of earlier versions.
    sums = subprocess.run(["sha256sum", str(files["p.jsonl"])], capture_output=True, text=True, check=True)
    assert found["p.jsonl"] == found["copy.jsonl"] == sums.stdout.split()[0] != found["other.jsonl"]
    assert len({found[name] for name in ("p.parquet", "zstd.parquet", "p.arrow", "file.arrow")}) == 1
    rows = ROWS[:-1] + [ROWS[-1] | {"answer": "0"}]
    assert load_prompts(str(write_parquet(tmp_path / "o.parquet", rows))).sha256() != found["p.parquet"]
    columns = Columns(answer="metadata.level")
    assert load_prompts(str(files["p.parquet"]), columns=columns).sha256() != found["p.parquet"]


# -- filter --------------------------------------------------------------------------------------------------------


@pytest.fixture
def uneven(tmp_path) -> str:
    rows = [{"question": "x" * (1 + i % 7), "answer": str(i)} for i in range(20)]
    return write_parquet(tmp_path / "u.parquet", rows)


def test_prompts_that_are_too_long_are_dropped(uneven):
    whole = load_prompts(str(uneven))
    prompts, tokens = whole.encode_fitting(PLAIN, 5)
    kept = [i for i in range(20) if i % 7 < 5]
    assert [prompt.answer for prompt in prompts] == [str(i) for i in kept] and len(prompts) == len(tokens) == len(kept)
    assert [prompt.index for prompt in prompts] == list(range(len(kept)))
    assert list(tokens) == [[ord("x")] * (1 + i % 7) for i in kept] == list(prompts.encode(PLAIN, 5))
    assert [prompts.where(n) for n in range(len(kept))] == [f"--prompts {uneven}:{i + 1}" for i in kept]
    assert prompts.notes == (*whole.notes, f"--prompts {uneven}: dropped 5 of 20 prompts longer than 5 tokens")
    assert prompts.sha256() != whole.sha256()
    assert prompts.sha256() == whole.encode_fitting(PLAIN, 5)[0].sha256() != whole.encode_fitting(PLAIN, 4)[0].sha256()


def test_a_filter_that_drops_nothing_changes_nothing(uneven):
    whole = load_prompts(str(uneven))
    prompts, tokens = whole.encode_fitting(PLAIN, 7)
    assert prompts is whole and list(tokens) == list(whole.encode(PLAIN, 7))


def test_a_filter_that_drops_everything(tmp_path):
    path = write_parquet(tmp_path / "p.parquet", [{"question": "abc"}] * 3)
    with pytest.raises(UsageError) as caught:
        load_prompts(str(path)).encode_fitting(PLAIN, 2)
    assert str(caught.value) == f"--max-prompt-length 2: each of the 3 prompts of --prompts {path} has more tokens"


def test_ranks_of_a_node_share_a_filter(uneven, tmp_path, monkeypatch):
    """What a second rank maps from the files is what the first one computed."""
    folder = tmp_path / "node"
    folder.mkdir()
    monkeypatch.setenv(node_files.FOLDER, str(folder))
    found = [load_prompts(str(uneven)).encode_fitting(PLAIN, 5) for _ in range(2)]
    assert [list(prompts) for prompts, _ in found][0] == list(found[1][0])
    assert found[0][0].notes == found[1][0].notes and found[0][0].where(9) == found[1][0].where(9)
    computed = len(list(folder.iterdir()))
    dropped = found[0][0].encode(PLAIN)
    assert len(list(folder.iterdir())) > computed and len(dropped) == 15  # not those of the whole set


# -- damage --------------------------------------------------------------------------------------------------------


def damaged(data: bytes, at: float, count: int = 40) -> bytes:
    place = int(len(data) * at)
    return data[:place] + bytes(255 - b for b in data[place : place + count]) + data[place + count :]


DAMAGE = {
    "cut": lambda data: data[: len(data) // 2], "cut at the start": lambda data: data[:3], "empty": lambda data: b"",
    "zeros": lambda data: bytes(len(data)), "words": lambda data: b"just words\n" * 30,
    "pages": lambda data: damaged(data, 0.2), "end": lambda data: damaged(data, 0.97, 20),
}  # fmt: skip


@pytest.mark.parametrize("name", ["p.parquet", "zstd.parquet", "p.arrow", "file.arrow", "p.jsonl.gz", "p.jsonl.zst"])
@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_files_are_refused_in_one_line_or_read_whole(name, damage, files, tmp_path):
    path = tmp_path / name
    path.write_bytes(DAMAGE[damage](files[name].read_bytes()))
    try:
        prompts = load_prompts(str(path))
    except UsageError as error:
        assert re.match(rf"--prompts {re.escape(str(path))}(:\d+)?: ", str(error)) and "\n" not in str(error)
        assert str(error).isprintable()
    else:  # Arrow files have no checksums, and a stream has an end of its own
        assert damage in ("pages", "end") and ".gz" not in name and len(prompts) > 0


def mutated(data: bytes, draw: random.Random) -> bytes:
    """A file with some bytes changed, lost or added."""
    found = bytearray(data)
    for _ in range(draw.choice([1, 2, 8])):
        place, count = draw.randrange(len(found)), draw.randrange(1, 20)
        noise = draw.choice([draw.randbytes(count), b"\xff" * 4, bytes(4), b"\xff\xff\xff\x7f"])
        found[place : place + draw.choice([0, len(noise), 1])] = noise
    return bytes(found)


def read_mutants(rank: int, sources: list[bytes], folder: Path, count: int) -> Counter:
    """How often mutants were read and refused."""
    draw, found = random.Random(1), Counter()
    for number in range(count):
        kind = number % len(sources)
        path = folder / f"p.{'arrow' if kind < 2 else 'parquet'}"
        path.write_bytes(mutated(sources[kind], draw))
        try:
            load_prompts(str(path))
            found["read"] += 1
        except UsageError as error:
            assert str(error).isprintable()
            found["refused"] += 1
    return found


@pytest.mark.parametrize("count", [100, long(1000)])
def test_no_mutant_of_a_file_ends_the_process(count, tmp_path):
    """pyarrow would follow damaged offsets out of the memory of the file."""
    rows = [{"question": f"{i}+é=", "level": {"a": i, "b": [i, None], "c": "x" * (i % 3)}} for i in range(30)]
    paths = [write_arrow(tmp_path / "a.arrow", rows), write_arrow(tmp_path / "b.arrow", rows, "file"),
             write_parquet(tmp_path / "a.parquet", rows),
             write_parquet(tmp_path / "b.parquet", rows, compression="none", use_dictionary=False)]  # fmt: skip
    (found,) = run_world(read_mutants, 1, [Path(path).read_bytes() for path in paths], tmp_path, count)
    assert found["read"] > 0 and found["refused"] > count / 2


def test_what_is_wrong_with_a_file(tmp_path):
    def error_of(path: Path, columns: Columns = Columns()) -> str:
        return refusal(load_prompts, str(path), columns=columns).removeprefix(f"--prompts {path}")

    path = tmp_path / "p.parquet"
    assert error_of(path) == ": no such file"
    assert error_of(tmp_path / "p.jsonl.gz") == error_of(tmp_path / "p.jsonl.zst") == ": no such file"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 3\n")
    assert error_of(path) == ": cannot be read: it is a pointer of Git LFS; fetch the file itself (git lfs pull)"
    assert error_of(write_parquet(path, [{"prompt": "a"}][:0])).startswith(": prompt is missing")
    parquet.write_table(pyarrow.table({"prompt": pyarrow.array([], pyarrow.string())}), path)
    assert error_of(path) == ": the file holds no prompt"
    parquet.write_table(pyarrow.table([["a"], ["b"]], names=["prompt", "prompt"]), path)
    assert error_of(path) == ": has 2 columns named prompt"
    parquet.write_table(pyarrow.table({"prompt": pyarrow.array([b"a"])}), path)
    assert error_of(path).endswith("; the file has none, and with bytes prompt")
    (tmp_path / "folder.parquet").mkdir()
    assert "folder holds no data" in error_of(tmp_path / "folder.parquet")
    # Bytes that are no text, in a column that says that they are.
    text = pyarrow.Array.from_buffers(pyarrow.string(), 1, pyarrow.array([b"\xff"]).buffers())
    parquet.write_table(pyarrow.table({"prompt": text}), path)
    assert error_of(path).startswith(": cannot be read after row 0: ")
    listed = tmp_path / "p.json"
    for content, message in (("[]", "the file holds no prompt"), ("[{]", "malformed JSON"),
                             ('[{"prompt": "a"},\n]', "a comma before ]; remove it (line "), ("[1]", "expected a JSON"),
                             ('[{"prompt": "a"}, {"prompt": ""}]', "prompt is empty")):  # fmt: skip
        listed.write_text(content)
        assert message in error_of(listed)
    assert error_of(listed).startswith(":2: ")


def test_without_pyarrow(tmp_path):
    code = (
        "import sys; sys.modules['pyarrow'] = None\n"
        "from megarl.data.prompts import load_prompts\n"
        "for path in sys.argv[1:]:\n"
        "    try: load_prompts(path)\n"
        "    except Exception as error: print(error)"
    )
    paths = [tmp_path / name for name in ("p.parquet", "p.arrow", "p.jsonl.zst")]
    for path in paths:
        path.write_bytes(b"x")
    command = [sys.executable, "-c", code, *map(str, paths)]
    ended = subprocess.run(command, env=environment(), capture_output=True, text=True, check=True)
    said = "the package pyarrow reads this file and is not installed: run bash launch/setup_env.sh parquet"
    assert ended.stdout.splitlines() == [f"--prompts {path}: {said}" for path in paths]


# -- memory and threads --------------------------------------------------------------------------------------------


def beside_the_text(path: Path, count: int) -> int:
    """Bytes that reading so many rows takes at most, besides the lines that stay."""
    rows = [{"question": f"{i:6}", "level": {"a": i, "b": [1.5, 2.5, 3.5]}} for i in range(count)]
    write_parquet(path, rows)
    del rows
    tracemalloc.start()
    try:
        prompts = load_prompts(str(path))
        return tracemalloc.get_traced_memory()[1] - len(prompts._lines.values)
    finally:
        tracemalloc.stop()


def test_few_rows_are_objects_at_a_time(tmp_path):
    """Three times the rows take little more memory than their lines do."""
    load_prompts(str(write_parquet(tmp_path / "p.parquet", ROWS)))  # imports and caches
    few, many = (beside_the_text(tmp_path / "p.parquet", count) for count in (1200, 3600))
    assert many < 1.3 * few


def test_reading_starts_no_thread(files):
    """With a thread the launcher could not fork the ranks from the process that checks the input."""
    code = (
        "import os, sys; from megarl.data.prompts import load_prompts\n"
        "for path in sys.argv[1:]: load_prompts(path)\n"
        "print(sorted(open(f'/proc/self/task/{t}/comm').read().strip() for t in os.listdir('/proc/self/task')))"
    )
    command = [sys.executable, "-c", code, *(str(files[name]) for name in NAMES)]
    variables = environment(OPENBLAS_NUM_THREADS="1")
    ended = subprocess.run(command, env=variables, capture_output=True, text=True, check=True)
    assert ended.stdout.count(",") == 0, ended.stdout


# -- files made for harm -----------------------------------------------------------------------------------------


def refused(value: str, columns: Columns = Columns()) -> str:
    return refusal(load_prompts, value, columns=columns)


@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.gz", "jsonl.zst", "parquet", "arrow"])
def test_pipes_and_devices_are_refused(suffix, tmp_path):
    os.mkfifo(tmp_path / f"p.{suffix}")
    assert refused(str(tmp_path / f"p.{suffix}")).endswith("cannot be read: is no regular file")
    assert refused("/dev/zero").endswith("cannot be read: is no regular file")


@pytest.mark.parametrize("kind", ["gz", "zst"])
def test_a_file_that_expands_without_measure_is_refused(kind, tmp_path, monkeypatch):
    path = str(tmp_path / f"p.jsonl.{kind}")
    lines = (b'{"prompt":"' + b"a" * 2**16 + b'"}\n') * 80
    Path(path).write_bytes(compressed(kind, lines))
    assert len(load_prompts(path)) == 80
    monkeypatch.setattr("megarl.data.content_limit.MIN_CONTENT", 2**22)
    assert "expands to more than 4,194,304 bytes, 200 times its size" in refused(path)


@pytest.mark.parametrize("value", ["x" * 5000, "x" * 5000 + "/*.jsonl", "a\0b", "x" * 300 + ":train"])
def test_names_that_no_file_can_have_are_refused(value):
    said = refused(value)
    assert said.startswith("--prompts ") and len(said) < 700


def test_numbers_of_many_digits(tmp_path):
    path = tmp_path / "p.jsonl"
    pair = {"prompt": "a", "chosen": "b", "rejected": "c"}
    path.write_text(json.dumps(pair | {"margin": 10**4000}) + "\n")
    assert "margin is 1000" in refused(str(path), Columns(REWARD))
    path.write_text(json.dumps({"question": "a", "answer": 10**4000}) + "\n")
    assert load_prompts(str(path))[0].answer == str(10**4000)
    path.write_text('{"question": "a", "answer": ' + "9" * 5000 + "}\n")
    assert "malformed JSON" in refused(str(path))
