"""Forms of images in data, as TRL, verl, ms-swift, slime and LLaMA-Factory publish them, as marks in texts.

An image is a path, bytes, {"bytes", "path"} of datasets' Image, {"image"}, {"url"}, a data: URL or base64; nothing is
downloaded. It stands in a column (`images`, `image`, `image_1` and on) or in a part of a content. Its place is a part
of the type image, `<image>` or `<image 2>` (the second of the column) in a content that is a string, or before the
first user's text if a line names no place.
"""

import array
import base64
import binascii
import itertools
import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import numpy as np

from megarl.data.images.book import Images
from megarl.data.images.decoding import MAX_BYTES, check_whole, size_of
from megarl.data.images.names import ImageRef, mark_of, sha256_of
from megarl.data.ragged import Ragged
from megarl.errors import UsageError
from megarl.plain_files import read_bytes, reason_of, resolved

NAMES = ("images", "image", "image_1")  # of columns
PLACE = "<image>"
_NUMBERED = re.compile(r"<image ([1-9][0-9]?)>")
PARTS = ("image", "image_url")  # types of parts that are images
_INNER = ("bytes", "image", "path", "url", "image_url")  # names in an object that is an image, the first counts
# What Qwen's tools read in such an object, for this image alone.
_SIZES = ("max_pixels", "min_pixels", "resized_height", "resized_width")
# How the formats begin in base64, as ms-swift's files may have it.
_BASE64 = re.compile(r"(iVBORw0KGgo|/9j/|UklGR|R0lGOD|Qk)[A-Za-z0-9+/]{60,}={0,2}")
_SHOWN = 60  # characters of a name
_MAX_BASE64 = MAX_BYTES * 4 // 3 + 4  # characters

Read = Callable[[Any], ImageRef]


