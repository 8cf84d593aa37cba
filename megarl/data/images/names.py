"""Names of images: where one of a prompt comes from, marks of it in texts, its ids among tokens, hashes of its content.

An id of a row is negative: −(key · 2^16 + row) − 1. An id of the vocabulary is always text, also that of a family's
placeholder. −1 is `NO_TOKEN` elsewhere, so a key is at least 1.
A mark has the hash of the image's bytes and its size, so texts of prompts that differ in an image are two. Only marks
of images that a run knows are images (`book.py`); the same characters elsewhere are text.
"""

import hashlib
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # flags import this module, and need no numbers
    import numpy as np


@dataclass(frozen=True)
class ImageRef:
    """An image of a prompt before it is decoded.

    `digest`: SHA-256 of its bytes, hexadecimal. `width`, `height`: pixels as a viewer shows it (turned by EXIF).
    `source`: the path of its file; None: the bytes are in the data, `blob` says which of the set's. `sent`: they came
    from a client or an environment.
    """

    digest: str
    width: int
    height: int
    source: str | None = None
    blob: int | None = None
    sent: bool = False

    @property
    def name(self) -> str:
        """What samples and logs show."""
        return f"[image {self.width}×{self.height} sha:{self.digest[:8]}]"


@dataclass(frozen=True)
class Pixels:
    """One image as its folder's processor gives it.

    `values`: float32, `pixel_values` of this image alone. `grid`: (t, h, w) in patches, `image_grid_thw`. `tokens`: its
    rows in the token stream. `key`: 47 bits that name it there. `digest`: all of the hash whose bits the key is.
    """

    values: "np.ndarray"
    grid: tuple[int, int, int]
    tokens: int
    key: int
    digest: str


def content_key(digest: str) -> int:
    """47 bits of a hexadecimal hash, at least 1."""
    return int(digest[:16], 16) % ((1 << KEY_BITS) - 1) + 1


def sha256_of(data: bytes) -> str:
    """SHA-256, hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def content_digest(*parts: bytes) -> str:
    """SHA-256 of parts, each with its length, hexadecimal."""
    found = hashlib.sha256()
    for part in parts:
        found.update(len(part).to_bytes(8, "little") + part)
    return found.hexdigest()


# -- ids of image rows in a token stream -------------------------------------------------------------------------------


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


# -- marks inside the text of messages ---------------------------------------------------------------------------------


# Unicode noncharacters, as those of `tokenizers`.
MARK, _END = "\ufdd2", "\ufdd3"
PATTERN = re.compile(f"{MARK}([0-9a-f]{{64}}):([0-9]+)x([0-9]+){_END}")  # digest, width, height

_NAME = re.compile(r"\[image [0-9]+×[0-9]+ sha:([0-9a-f]{8})\]")


def mark_of(ref: ImageRef) -> str:
    """What stands for an image in a text."""
    return f"{MARK}{ref.digest}:{ref.width}x{ref.height}{_END}"


def pieces(text: str) -> list[tuple[str, str | None]]:
    """The texts between marks, and the marks with the digests of their images, in order; no empty ones."""
    found, start = [], 0
    for match in PATTERN.finditer(text):
        found += [(text[start : match.start()], None), (match[0], match[1])]
        start = match.end()
    return [each for each in [*found, (text[start:], None)] if each[0]]


def readable(text: str) -> str:
    """A text with `[image 640×480 sha:12ab34cd]` for each mark."""
    if MARK not in text:
        return text
    return PATTERN.sub(lambda found: ImageRef(found[1], int(found[2]), int(found[3])).name, text)


def names_in(text: str) -> list[str]:
    """The names of images in a readable text."""
    return _NAME.findall(text)


def shown(value: Any) -> Any:
    """A value of JSON types, or of tuples, with all its strings `readable`."""
    if isinstance(value, str):
        return readable(value)
    if isinstance(value, dict):
        return {name: shown(each) for name, each in value.items()}
    return type(value)(map(shown, value)) if isinstance(value, list | tuple) else value
