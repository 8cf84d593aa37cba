"""Ids of image rows in a token stream: negative numbers that name an image's content and the row.

id = −(key · 2^16 + row) − 1. An id of the vocabulary is always text, also that of a family's placeholder. −1 is
`NO_TOKEN` elsewhere, so a key is at least 1.
"""

from typing import Any

KEY_BITS, _ROW_BITS = 47, 16
MAX_ROWS = 1 << _ROW_BITS  # of an image
_MIN_KEY, _MAX_KEY = 1, (1 << KEY_BITS) - 1


def image_ids(key: int, count: int) -> list[int]:
    """The ids of an image's rows 0 … count − 1. ValueError for a key of other than 47 bits, or too many rows."""
    if not _MIN_KEY <= key <= _MAX_KEY:
        raise ValueError(f"an image's key is {key}; allowed: {_MIN_KEY} to 2^{KEY_BITS} - 1")
    if not 1 <= count <= MAX_ROWS:
        raise ValueError(f"an image of {count:,} tokens; allowed: 1 to {MAX_ROWS:,}")
    first = -(key << _ROW_BITS) - 1
    return list(range(first, first - count, -1))


def key_of(token: Any) -> Any:
    """The key of the image that an id is a row of; of a tensor of ids, the key of each."""
    return -(token + 1) >> _ROW_BITS


def row_of(token: Any) -> Any:
    """The row of its image that an id is, or each of a tensor's."""
    return -(token + 1) & (MAX_ROWS - 1)
