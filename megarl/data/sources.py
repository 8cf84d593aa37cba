"""The files that a value of `--prompts` names: files, patterns, Hugging Face dataset folders and their splits.

A value holds one name or several with commas: a file, a pattern, a folder, or `FOLDER:SPLIT`. Folders are those of
`save_to_disk`, and those of dataset repositories, with files such as `data/train-00000-of-00002.parquet`.
"""

import glob
import json
import re
import shlex
from pathlib import Path
from typing import Any

from megarl.errors import UsageError
from megarl.plain_files import is_absent, read_json

SUFFIXES = (".jsonl", ".json", ".jsonl.gz", ".json.gz", ".jsonl.zst", ".json.zst", ".parquet", ".arrow")
_DESCRIPTIONS = ("dataset_dict.json", "state.json", "dataset_info.json", "dataset_infos.json")  # hold no rows
# Words in names of files and folders, and the split that they mean.
_SPLIT_OF_WORD = dict.fromkeys(("train", "training"), "train")
_SPLIT_OF_WORD |= dict.fromkeys(("validation", "valid", "val", "dev"), "validation")
_SPLIT_OF_WORD |= dict.fromkeys(("test", "testing", "eval", "evaluation"), "test")
_SHARD = re.compile(r"(.+?)-\d{5}-of-\d{5}")
_SHOWN = 20  # names in an error
_DEPTH = 3  # folders below a dataset's folder that may hold files


def find_files(value: str, flag: str) -> tuple[str, ...]:
    """The files of a value, in the order of its names; those of a pattern or folder in the order of their names.
    UsageError: nothing has the name, no file matches, a folder has no or several splits, or a file appears twice.
    """
    try:
        files = _found(value, flag)
    except (OSError, ValueError) as error:  # of names that no file can have
        raise UsageError(f"{flag} {printable(value, 200)}: {getattr(error, 'strerror', None) or error}") from None
    for file in files:
        _check_has_types(file, flag)
    return files


def _check_has_types(file: str, flag: str):
    """UsageError for a table of text, in which nothing says whether 007 is a number."""
    delimiter = {".csv": ",", ".tsv": "\t"}.get(Path(file).suffix.lower())
    if delimiter is not None:
        name, between = json.dumps(file), json.dumps(delimiter)  # in double quotes: the shell's are single ones
        rows = f'csv.DictReader(open({name}, encoding="utf-8-sig", newline=""), delimiter={between})'
        script = shlex.quote(f"import csv, json; [print(json.dumps(row)) for row in {rows}]")
        wanted = shlex.quote(str(Path(file).with_suffix(".jsonl")))
        raise UsageError(
            f"{flag} {printable(file, 200)}: has no types; convert it, every value as text: "
            f"python -c {printable(script, 1000)} > {printable(wanted, 200)}"
        )


def _found(value: str, flag: str) -> tuple[str, ...]:
    if Path(value).exists() and not Path(value).is_dir():
        return (value,)
    names = [value] if Path(value).is_dir() else value.split(",")
    files = [file for name in names for file in _files_of(name, flag)]
    for number, file in enumerate(files):
        if file in files[:number]:
            raise UsageError(f"{flag} {value}: names {file} twice")
    return tuple(files)


def _files_of(name: str, flag: str) -> list[str]:
    folder, colon, split = name.rpartition(":")
    if not name:
        raise UsageError(f"{flag}: nothing between two commas; allowed are files, patterns and folders with commas")
    if Path(name).is_dir():
        return _files_of_folder(Path(name), None, flag)
    if not Path(name).exists() and colon and Path(folder).is_dir():
        return _files_of_folder(Path(folder), split, flag)
    if not Path(name).exists() and glob.has_magic(name):
        found = sorted(path for path in glob.glob(name, recursive=True) if Path(path).is_file())
        if not found:
            raise UsageError(f"{flag} {name}: no file matches")
        return found
    return [name]


def _files_of_folder(folder: Path, split: str | None, flag: str) -> list[str]:
    where = f"{flag} {folder}"
    if not is_absent(folder / "dataset_dict.json"):
        names = _description(folder / "dataset_dict.json", "splits", where)
        return _saved_files(folder / _chosen(sorted(names), split, where), None, where)
    if not is_absent(folder / "state.json"):
        return _saved_files(folder, split, where)
    splits = _splits_of_repository(folder, where)
    files = splits[_chosen(sorted(splits), split, where)]
    kinds = sorted({_suffix(file) for file in files})
    if len(kinds) > 1:
        raise UsageError(f"{where}: holds the same split as {' and as '.join(kinds)}; name the files with a pattern")
    return [str(file) for file in files]


