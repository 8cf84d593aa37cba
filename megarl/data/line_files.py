"""Files of prompts, read into checked lines in megarl's own fields.

The fields are those of `prompt.Prompt`; for supervised training `messages` (a whole conversation) may replace `prompt`.
Files with other names of columns are read by `columns.ColumnMap`.
"""

import json
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from megarl.data.arrow_files import ArrowTable, check_footers, is_arrow
from megarl.data.columns import ColumnMap, Columns
from megarl.data.images.forms import PARTS, ImageTable
from megarl.data.prompt import check_line
from megarl.data.ragged import Ragged
from megarl.data.sources import printable
from megarl.data.tables import JsonRows, Table, json_line, lines_of_list, read_text, split_lines
from megarl.errors import UsageError

_SHOWN = 20  # warnings about files


def read_files(
    files: Sequence[str], value: str, flag: str, columns: Columns, images: ImageTable | None = None
) -> dict[str, np.ndarray]:
    """The lines of the files, and what is known `about` them, as JSON in bytes. `images`: empty, for those of the
    lines, which are among the arrays then."""
    check_footers(files, flag)
    found = [_read_safely(file, flag, columns, images) for file in files]
    counts = [len(each.lines) for each in found]
    if not sum(counts):
        raise UsageError(f"{flag} {value}: the {'file holds' if len(files) == 1 else 'files hold'} no prompt")
    of_images = [] if images is None else [f"{flag} {value}: {note}" for note in images.notes()]
    about = {
        "starts": np.cumsum([0, *counts[:-1]]).tolist(),
        "verbatim": len(files) == 1 and found[0].description is None and not files[0].endswith((".gz", ".zst")),
        "notes": [*_notes(files, found, value, flag), *_warnings(files, found, flag), *of_images],
        "columns": [each.columns or {} for each in found],
    }
    lines = found[0].lines if len(found) == 1 else _joined([each.lines for each in found])
    arrays = lines.arrays() | ({} if images is None else images.arrays())
    return arrays | {"about": np.frombuffer(json.dumps(about).encode(), np.uint8)}


class _FileLines(NamedTuple):
    """The lines of a file; which columns they come from, None of megarl's own fields; what is not read of them; and the
    names of their columns by field."""

    lines: Ragged
    description: str | None = None
    warnings: Sequence[str] = ()
    columns: dict[str, str] | None = None


def _notes(files: Sequence[str], found: Sequence[_FileLines], value: str, flag: str) -> list[str]:
    notes = []
    for description in dict.fromkeys(each.description for each in found if each.description):
        own = [i for i, other in enumerate(found) if other.description == description]
        name = value if len(own) == len(files) else ", ".join(files[i] for i in own)
        number = f"{sum(len(found[i].lines) for i in own):,} rows" + f" of {len(own)} files" * (len(own) > 1)
        notes.append(f"{flag} {name}: {number}; {description}")
    return notes


def _warnings(files: Sequence[str], found: Sequence[_FileLines], flag: str) -> list[str]:
    lines = [
        f"{flag} {file}: warning: {text}" for file, each in zip(files, found, strict=True) for text in each.warnings
    ]
    rest = len(lines) - _SHOWN
    return lines if rest <= 0 else [*lines[:_SHOWN], f"{flag}: {rest:,} more such lines about other files"]


def _joined(parts: list[Ragged]) -> Ragged:
    ends = np.cumsum([0, *(len(part.values) for part in parts)])
    offsets = [part.offsets[1:] + end for part, end in zip(parts, ends, strict=False)]
    values = np.concatenate([part.values for part in parts])
    return Ragged(values, np.concatenate([[0], *offsets]).astype(np.int64))


def _read_safely(path: str, flag: str, columns: Columns, images: ImageTable | None) -> _FileLines:
    """`_read_file`, with one line for whatever else a file made for harm raises in there."""
    try:
        return _read_file(path, flag, columns, images)
    except (ArithmeticError, LookupError, MemoryError, OSError, RecursionError, TypeError, ValueError) as error:
        reason = printable(" ".join(str(error).split()), 200)
        raise UsageError(f"{flag} {path}: cannot be read: {type(error).__name__}: {reason}") from None


def _read_file(path: str, flag: str, columns: Columns, images: ImageTable | None) -> _FileLines:
    where = f"{flag} {path}"
    if is_arrow(path):
        table = ArrowTable(path, flag)
        return _mapped(table, ColumnMap(table, columns, where, images), where, path)
    text = read_text(path, flag)
    is_list = path.removesuffix(".gz").removesuffix(".zst").endswith(".json") and text.lstrip()[:1] == b"["
    lines = lines_of_list(text, where) if is_list else split_lines(text, where)
    has_parts = images is not None and any(f'"{kind}"'.encode() in text for kind in PARTS)
    if columns.are_own(lines.view(0).tobytes()) and not has_parts:
        for i in range(len(lines)):
            check_line(lines.view(i).tobytes().decode().removesuffix("\n"), f"{where}:{i + 1}")
        return _FileLines(lines)
    table = JsonRows(lines, where)
    return _mapped(table, ColumnMap(table, columns, f"{where}:1", images), where, path)


def _mapped(table: Table, columns: ColumnMap, where: str, path: str) -> _FileLines:
    rows = enumerate(table.rows(columns.needed), start=1)
    lines = Ragged.of_lines(json_line(columns.fields(row, f"{where}:{number}", path)) for number, row in rows)
    return _FileLines(lines, columns.describe(), columns.warnings(), columns.columns)
