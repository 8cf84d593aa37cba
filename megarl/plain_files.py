"""Reading files that a user names: only regular ones, and no more of them than is sensible.

A pipe would block for ever, and a device such as /dev/zero never ends.
"""

import errno
import os
import stat
from pathlib import Path


def check_regular(path: str | Path):
    """OSError unless the path is a regular file, or a link to one."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise OSError(errno.EINVAL, "is no regular file")


def read_bytes(path: str | Path, max_bytes: int | None = None) -> bytes:
    """The content of a regular file. OSError for others, and for one of more than `max_bytes`."""
    check_regular(path)
    if max_bytes is not None and (size := os.path.getsize(path)) > max_bytes:
        raise OSError(errno.EFBIG, f"has {size:,} bytes; allowed are {max_bytes:,}")
    return Path(path).read_bytes()
