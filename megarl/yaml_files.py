"""YAML files that a user names: mappings without a key twice."""

from typing import Any

import yaml

from megarl import bundled
from megarl.errors import UsageError, one_line
from megarl.plain_files import MAX_REASON, read_text, reading
from megarl.plain_values import MAX_DIGITS

MAX_VALUES = 10**5  # of a file, once each alias is replaced by what it names
_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")


def read_mapping(path: str, where: str, allowed: str) -> tuple[dict[Any, Any], dict[str, str]]:
    """The mapping in a file, and each of its values as it is written (lists and mappings apart). `where`: flag and
    path, for messages. `allowed`: what the mapping is of, for messages. UsageError: the file cannot be read, is not
    YAML or no mapping, has a key twice, a number that no float holds, or aliases that expand without measure.
    """
    with reading(where):
        text = read_text(bundled.find(path))
    try:
        loader = yaml.SafeLoader(text)
        root = loader.get_single_node()
        if root is not None:
            _size(root, {})
        written = _written(root, where) if isinstance(root, yaml.MappingNode) else {}
        content = None if root is None else loader.construct_document(root)
    except UsageError:
        raise
    except Exception as error:  # wrong values of tags raise anything
        reason = " ".join(str(error).split())[:MAX_REASON] or type(error).__name__
        raise UsageError(one_line(f"{where}: not YAML: {reason}")) from None
    if not isinstance(content, dict):
        raise UsageError(f"{where}: allowed is a mapping of {allowed}")
    return content, written


def parse(text: str) -> Any:
    """The value of YAML that a program has written, such as a run's settings. Raises anything for other texts, and
    ValueError for numbers and aliases that `read_mapping` refuses."""
    # The C loader needs a tenth of the time for the thousands of lines of four roles.
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)(text)
    root = loader.get_single_node()
    if root is None:
        return None
    _size(root, {})
    return loader.construct_document(root)


def _size(node: yaml.Node, sizes: dict[yaml.Node, int | None]) -> int:
    """Values below a node and itself. ValueError for numbers, aliases and cycles that are not allowed."""
    if node in sizes:
        if (found := sizes[node]) is None:
            raise ValueError("an alias stands inside what it names")
        return found
    sizes[node] = None
    if isinstance(node, yaml.ScalarNode):
        children: list[yaml.Node] = []
        if node.tag in _NUMBERS and len(node.value) > MAX_DIGITS:
            place = f"line {node.start_mark.line + 1}: a number has {len(node.value):,} digits"
            raise ValueError(f"{place}; allowed are {MAX_DIGITS}")
    elif isinstance(node, yaml.MappingNode):
        children = [each for pair in node.value for each in pair]
    else:
        children = node.value
    size = 1 + sum(_size(child, sizes) for child in children)
    if size > MAX_VALUES:
        raise ValueError(f"it has more than {MAX_VALUES:,} values")
    sizes[node] = size
    return size


def _written(root: yaml.MappingNode, where: str) -> dict[str, str]:
    """The values of a mapping as they are written. UsageError for a key that it, or a mapping inside, has twice."""
    _check_once(root, where)
    seen: set[yaml.Node] = set()
    for key, value in root.value:
        nodes = [value]
        while nodes:
            node = nodes.pop()
            if node in seen or isinstance(node, yaml.ScalarNode):
                continue
            seen.add(node)
            if isinstance(node, yaml.MappingNode):
                _check_once(node, f"{where}: {key.value}")
                nodes += [inner for _, inner in node.value]
            else:
                nodes += node.value
    return {str(key.value): value.value for key, value in root.value}


def _check_once(node: yaml.MappingNode, where: str):
    names = [str(key.value) for key, _ in node.value]
    if len({*names}) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise UsageError(one_line(f"{where}: {twice}: appears twice"))
