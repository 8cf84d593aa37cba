"""YAML files that a user names: mappings without a key twice."""

from typing import Any

import yaml

from megarl import bundled
from megarl.errors import UsageError


def read_mapping(path: str, where: str, allowed: str) -> tuple[dict[Any, Any], dict[str, str]]:
    """The mapping in a file, and each of its values as it is written (lists and mappings apart).

    Args:
        where: flag and path, for messages.
        allowed: what the mapping is of, for messages.

    Raises:
        UsageError: the file cannot be read, is not YAML or no mapping, or has a key twice, also in
            a mapping that is a value.
    """
    try:
        text = bundled.find(path).read_text(encoding="utf-8")
        root, content = yaml.compose(text, yaml.SafeLoader), yaml.safe_load(text)
    except OSError as error:
        raise UsageError(f"{where}: cannot be read ({error.strerror})") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UsageError(f"{where}: not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise UsageError(f"{where}: allowed is a mapping of {allowed}")
    assert root is not None  # the content is a mapping
    written: dict[str, str] = {}
    for key, value in root.value:
        if key.value in written:
            raise UsageError(f"{where}: {key.value}: appears twice")
        written[key.value] = value.value
        inner = [each.value for each, _ in value.value] if isinstance(value, yaml.MappingNode) else []
        if twice := sorted({str(each) for each in inner if inner.count(each) > 1}):
            raise UsageError(f"{where}: {key.value}: {twice[0]}: appears twice")
    return content, written
