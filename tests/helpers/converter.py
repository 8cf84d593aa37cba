"""The converter on a rank of a running world."""

import sys

from tools import convert


def converted(rank: int, *argv) -> int:
    """Its exit status; `argv`: after the program's name."""
    sys.argv = ["convert.py", *map(str, argv)]
    try:
        convert.main()
    except SystemExit as ended:
        return ended.code or 0
    return 0
