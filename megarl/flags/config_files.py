"""Config files: YAML mappings of flag names to values, merged and turned into command-line tokens."""

from collections.abc import Callable

import yaml

from megarl import bundled
from megarl.errors import UsageError
from megarl.flags.role_flags import OFF


def read(paths: list[str]) -> dict[str, object]:
    """The merged mappings of the files; a later file wins over an earlier one.

    Raises:
        UsageError: a file cannot be read, or is not a mapping of flag names to values.
    """
    merged = {}
    for path in paths:
        for key, value in _content(path).items():
            merged.pop(key, None)
            merged[key] = value
    return merged


def tokens(values: dict[str, object], own: dict[str, type], is_other: Callable[[str], bool]) -> list[str]:
    """The values as command-line tokens. A null unsets the key of an earlier file.

    Args:
        own: megarl's own flags without leading dashes -> type of the value.
        is_other: whether a key belongs to another program and is ignored.
    """
    return [token for key, value in values.items() if not is_other(key) for token in _tokens(key, value, own)]


def _content(path: str) -> dict[str, object]:
    try:
        text = bundled.find(path).read_text(encoding="utf-8")
        root, content = yaml.compose(text, yaml.SafeLoader), yaml.safe_load(text)
    except OSError as error:
        raise UsageError(f"--config {path}: cannot be read ({error.strerror})") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"--config {path}: not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise UsageError(f"--config {path}: allowed is a mapping of flag names to values")
    assert root is not None  # the content is a mapping
    entries = [(key.value, value.value) for key, value in root.value]
    for number, (key, value) in enumerate(entries):
        if key in dict(entries[:number]):
            raise UsageError(f"--config {path}: {key}: appears twice")
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
