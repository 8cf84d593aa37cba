"""Files of prompts, read into checked lines in megarl's own fields.

A line of a JSON file, or a row of a table, has `prompt` (non-empty string, or a list of messages as `messages.py` has
them) and, optionally, `answer` (string, the reference answer), `task` (string), `metadata` (object, input of
verifiers), `response` (string, target of supervised training), `chosen` and `rejected` (strings, the better and the
worse response) with a `margin` (number >= 0). For supervised training `messages` (a whole conversation) may replace
`prompt`. Files with other names of columns are read by `columns.ColumnMap`.
"""

import json
from collections.abc import Sequence

import numpy as np

from megarl.data.arrow_files import ArrowTable, check_footers, is_arrow
from megarl.data.columns import ColumnMap, Columns
from megarl.data.fields import check_line
from megarl.data.ragged import Ragged
from megarl.data.sources import printable
from megarl.data.tables import JsonRows, json_line, lines_of_list, ragged_lines, read_text, split_lines
from megarl.errors import UsageError


def read_files(files: Sequence[str], value: str, flag: str, columns: Columns) -> dict[str, np.ndarray]:
    """The lines of the files, and what is known `about` them, as JSON in bytes."""
    check_footers(files, flag)
    found = [_read_safely(file, flag, columns) for file in files]
    counts = [len(lines) for lines, _ in found]
    maps = [None if map_ is None else map_.describe() for _, map_ in found]
    if not sum(counts):
        raise UsageError(f"{flag} {value}: the {'file holds' if len(files) == 1 else 'files hold'} no prompt")
    about = {
        "starts": np.cumsum([0, *counts[:-1]]).tolist(),
        "verbatim": len(files) == 1 and found[0][1] is None and not files[0].endswith((".gz", ".zst")),
        "notes": _notes(files, counts, maps, value, flag),
        "columns": [{} if map_ is None else map_.columns for _, map_ in found],
    }
    lines = found[0][0] if len(found) == 1 else _joined([lines for lines, _ in found])
    return lines.arrays() | {"about": np.frombuffer(json.dumps(about).encode(), np.uint8)}


def _notes(files: Sequence[str], counts: list[int], descriptions: list[str | None], value: str, flag: str) -> list[str]:
    """A line for each way in which columns of files were recognised."""
    notes = []
    for description in dict.fromkeys(filter(None, descriptions)):
        own = [i for i, other in enumerate(descriptions) if other == description]
        name = value if len(own) == len(files) else ", ".join(files[i] for i in own)
        number = f"{sum(counts[i] for i in own):,} rows" + f" of {len(own)} files" * (len(own) > 1)
        notes.append(f"{flag} {name}: {number}; {description}")
    return notes


def _joined(parts: list[Ragged]) -> Ragged:
    ends = np.cumsum([0, *(len(part.values) for part in parts)])
    offsets = [part.offsets[1:] + end for part, end in zip(parts, ends, strict=False)]
    values = np.concatenate([part.values for part in parts])
    return Ragged(values, np.concatenate([[0], *offsets]).astype(np.int64))


def _read_safely(path: str, flag: str, columns: Columns) -> tuple[Ragged, ColumnMap | None]:
    """`_read_file`, with one line for whatever else a file made for harm raises in there."""
    try:
        return _read_file(path, flag, columns)
    except (ArithmeticError, LookupError, MemoryError, OSError, RecursionError, TypeError, ValueError) as error:
        reason = printable(" ".join(str(error).split()), 200)
        raise UsageError(f"{flag} {path}: cannot be read: {type(error).__name__}: {reason}") from None


def _read_file(path: str, flag: str, columns: Columns) -> tuple[Ragged, ColumnMap | None]:
    """The checked lines of a file in megarl's own fields; and which columns they come from, None if from these."""
    where = f"{flag} {path}"
    if is_arrow(path):
        table = ArrowTable(path, flag)
        return _mapped(table, ColumnMap(table, columns, where), where)
    text = read_text(path, flag)
    is_list = path.removesuffix(".gz").removesuffix(".zst").endswith(".json") and text.lstrip()[:1] == b"["
    lines = lines_of_list(text, where) if is_list else split_lines(text, where)
    if columns.are_own(lines.view(0).tobytes()):
        for i in range(len(lines)):
            check_line(lines.view(i).tobytes().decode().removesuffix("\n"), f"{where}:{i + 1}")
        return lines, None
    table = JsonRows(lines, where)
    return _mapped(table, ColumnMap(table, columns, f"{where}:1"), where)


def _mapped(table: ArrowTable | JsonRows, columns: ColumnMap, where: str) -> tuple[Ragged, ColumnMap]:
    rows = enumerate(table.rows(columns.needed), start=1)
    lines = ragged_lines(json_line(columns.fields(row, f"{where}:{number}")) for number, row in rows)
    return lines, columns
