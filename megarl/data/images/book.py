"""The images that a process knows: from marks in texts to ids among tokens, and from ids to pixels.

Ids depend on an image's bytes, its size and the folder's processor, so prompts become tokens without decoding. Pixels
are made of bytes when somebody asks for a key, as often as it asks: an image that was forgotten is no error. Images of
environments are in no data: a run keeps each once in a folder, where every process and a resumed run find it.
"""

import contextlib
import itertools
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl.data.images.decoding import MAX_BYTES, decode, decode_confined, size_of, thumbnail
from megarl.data.images.names import (
    MARK,
    PATTERN,
    ImageRef,
    Pixels,
    content_key,
    key_of,
    mark_of,
    names_in,
    readable,
    row_of,
    sha256_of,
)
from megarl.data.images.processor import ImageProcessor
from megarl.errors import UsageError
from megarl.observe.files import write_atomically
from megarl.plain_files import read_bytes, reason_of

if TYPE_CHECKING:
    from PIL import Image

FOLDER = "images"  # of a run, with those of its environments
_DIGEST = re.compile("[0-9a-f]{64}")
THUMBNAILS, SIDE = 16, 64  # of a step of samples; pixels
ReadBytes = Callable[[ImageRef], bytes]


class Images:
    """Images by the hash of their bytes, and by the key that their ids have.

    `processor`: of the model's folder, or the reason why there is none, which `need` raises. A copy for another process
    knows no image.
    """

    def __init__(self, processor: ImageProcessor | str, max_images: int = 8):
        """`max_images`: of a prompt."""
        self._processor, self.max_images = processor, max_images
        self._known: dict[str, tuple[ImageRef, ReadBytes]] = {}
        self._digests: dict[int, str] = {}  # hash of an image's bytes, by key
        self._uses: Counter[str] = Counter()  # of those that were sent, by the same hash
        self._lock = threading.Lock()
        self._folder: Path | None = None  # gets new images of environments; None: they stay in memory
        self._folders: list[Path] = []  # where such are
        self.are_shown = False  # by the resets of the run's environments
        self.shown_problem = ""  # why those of environments are not read
        self.when_forgotten: Callable[[], None] = lambda: None  # what else to do after `forget`

    def __reduce__(self):
        return type(self), (self._processor, self.max_images)

    @property
    def processor(self) -> ImageProcessor:
        """UsageError: the folder has none."""
        if isinstance(self._processor, str):
            raise UsageError(f"has images; {self._processor}")
        return self._processor

    def refuse(self, reason: str):
        """From now on no image is read; `reason`: why."""
        self._processor = reason

    @property
    def fingerprint(self) -> str:
        """Differs where ids or errors differ."""
        return repr((self._processor, self.max_images))

    def __len__(self) -> int:
        return len(self._known)

    @property
    def of_data(self) -> int:
        """How many are of data, and were not sent."""
        return sum(not ref.sent for ref, _ in self._known.values())

    def add(self, refs: Iterable[ImageRef], read: ReadBytes):
        """Makes images known. `read`: gives the bytes of one of them. UsageError if two have one key."""
        for ref in refs:
            key = self.key(ref)
            with self._lock:
                if self._digests.setdefault(key, ref.digest) != ref.digest:
                    raise UsageError(
                        f"the images sha:{ref.digest} and sha:{self._digests[key]} have the same key {key:#x}; leave "
                        "one of them out"
                    )
                self._known.setdefault(ref.digest, (ref, read))

    def add_bytes(self, data: bytes) -> ImageRef:
        """Makes an image known that somebody has sent, until `forget`; it is decoded confined. UsageError as `size_of`,
        and without a processor."""
        processor = self.processor
        ref = ImageRef(sha256_of(data), *size_of(data), sent=True)
        processor.tokens(ref.width, ref.height)
        self.add([ref], lambda _: data)
        with self._lock:
            self._uses[ref.digest] += 1
        return ref

    def keep_in(self, own: Path | None, others: Sequence[Path] = ()):
        """From now on images of environments are kept in a folder, if there is one, and looked for there and in
        others."""
        self._folder, self._folders = own, [*([] if own is None else [own]), *others]

    def take_over(self):
        """Has the own folder hold the images of all."""
        for path in (path for folder in self._folders[1:] if self._folder is not None for path in folder.glob("*")):
            if _DIGEST.fullmatch(path.name) and not (own := self._folder / path.name).exists():
                self._folder.mkdir(parents=True, exist_ok=True)
                try:
                    own.hardlink_to(path)
                except OSError:  # on another file system
                    write_atomically(own, read_bytes(path, MAX_BYTES))

    def keep(self, data: bytes):
        """Makes an image of an environment known for the rest of the run. UsageError as `add_bytes`, and where such
        images are not read."""
        self._check_shown()
        ref = self.add_bytes(data)
        if self._folder is not None and not (path := self._folder / ref.digest).exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                write_atomically(path, data)
            except OSError:
                if not path.exists():  # another process may just have written the same
                    raise
        with self._lock:
            if self._folder is not None and self._known[ref.digest][0].sent:
                self._known[ref.digest] = ref, self._read_kept  # they are too many for the memory

    def _check_shown(self):
        """UsageError where images of environments are not read."""
        if self.shown_problem:
            raise UsageError(f"has images; {self.shown_problem}")
        self.processor  # noqa: B018  # UsageError: there is none

    def _read_kept(self, ref: ImageRef) -> bytes:
        """The bytes of an image in one of the folders. UsageError: it is gone."""
        problem = "no folder has it"
        for folder in self._folders:
            try:
                return read_bytes(folder / ref.digest, MAX_BYTES)
            except OSError as error:
                problem = f"{folder / ref.digest}: {reason_of(error)}"
        raise UsageError(f"an environment's image cannot be read: {problem}")

    def _of_digest(self, digest: str) -> ImageRef | None:
        """The image with this hash of its bytes; None: it is unknown, and no folder has it."""
        if digest not in self._known and any((folder / digest).exists() for folder in self._folders):
            ref = ImageRef(digest, *size_of(self._read_kept(ImageRef(digest, 0, 0))), sent=True)
            self.add([ref], self._read_kept)
        found = self._known.get(digest)
        return None if found is None else found[0]

    def _of_key(self, key: int) -> ImageRef | None:
        """The image that the key names; None: it is unknown."""
        if key not in self._digests and self._folders:
            names = [path.name for folder in self._folders if folder.is_dir() for path in folder.iterdir()]
            with self._lock:
                for name in filter(_DIGEST.fullmatch, names):
                    self._digests.setdefault(content_key(self.processor.digest(name)), name)
        return self._of_digest(self._digests[key]) if key in self._digests else None

    def check_known(self, text: str):
        """UsageError if a mark in the text of an environment names an image that this process does not know."""
        for match in PATTERN.finditer(text):
            self._check_shown()
            if self._of_digest(match[1]) is None:
                raise UsageError(
                    f"the image {readable(match[0])} of an environment is gone; {FOLDER}/ of the run had it"
                )

    def forget(self, refs: Iterable[ImageRef]):
        """Ends one use of each of these images that were sent; those without another use are no longer known."""
        with self._lock:
            for ref in refs:
                self._uses[ref.digest] -= 1
                if self._uses[ref.digest] <= 0:
                    del self._uses[ref.digest]
                    if self._known[ref.digest][0].sent:
                        del self._known[ref.digest]
                        del self._digests[self.key(ref)]
        self.when_forgotten()

    def key(self, ref: ImageRef) -> int:
        """What names an image among tokens."""
        return content_key(self.processor.digest(ref.digest))

    def tokens(self, ref: ImageRef) -> int:
        """Its rows there."""
        return self.processor.tokens(ref.width, ref.height)

    def ids(self, ref: ImageRef) -> list[int]:
        """Its ids there."""
        return self.processor.ids(self.key(ref), ref.width, ref.height)

    def of_token(self, token: int) -> ImageRef | None:
        """The image that an id is a row of; None: it is unknown."""
        return self._of_key(key_of(token))

    def bytes_of(self, ref: ImageRef) -> bytes:
        """The bytes of a known image. UsageError: the file is another one now."""
        data = self._known[ref.digest][1](ref)
        if sha256_of(data) != ref.digest:
            raise UsageError(f"image {ref.source}: has changed since the data were read")
        return data

    def pixels(self, key: int) -> Pixels:
        """What the tower reads of the image with a key. UsageError: unknown, changed, or damaged."""
        ref = self._of_key(key)
        if ref is None:
            raise UsageError(f"the image with the key {key:#x} is in none of the run's data")
        try:
            return self.processor.pixels(self._decoded(ref), ref.digest)
        except UsageError as error:
            raise UsageError(f"{ref.name} {ref.source or ''}: {error}") from None

    def _decoded(self, ref: ImageRef) -> "Image.Image":
        data = self.bytes_of(ref)
        return decode_confined(data) if ref.sent else decode(data)

    def write_thumbnails(self, folder: Path, texts: Iterable[str]):
        """Writes `NAME.png` for the first images whose names are in texts (`names_in`), unless it is there. An image
        that cannot be read is left out: it is only looked at."""
        names = itertools.islice(dict.fromkeys(name for text in texts for name in names_in(text)), THUMBNAILS)
        wanted = [name for name in names if not (folder / f"{name}.png").exists()]
        known = {digest[: len(wanted[0])]: ref for digest, (ref, _) in self._known.items()} if wanted else {}
        for name in wanted:
            with contextlib.suppress(UsageError, KeyError):
                folder.mkdir(parents=True, exist_ok=True)
                write_atomically(folder / f"{name}.png", thumbnail(self._decoded(known[name]), SIDE))

    def text(self, ids: Sequence[int], decode: Callable[[Sequence[int]], str]) -> str:
        """The text of ids, with the name of each image; `decode` gives that of tokens."""
        found = []
        for key, run in itertools.groupby(ids, lambda each: key_of(each) if each < 0 else None):
            tokens = list(run)
            if key is None:
                found.append(decode(tokens))
                continue
            ref = self._of_key(key)
            count = sum(row_of(each) == 0 for each in tokens)  # equal ones may follow each other
            found.append(("[image]" if ref is None else ref.name) * count)
        return "".join(found)

    # -- texts ---------------------------------------------------------------------------------------------------------

    def found(self, text: str) -> list[ImageRef]:
        """The images whose marks are in a text, in order."""
        refs = (self._of_digest(match[1]) for match in PATTERN.finditer(text))
        return [ref for ref in refs if ref is not None]

    def with_parts(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """A message whose content has images, with its content as parts. What the assistant says has none."""
        content = message.get("content")
        if not isinstance(content, str) or MARK not in content or message["role"] == "assistant":
            return message
        parts, start = [], 0
        for match in PATTERN.finditer(content):
            if self._of_digest(match[1]) is None:
                continue
            parts += [{"type": "text", "text": content[start : match.start()]}] if match.start() > start else []
            parts.append({"type": "image"})
            start = match.end()
        parts += [{"type": "text", "text": content[start:]}] if start < len(content) else []
        return {**message, "content": parts} if any(part["type"] == "image" for part in parts) else message

    def in_places(self, rendered: str, messages: Sequence[Mapping[str, Any]], flag: str) -> str:
        """A rendered text with the marks of the messages' images in the places that the template wrote for them.

        In contents the placeholder's string is marked as text, so each that is left is the template's.
        """
        refs = [
            ref
            for message in messages
            if isinstance(message["content"], str) and message["role"] != "assistant"
            for ref in self.found(message["content"])
        ]
        if not refs:
            return rendered
        first, *others = rendered.split(self.processor.placeholder)
        if len(others) != len(refs):
            raise UsageError(
                f"{flag}: the template writes {len(others)} {self.processor.placeholder} for {len(refs)} images"
            )
        return first + "".join(mark_of(ref) + text for ref, text in zip(refs, others, strict=True))

    def encode(self, rendered: str, encode: Callable[[str], list[int]]) -> list[int]:
        """Ids of a text of `in_places`; `encode` gives those of text with placeholders."""
        refs = iter(self.found(rendered))
        placeholder = self.processor.placeholder
        (place,) = encode(placeholder)
        ids = encode(PATTERN.sub(lambda _: placeholder, rendered))
        return [i for each in ids for i in (self.ids(next(refs)) if each == place else (each,))]


def cut_at_borders(ids: Sequence[int], cut: int) -> int:
    """How many of the first ids to leave out, at least `cut`, so that no image loses only some of its rows."""
    for at in range(cut, len(ids) if cut else 0):
        if ids[at] < 0:
            if row_of(ids[at]) == 0:
                break
            cut = at + 1
    return cut
