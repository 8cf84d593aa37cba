"""Config files: YAML mappings of flag names to values, merged and turned into command-line tokens."""

import re
from collections.abc import Callable

from megarl.errors import ArgumentParser, UsageError
from megarl.flags.role_flags import OFF
from megarl.yaml_files import read_mapping


def read(paths: list[str]) -> dict[str, object]:
    """The merged mappings of the files; a later file wins over an earlier one.

    Raises:
        UsageError: a file cannot be read, or is not a mapping of flag names to values.
    """
    return {key: value for key, (value, _) in _merged(paths).items()}


def tokens(values: dict[str, object], own: dict[str, type], is_other: Callable[[str], bool]) -> list[str]:
    """The values as command-line tokens. A null unsets the key of an earlier file.

    `own`: type of the value of each of megarl's own flags; `is_other`: whether a key is of another program, so ignored.
    """
    return [token for key, value in values.items() if not is_other(key) for token in _tokens(key, value, own)]


def with_sources(error: UsageError, argv: list[str], defaults: dict[str, object]) -> UsageError:
    """An error that also says which of the flags in its message come from config files, and how to undo that.

    `argv`: the command line, whose flags win over those of its files; `defaults`: of megarl's own flags.
    """
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config", nargs="+", action="extend", default=[])
    try:
        merged = _merged(parser.parse_known_args(argv)[0].config)
    except UsageError:  # the error is about these files
        return error
    on_command_line = {token.partition("=")[0] for token in argv}
    message, notes = str(error), []
    for flag in dict.fromkeys(re.findall(r"--[a-z0-9-]+", message.partition("; did you mean")[0])):
        key = flag.removeprefix("--")
        if key in merged and flag not in on_command_line:
            value, path = merged[key]
            default = defaults.get(key)
            undo = "null in a later file unsets it" if default is None else f"the default is {flag} {_text(default)}"
            notes.append(f"{flag} {_text(value)} is set in {path}; {undo}")
    return UsageError(f"{message} ({'; '.join(notes)})", error.reporting_rank) if notes else error


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _merged(paths: list[str]) -> dict[str, tuple[object, str]]:
    """Key -> its value in the last of the files that has it, and that file."""
    merged: dict[str, tuple[object, str]] = {}
    for path in paths:
        for key, value in _content(path).items():
            merged.pop(key, None)
            merged[key] = value, path
    return merged


def _content(path: str) -> dict[str, object]:
    content, written = read_mapping(path, f"--config {path}", "flag names to values")
    for key, value in written.items():
        if value == "" and content.get(key, "") is None:  # most likely forgotten: null must be explicit
            raise UsageError(f"--config {path}: {key}: has no value; write null to unset an earlier file's key")
    for key, value in content.items():
        if str(key) in ("config", "check"):
            raise UsageError(f"--config {path}: {key}: is allowed on the command line only")
        if isinstance(value, dict):
            raise UsageError(f"--config {path}: {key}: allowed is a value or a list of values, not {value!r}")
    return {str(key): value for key, value in content.items()}


def _tokens(key: str, value, own: dict[str, type]) -> list[str]:
    if value is None and key in own:
        return []
    if value is None or isinstance(value, bool) and own.get(key) is not bool:
        # Megatron's switches have no value. A switch that is off or unset must still be an existing flag.
        return [f"--{key}"] if value else [OFF + key + "=false" * (value is False)]
    values = value if isinstance(value, list) else [value]
    return [f"--{key}", *map(str, values)]