def _chosen(splits: list[str], split: str | None, where: str) -> str:
    known = ", ".join(map(printable, splits))
    if split is None:
        if len(splits) != 1:
            raise UsageError(f"{where}: has the splits {known}; name one, as in {where.split(' ', 1)[1]}:{splits[0]}")
        return splits[0]
    if split not in splits:
        raise UsageError(f"{where}:{printable(split)}: has no such split; allowed: {known}")
    return split


# -- folders of save_to_disk ---------------------------------------------------------------------------------------


def _saved_files(folder: Path, split: str | None, where: str) -> list[str]:
    state = folder / "state.json"
    if not state.is_file():
        raise UsageError(f"{where}: {state.relative_to(folder.parent)} is missing; the folder is no whole dataset")
    entries = _description(state, "_data_files", where)
    if split is not None:
        name = _description(state, "_split", where, list_expected=False)
        _chosen([name] if isinstance(name, str) else [], split, where)
    names = [entry.get("filename") if isinstance(entry, dict) else None for entry in entries]
    for name in names:
        if not isinstance(name, str) or not _is_plain(name):
            raise UsageError(
                f"{where}: {state.name}: a file of _data_files is {name!r}; expected a name in this folder"
            )
        if not (folder / name).is_file():
            raise UsageError(f"{where}: {printable(name)}, which {state.name} lists, is missing")
    if not names:
        raise UsageError(f"{where}: {state.name} lists no file")
    return [str(folder / name) for name in names]


def _description(path: Path, key: str, where: str, list_expected: bool = True) -> Any:
    try:
        found = read_json(path).get(key)
    except (OSError, ValueError, RecursionError, AttributeError):
        raise UsageError(f"{where}: {path.name} is not a JSON object that can be read") from None
    is_right = isinstance(found, list) and all(key != "splits" or isinstance(n, str) and _is_plain(n) for n in found)
    if list_expected and not is_right:
        raise UsageError(f"{where}: {path.name}: {key} must be a list of names")
    return found


def _is_plain(name: str) -> bool:
    return bool(name) and name not in (".", "..") and "/" not in name and "\0" not in name


# -- folders like those of a hub -----------------------------------------------------------------------------------


def _splits_of_repository(folder: Path, where: str) -> dict[str, list[Path]]:
    """Split -> its files. Names of files and folders say the split; if none does, all files are one split `train`."""
    files = [file for file in sorted(folder.rglob("*")) if _is_data(file, folder)]
    if not files:
        expected = f"files named {', '.join(SUFFIXES)}, or a folder of save_to_disk"
        raise UsageError(f"{where}: the folder holds no data; expected {expected}")
    configurations = sorted({_configuration(file, folder) for file in files})
    if len(configurations) > 1:
        names = ", ".join(printable(name or ".") for name in configurations[:_SHOWN])
        names += f" and {len(configurations) - _SHOWN} more" * (len(configurations) > _SHOWN)
        raise UsageError(
            f"{where}: its folders hold several datasets; name one of these folders or their files: {names}"
        )
    named = [(file, _split_of(file, folder)) for file in files]
    if all(split is None for _, split in named):
        return {"train": files}
    splits: dict[str, list[Path]] = {}
    for file, split in named:
        splits.setdefault(split or file.name.removesuffix(_suffix(file)), []).append(file)
    return splits


def _is_data(file: Path, folder: Path) -> bool:
    parts = file.relative_to(folder).parts
    return (
        len(parts) <= _DEPTH + 1
        and not any(part.startswith((".", "_")) for part in parts)
        and file.name not in _DESCRIPTIONS
        and bool(_suffix(file))
        and file.is_file()
    )


def _suffix(file: Path) -> str:
    return max((suffix for suffix in SUFFIXES if file.name.endswith(suffix)), key=len, default="")


def _configuration(file: Path, folder: Path) -> str:
    """The folder of a file without folders that name a split or are called data: a dataset may have several."""
    parts = file.relative_to(folder).parent.parts
    return "/".join(part for part in parts if part != "data" and part not in _SPLIT_OF_WORD)


def _split_of(file: Path, folder: Path) -> str | None:
    """The split that the name of a file or of a folder above it says."""
    stem = file.name.removesuffix(_suffix(file))
    if shard := _SHARD.fullmatch(stem):
        return shard[1]
    words = re.split(r"[^A-Za-z]+", stem)
    found = [_SPLIT_OF_WORD[word] for word in words if word in _SPLIT_OF_WORD]
    found += [_SPLIT_OF_WORD[p] for p in reversed(file.relative_to(folder).parent.parts) if p in _SPLIT_OF_WORD]
    return found[0] if found else None


def printable(text: str, max_length: int = 60) -> str:
    """Text from a file, fit for a line of an error or a note: without control characters, at most `max_length` long."""
    start = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text[:max_length])
    return start if len(text) <= max_length else start[:-1] + "…"
