"""Images inside the text of messages: a mark says which image, so texts of prompts that differ in it are two.

A mark has the hash of the image's bytes and its size. Only marks of images that a run knows are images (`book.py`); the
same characters elsewhere are text, as is the placeholder of a model's family.
"""

import re
from typing import Any

from megarl.data.images.pixels import ImageRef

# Unicode noncharacters, as those of `special_tokens`.
MARK, _END = "\ufdd2", "\ufdd3"
PATTERN = re.compile(f"{MARK}([0-9a-f]{{64}}):([0-9]+)x([0-9]+){_END}")  # digest, width, height

_NAME = re.compile(r"\[image [0-9]+×[0-9]+ sha:([0-9a-f]{8})\]")


def mark_of(ref: ImageRef) -> str:
    """What stands for an image in a text."""
    return f"{MARK}{ref.digest}:{ref.width}x{ref.height}{_END}"


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