class ImageTable:
    """The images of a set of files, each once; it collects them while the lines are read."""

    def __init__(self, images: Images, folder: str | None):
        """`folder`: the root of paths; None: the folder of each data file. UsageError: no image processor."""
        self.images, self._folder = images, folder
        self.refs: list[ImageRef] = []
        self._numbers: dict[str, int] = {}  # by digest
        self._blobs, self._offsets = bytearray(), array.array("q", [0])

    def line(self, fields: dict[str, Any], given: Any, path: str) -> dict[str, Any]:
        """The fields of a line with marks for its images, and `images`, their numbers in this table.

        Args:
            given: the value of the line's column of images; None: nothing.
            path: of the line's file.
        """
        root = Path(self._folder or Path(path).parent)
        numbers: list[int] = []

        def read(value: Any) -> ImageRef:
            number = self._add(value, root)
            numbers.append(number)
            return self.refs[number]

        given = [each for each in (given if isinstance(given, list) else [given]) if each is not None]
        is_in_prompt = "prompt" in fields or "messages" in fields
        found = {}
        for name in ("prompt", "messages", "chosen", "rejected", "teacher_prompt"):
            value = fields.get(name)
            is_whole = isinstance(value, list) and len(value) > 1  # chosen and rejected begin with the prompt
            if value is not None and (name not in ("chosen", "rejected") or is_whole):
                found[name] = placed(value, given, read)
        if given and not found and not is_in_prompt:
            raise UsageError("has images and no prompt of its own to put them into")
        numbers = list(dict.fromkeys(numbers))
        if len(numbers) > self.images.max_images:
            raise UsageError(f"has {len(numbers)} images; --max-images allows {self.images.max_images}")
        return found | ({"images": numbers} if numbers else {})

    def _add(self, value: Any, root: Path) -> int:
        processor = self.images.processor  # UsageError without one, before anything is read
        data, source = source_of(value, root)
        digest = sha256_of(data)
        if digest in self._numbers:
            return self._numbers[digest]
        try:
            width, height = size_of(data)
            processor.tokens(width, height)
            check_whole(data)
        except UsageError as error:
            raise UsageError(f"{'an image' if source is None else f'image {source!r}'}: {error}") from None
        blob = None
        if source is None:
            blob = len(self._offsets) - 1
            self._blobs += data
            self._offsets.append(len(self._blobs))
        self._numbers[digest] = len(self.refs)
        self.refs.append(ImageRef(digest, width, height, source, blob))
        return self._numbers[digest]

    def arrays(self) -> dict[str, np.ndarray]:
        """What the ranks of a node share: `SharedImages` reads it. Nothing without images."""
        if not self.refs:
            return {}
        rows = [[ref.digest, ref.width, ref.height, ref.source, ref.blob] for ref in self.refs]
        return {
            "images": np.frombuffer(json.dumps(rows).encode(), np.uint8),
            "blobs": np.frombuffer(self._blobs, np.uint8),
            "blob_offsets": np.frombuffer(self._offsets, np.int64),
        }

    def notes(self) -> list[str]:
        """How many images there are, and how long they are among tokens."""
        if not self.refs:
            return []
        lengths = sorted(map(self.images.tokens, self.refs))
        middle, most = lengths[len(lengths) // 2], lengths[-1]
        text = f"tokens of an image: median {middle:,}, largest {most:,}; --image-max-pixels bounds them"
        return [f"{len(lengths):,} images; {text}"]


class SharedImages(Sequence[ImageRef]):
    """The images of a set of prompts, from the arrays that the ranks of a node share."""

    def __init__(self, arrays: dict[str, np.ndarray]):
        rows = json.loads(arrays["images"].tobytes()) if "images" in arrays else []
        self._refs = [ImageRef(*row) for row in rows]
        self._blobs = Ragged(arrays["blobs"], arrays["blob_offsets"]) if rows else None

    def __len__(self) -> int:
        return len(self._refs)

    def __getitem__(self, number):
        return self._refs[number]

    def read(self, ref: ImageRef) -> bytes:
        """The bytes of one of them. UsageError: its file is gone."""
        if ref.source is None:
            assert self._blobs is not None
            assert ref.blob is not None
            return self._blobs.view(ref.blob).tobytes()
        return _content(ref.source, Path(ref.source))


NO_IMAGES = SharedImages({})


def placed(value: Any, given: Sequence[Any], read: Read) -> Any:
    """A prompt, a text or messages, with marks in the places of its images.

    Args:
        given: of the line's column; those of the prompt's places that name no image of their own, in order.
        read: the image of a value; UsageError for one that is none.

    Raises:
        UsageError: other numbers of places and images; a part that is neither text nor image.
    """
    if not isinstance(value, str | list):
        return value
    messages = [{"role": "user", "content": value}] if isinstance(value, str) else value
    if not all(isinstance(message, dict) for message in messages):
        return value
    messages, given = _numbered(messages, given)
    places = sum(_places(message, bool(given)) for message in messages)
    refs = list(map(read, given))
    if refs and not places:
        messages, places = _first(messages, len(refs)), len(refs)
    if places != len(refs):
        raise UsageError(f"has {places} places for images ({PLACE}, or parts of the type image) and {len(refs)} images")
    waiting = iter(refs)
    found = [_marked(message, waiting, bool(given), read) for message in messages]
    return found[0]["content"] if isinstance(value, str) else found


def columns_of(first: str | None, is_named: bool, has: Callable[[str], bool]) -> tuple[str, ...]:
    """The columns of a table's images: the `first` alone, or image_1 and those after it, of one image each (MMMU).

    Args:
        first: None: there is none.
        is_named: whether the user names it, who then means this one alone.
        has: whether the table has a column.
    """
    if first is None or is_named or first != NAMES[-1]:
        return () if first is None else (first,)
    return tuple(itertools.takewhile(has, (f"image_{number}" for number in itertools.count(1))))


def numbered(values: dict[str, Any]) -> list[Any]:
    """The images of columns of one each, in order. UsageError for one after a column that has none in a line."""
    there = [name for name, value in values.items() if value is not None]
    for name, expected in zip(there, values, strict=False):
        if name != expected:
            raise UsageError(f"has {name} and no {expected}; numbers of places count the images from 1")
    return [values[name] for name in there]


def _numbered(messages: list[dict[str, Any]], given: Sequence[Any]) -> tuple[list[dict[str, Any]], Sequence[Any]]:
    """Messages with a plain place for each `<image 2>`, and the images in the order of these. UsageError: the numbers
    are not those of the images."""
    is_said = [isinstance(each.get("content"), str) and each.get("role") != "assistant" for each in messages]
    said = [message["content"] for message, is_text in zip(messages, is_said, strict=True) if is_text]
    numbers = [int(number) for text in said for number in _NUMBERED.findall(text)]
    if not given or not numbers or any(PLACE in text for text in said):
        return messages, given
    if sorted(numbers) != list(range(1, len(given) + 1)):
        names = ", ".join(f"<image {number}>" for number in numbers[:8])
        raise UsageError(f"has places for {names}, each of which may be there once, and {len(given)} images")
    found = [
        {**message, "content": _NUMBERED.sub(PLACE, message["content"])} if is_text else message
        for message, is_text in zip(messages, is_said, strict=True)
    ]
    return found, [given[number - 1] for number in numbers]


def _first(messages: list[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    """Messages with so many places before the first user's text, as TRL."""
    for number, message in enumerate(messages):
        content = message.get("content")
        if message.get("role") == "user" and isinstance(content, str | list):
            text = [{"type": "text", "text": content}] if isinstance(content, str) else content
            own = {**message, "content": [{"type": "image"}] * count + text}
            return [*messages[:number], own, *messages[number + 1 :]]
    raise UsageError("has images and no message of a user to put them into")


def _places(message: dict[str, Any], splits: bool) -> int:
    """Places of a message that take an image of the line's column."""
    content = message.get("content")
    if isinstance(content, str):
        return content.count(PLACE) if splits and message.get("role") != "assistant" else 0
    parts = content if isinstance(content, list) else []
    return sum(_is_image(part) and _own(part) is None for part in parts)


def _is_image(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") in PARTS


def _own(part: dict[str, Any]) -> Any:
    """The image that a part names; None: it takes the next of the column."""
    found = {name: part[name] for name in _INNER if part.get(name) is not None}
    _check_sizes(part)
    return found or None


def _marked(message: dict[str, Any], waiting: Iterator[ImageRef], splits: bool, read: Read) -> dict[str, Any]:
    content, role = message.get("content"), message.get("role")
    if isinstance(content, str) and splits and role != "assistant":
        first, *others = content.split(PLACE)
        return {**message, "content": first + "".join(mark_of(next(waiting)) + text for text in others)}
    if not isinstance(content, list) or not any(map(_is_image, content)):
        return message
    texts = []
    for part in content:
        if _is_image(part):
            if role == "assistant":
                raise UsageError("a message of the assistant has an image; a policy writes text")
            own = _own(part)
            texts.append(mark_of(next(waiting) if own is None else read(own)))
        elif isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
            texts.append(part["text"])
        else:
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise UsageError(f"a content has a part of the type {str(kind)[:_SHOWN]}; megarl reads text and images")
    return {**message, "content": "".join(texts)}


# -- one image -----------------------------------------------------------------------------------------------------


def source_of(value: Any, root: Path | None) -> tuple[bytes, str | None]:
    """(bytes of an image, path of its file or None) as data hold it. `root`: of paths; None: paths are refused."""
    if isinstance(value, dict):
        inner = next((value[name] for name in _INNER if value.get(name) is not None), None)
        if inner is None:
            raise UsageError(f"an image is an object without {', '.join(_INNER)}")
        _check_sizes(value)
        return source_of(inner, root)
    if isinstance(value, bytes):
        if len(value) > MAX_BYTES:
            raise UsageError(f"an image of {len(value):,} bytes; allowed: at most {MAX_BYTES:,}")
        return value, None
    if not isinstance(value, str) or not value:
        raise UsageError(f"an image is a path, bytes, a data: URL or {{bytes, path}}, not {value!r:.{_SHOWN}}")
    if value.startswith("data:"):
        return _of_data_url(value), None
    if len(value) <= _MAX_BASE64 and _BASE64.fullmatch(value):
        return _of_base64(value), None
    scheme = urlsplit(value[:_SHOWN]).scheme if "://" in value[:_SHOWN] else ""
    if scheme not in ("", "file"):
        raise UsageError(f"image {value[:_SHOWN]!r}: nothing is downloaded; give a path, bytes or a data: URL")
    if root is None:
        raise UsageError(f"image {value[:_SHOWN]!r}: no file is read; give a data: URL")
    name = unquote(value.removeprefix("file://")) if scheme else value
    if "\0" in name or name != name.encode(errors="ignore").decode():
        raise UsageError(f"image {name[:_SHOWN]!r}: a path has no NUL and no half of a character")
    path = resolved(root / name)
    if not any(path.is_relative_to(allowed) for allowed in _roots(root)):
        raise UsageError(f"image {name[:_SHOWN]!r}: is outside of {root}; --images-folder names another folder")
    return _content(name, path), str(path)


def _check_sizes(value: dict[str, Any]):
    if own := [name for name in _SIZES if value.get(name) is not None]:
        raise UsageError(f"an image has {own[0]} of its own; --image-max-pixels holds for all images")


def _content(name: str, path: Path) -> bytes:
    try:
        return read_bytes(path, MAX_BYTES)
    except OSError as error:
        raise UsageError(f"image {name[:200]!r}: cannot be read: {reason_of(error)}") from None


def _roots(root: Path) -> list[Path]:
    """Folders in which files of a root may lie: links of a hub's snapshot lead to its blobs."""
    found, whole = [resolved(root)], root.absolute()
    for folder in (whole, *whole.parents):
        if folder.parent.name == "snapshots" and (folder.parent.parent / "blobs").is_dir():
            found.append(resolved(folder.parent.parent / "blobs"))
    return found


def _of_data_url(value: str) -> bytes:
    head, comma, body = value.partition(",")
    if not comma or not head.startswith(("data:image/", "data:image;")) or not head.endswith(";base64"):
        raise UsageError(f"a data: URL of an image is data:image/…;base64,…, not {head[:_SHOWN]!r}")
    return _of_base64(body)


def _of_base64(body: str) -> bytes:
    if len(body) > _MAX_BASE64:
        raise UsageError(f"a data: URL of {len(body):,} characters; allowed: at most {_MAX_BASE64:,}")
    try:
        return base64.b64decode(body, validate=True)
    except (binascii.Error, ValueError) as error:
        raise UsageError(f"a data: URL that is no base64: {error}") from None
