"""Config files: YAML mappings of flag names to values, several of them in a row, as command-line tokens."""

from collections.abc import Callable
from pathlib import Path

import yaml

from megarl.errors import UsageError
from megarl.flags.role_flags import OFF


def read(paths: list[str]) -> dict[str, object]:
    """What the files say together: a later file wins over an earlier one.

    Raises:
        UsageError: a file that cannot be read, or is no mapping of flag names to values.
    """
    merged = {}
    for path in paths:
        for key, value in _content(path).items():
            merged.pop(key, None)
            merged[key] = value
    return merged


def tokens(values: dict[str, object], own: dict[str, type], is_other: Callable[[str], bool]) -> list[str]:
    """The same as on a command line; a key whose value is null is taken back.

    Args:
        own: megarl's own flags without dashes in front, and the types of their values.
        is_other: keys that are for other programs, to be passed over.
    """
    return [token for key, value in values.items() if not is_other(key) for token in _tokens(key, value, own)]


def _content(path: str) -> dict[str, object]:
    try:
        text = Path(path).read_text(encoding="utf-8")
        root, content = yaml.compose(text, yaml.SafeLoader), yaml.safe_load(text)
    except OSError as error:
        raise UsageError(f"--config {path}: cannot be read ({error.strerror})") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"--config {path}: not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise UsageError(f"--config {path}: allowed is a mapping of flag names to values")
    written = [(key.value, value.value) for key, value in root.value]
    for number, (key, value) in enumerate(written):
        if key in dict(written[:number]):
            raise UsageError(f"--config {path}: {key}: stands twice")
        if value == "" and content.get(key, "") is None:  # most likely forgotten: a null is written out
            raise UsageError(f"--config {path}: {key}: has no value; null takes an earlier file's key back")
    for key, value in content.items():
        if str(key) in ("config", "check"):
            raise UsageError(f"--config {path}: {key}: stands on the command line alone")
        if isinstance(value, dict):
            raise UsageError(f"--config {path}: {key}: allowed is a value or a list of values, not {value!r}")
    return {str(key): value for key, value in content.items()}


def _tokens(key: str, value, own: dict[str, type]) -> list[str]:
    if value is None and key in own:
        return []
    if value is None or isinstance(value, bool) and own.get(key) is not bool:
        # Megatron's switches are set by naming them; what is off or taken back still has to be a flag that exists.
        return [f"--{key}"] if value else [OFF + key + "=false" * (value is False)]
    values = value if isinstance(value, list) else [value]
    return [f"--{key}", *map(str, values)]
