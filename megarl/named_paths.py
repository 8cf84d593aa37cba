"""Values of flags that name several files or folders: `NAME=PATH NAME=PATH …`."""

import re

_NAME = r"[A-Za-z0-9_][A-Za-z0-9_.-]*"
ALLOWED = "each name once, of letters, digits, _, . and -"


def parse_named_paths(text: str) -> dict[str, str]:
    """`math=DIR code=DIR` -> the path of each name, in this order. ValueError for anything else, or a name twice."""
    found: dict[str, str] = {}
    for entry in re.split(rf"\s+(?={_NAME}=)", text.strip()):
        name, _, path = entry.partition("=")
        if not re.fullmatch(_NAME, name) or not path or name in found:
            raise ValueError(entry)
        found[name] = path
    return found
