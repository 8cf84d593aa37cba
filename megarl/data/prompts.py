"""Prompts, read from files and fully checked before any work starts (`line_files.py` says what a line has)."""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import hashlib
import itertools
import json
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from megarl.data import node_files
from megarl.data.columns import Columns
from megarl.data.images.book import Images
from megarl.data.images.forms import NO_IMAGES, ImageTable, SharedImages
from megarl.data.line_files import read_files
from megarl.data.messages import text_of
from megarl.data.mixture import NO_ENTRY, MixtureEntry, is_mixture, read_mixture, shares, whole_weights
from megarl.data.order import DifficultyPools, MixtureOrder, PromptOrder
from megarl.data.prompt import Prompt, present_fields
from megarl.data.ragged import Ragged
from megarl.data.sources import find_files
from megarl.data.tokenizers import pattern_of
from megarl.errors import UsageError

if TYPE_CHECKING:
    from megarl.data.conversations import Encoder


_LOOKED_AT = 100  # prompts, for a note about their texts


class TooLong(UsageError):
    """A line has more tokens than the limits allow."""

    CURE = "; --filter-long-prompts drops such lines"


@dataclass(frozen=True)
class PromptFiles:
    """Where the lines of a set come from.

    `value`: what the user gave for `flag`. `starts`: number of each file's first line. `verbatim`: one file that is
    read as it is, so that its bytes are the lines'. `notes`: what was recognised in the files, for the user.
    `entries`: of a mixture; `firsts`: number of each entry's first line. `columns`: of each file, the names
    of its columns by field. `images`: of all lines; a line has the numbers of its own.
    """

    flag: str
    value: str
    files: tuple[str, ...]
    starts: tuple[int, ...]
    verbatim: bool
    notes: tuple[str, ...] = ()
    entries: tuple[MixtureEntry, ...] = ()
    firsts: tuple[int, ...] = ()
    columns: tuple[dict[str, str], ...] = dataclasses.field(default=(), compare=False)
    images: SharedImages = dataclasses.field(default=NO_IMAGES, compare=False, repr=False)


class PromptSet:
    """The prompts of some files, in their order. It holds the lines' text, and each access reads one of them."""

    def __init__(self, lines: Ragged, source: PromptFiles, kept: np.ndarray | None = None):
        """`lines`: the UTF-8 bytes of each line, all valid. `kept`: [N] ascending, the lines of the set, of which one
        may be there several times; None: all."""
        self._lines, self._source, self._kept = lines, source, kept
        self.flag, self.path, self.notes = source.flag, source.value, source.notes
        self.entries = source.entries  # of a mixture
        self.images = source.images  # of all files' lines

    def __len__(self) -> int:
        return len(self._lines if self._kept is None else self._kept)

    def __getitem__(self, index: int) -> Prompt:
        index = range(len(self))[index]
        fields = present_fields(json.loads(self._lines.view(self._line(index)).tobytes()))
        if (environment := self.entry_of(index).environment) is not None:
            fields.setdefault("environment", environment)
        columns = self._source.columns
        names = columns[bisect.bisect_right(self._source.starts, self._line(index)) - 1] if columns else {}
        images = tuple(self._source.images[number] for number in fields.pop("images", ()))
        return Prompt(index=index, **fields, images=images, column_names=names)

    def images_of(self, index: int) -> list[dict[str, Any]]:
        """The images of a prompt for rewards: `bytes` of the file, `width` and `height`."""
        images = self[index].images if len(self.images) else ()
        return [{"bytes": self.images.read(ref), "width": ref.width, "height": ref.height} for ref in images]

    def __iter__(self) -> Iterator[Prompt]:
        return (self[index] for index in range(len(self)))

    def entry_of(self, index: int) -> MixtureEntry:
        """The entry of the mixture that a prompt is of; without a mixture, one that says nothing."""
        if not self.entries:
            return NO_ENTRY
        return self.entries[bisect.bisect_right(self._source.firsts, self._line(index)) - 1]

    def response_limit(self, index: int) -> int | None:
        """Tokens that a response to a prompt may have by its file in a mixture; None: the limit of the flags."""
        return self.entry_of(index).max_response_length

    def group_size(self, index: int) -> int | None:
        """Responses to a prompt by its file in a mixture; None: the number of the flags."""
        return self.entry_of(index).samples_per_prompt

    def group_sizes(self, lines: Iterable[int], size: int) -> list[int]:
        """Responses to each prompt; `size`: to one whose file in a mixture does not say how many."""
        return [self.group_size(line) or size for line in lines]

    def of_entries(self, numbers: Container[int]) -> PromptSet:
        """The prompts of these entries of the mixture, by their numbers."""
        ends = np.cumsum(self.sizes())
        own = [np.arange(end - size, end) for end, size in zip(ends, self.sizes(), strict=True)]
        lines = np.concatenate([lines for number, lines in enumerate(own) if number in numbers])
        return PromptSet(self._lines, self._source, lines if self._kept is None else self._kept[lines])

    def sizes(self) -> list[int]:
        """Prompts of each entry of the mixture."""
        bounds = np.array([*self._source.firsts, len(self._lines)])
        return np.diff(bounds if self._kept is None else np.searchsorted(self._kept, bounds)).tolist()

    def order(self, seed: int, pools: DifficultyPools | None = None) -> PromptOrder | MixtureOrder:
        """The order in which a run draws the prompts, at its beginning. `pools`: of this set."""
        if not self.entries:
            return PromptOrder(len(self), seed, chances=None if pools is None else pools.chances)
        return MixtureOrder(self.sizes(), whole_weights(self.entries), seed, pools)

    def note_special_tokens(self, encoder: Encoder) -> PromptSet:
        """The set with a note if one of its first texts holds a special token's string, which is read as text. Such
        texts were often rendered with a chat template before, or begin with BOS, which the prompt then has twice.
        """
        pattern = pattern_of(encoder.tokenizer.special)
        for index in range(min(len(self), _LOOKED_AT)):
            if found := pattern.search("\n".join(_texts_of(self[index]))):
                text = f"{found[0]!r} is read as text, not as the special token of this name"
                return self.noted(text, self.where(index))
        return self

    def _line(self, index: int) -> int:
        return index if self._kept is None else int(self._kept[index])

    def where(self, index: int) -> str:
        """`--prompts data/train.jsonl:17`, the start of an error message about prompt `index`: line or row, from 1."""
        line, starts = self._line(index), self._source.starts
        file = bisect.bisect_right(starts, line) - 1
        return f"{self.flag} {self._source.files[file]}:{line - starts[file] + 1}"

    @contextlib.contextmanager
    def named_errors(self, index: int) -> Iterator[None]:
        """A UsageError about prompt `index` begins with `where`."""
        try:
            yield
        except UsageError as error:
            raise UsageError(f"{self.where(index)}: {error}") from None

    def encode(self, encoder: Encoder, max_prompt_length: int | None = None) -> Ragged:
        """Tokens of every prompt as the policy reads it; UsageError if one has none or more than `max_prompt_length`.
        One rank of a node encodes them for all. None: any length, to check that `encoder` accepts every prompt.
        """

        def encoded() -> dict[str, np.ndarray]:
            return Ragged.of_rows(self._encoded(prompt, encoder, max_prompt_length) for prompt in self).arrays()

        return Ragged.of_arrays(self.on_node(encoded, "tokens", encoder, max_prompt_length))

    def encode_for_teacher(self, encoder: Encoder, max_length: int) -> Ragged | None:
        """Tokens of the `teacher_prompt` of every prompt, none for a prompt without; None if no prompt has one. One
        rank of a node encodes them for all. UsageError if one has more than `max_length` tokens.
        """

        def rows() -> Iterator[list[int]]:
            for prompt in self:
                if prompt.teacher_prompt is None:
                    yield []
                    continue
                tokens = encoder.prompt(dataclasses.replace(prompt, prompt=prompt.teacher_prompt))
                if len(tokens) > max_length:
                    raise UsageError(
                        f"{self.where(prompt.index)}: teacher_prompt has {len(tokens)} tokens; "
                        f"--teacher-max-prompt-length allows {max_length}"
                    )
                yield tokens

        arrays = self.on_node(lambda: Ragged.of_rows(rows()).arrays(), "teacher", encoder, max_length)
        return Ragged.of_arrays(arrays) if len(arrays["values"]) else None

    def note_unread(self, field: str, flag: str) -> PromptSet:
        """The set with a note if one of its first prompts has a field that is not read without a flag."""
        has_one = any(getattr(self[index], field) is not None for index in range(min(len(self), _LOOKED_AT)))
        return self.noted(f"{field} is not read without {flag}") if has_one else self

    def encode_fitting(self, encoder: Encoder, max_prompt_length: int) -> tuple[PromptSet, Ragged]:
        """The prompts of at most `max_prompt_length` tokens, and their tokens. UsageError if there is none. One rank of
        a node encodes them for all. A note says how many were dropped.
        """

        def fitting() -> dict[str, np.ndarray]:
            kept: list[int] = []

            def rows() -> Iterator[list[int]]:
                for prompt in self:
                    tokens = self._encoded(prompt, encoder, None)
                    if len(tokens) <= self._limit(prompt.index, max_prompt_length):
                        kept.append(prompt.index)
                        yield tokens

            return Ragged.of_rows(rows()).arrays() | {"kept": np.array(kept, np.int64)}

        arrays = self.on_node(fitting, "fitting", encoder, max_prompt_length)
        limits = f"--max-prompt-length {max_prompt_length}"
        return self.without_long(arrays["kept"], "prompts", limits, str(max_prompt_length)), Ragged.of_arrays(arrays)

    def without_long(self, kept: np.ndarray, unit: str, limits: str, allowed: str) -> PromptSet:
        """The set of the prompts `kept`, with a note on how many were dropped; UsageError if there is none. `kept`: [M]
        ascending numbers of prompts, each as often as the set has it. `unit`: what a line of this set is. `limits`: the
        flags that limit the tokens of a line, with their values; `allowed` is these values alone.
        """
        if not len(kept):
            raise UsageError(f"{limits}: each of the {len(self):,} {unit} of {self.flag} {self.path} has more tokens")
        if np.array_equal(kept, np.arange(len(self))):
            return self
        dropped = len(self) - len(np.unique(kept))
        note = f"dropped {dropped:,} of {len(self):,} {unit} longer than {allowed} tokens"
        lines = kept if self._kept is None else self._kept[kept]
        found = PromptSet(self._lines, (self.noted(note) if dropped else self)._source, lines)
        for entry, size in zip(self.entries, found.sizes() if self.entries else [], strict=True):
            if not size:
                raise UsageError(
                    f"{self.flag} {self.path}: {entry.name}: each of its {unit} has more tokens than allowed"
                )
        return found

    def noted(self, text: str, where: str | None = None) -> PromptSet:
        """The set with one more note for the user. `where`: what it is about; None: the whole set."""
        notes = (*self.notes, f"{where or f'{self.flag} {self.path}'}: {text}")
        return PromptSet(self._lines, dataclasses.replace(self._source, notes=notes), self._kept)

    def on_node(
        self, compute: Callable[[], dict[str, np.ndarray]], name: str, encoder: Encoder, *options
    ) -> dict[str, np.ndarray]:
        """Arrays that one rank of a node computes from these prompts with an encoder (`node_files.arrays`)."""

        def key() -> tuple:
            return name, *self._key(), encoder.fingerprint, options

        return node_files.arrays(key, compute)

    def _key(self) -> tuple:
        kept = None if self._kept is None else hashlib.blake2b(self._kept.tobytes(), digest_size=16).hexdigest()
        return self._source, [node_files.identity(file) for file in self._source.files], kept

    def sha256(self) -> str:
        """Hash of the prompts: of the file's bytes if they are read as they are, else of the lines made of them; with
        what a mixture says about them."""

        def digest() -> dict[str, np.ndarray]:
            found = hashlib.sha256()
            if self._source.verbatim and self._kept is None:
                with open(self._source.files[0], "rb") as file:
                    found = hashlib.file_digest(file, "sha256")
            elif self._kept is None:
                found.update(self._lines.values)
            else:
                for line in self._kept.tolist():
                    found.update(self._lines.view(line))
            for entry, first in zip(self.entries, self._source.firsts, strict=True):
                found.update(f"({entry.facts()}, {first})".encode())
            return {"digest": np.frombuffer(found.digest(), np.uint8)}

        return node_files.arrays(lambda: ("sha256", *self._key()), digest)["digest"].tobytes().hex()

    def _encoded(self, prompt: Prompt, encoder: Encoder, max_prompt_length: int | None) -> list[int]:
        where = self.where(prompt.index)
        if prompt.messages is not None:
            raise UsageError(f"{where}: prompt is missing; messages are for supervised training")
        limit = None if max_prompt_length is None else self._limit(prompt.index, max_prompt_length)
        try:
            return prompt_tokens(prompt, encoder, limit)
        except UsageError as error:
            is_own = isinstance(error, TooLong) and limit != max_prompt_length
            raise UsageError(f"{where}: {error}" + " (the limit of its file in the mixture)" * is_own) from None

    def _limit(self, index: int, max_prompt_length: int) -> int:
        return self.entry_of(index).max_prompt_length or max_prompt_length


def prompt_tokens(prompt: Prompt, encoder: Encoder, max_prompt_length: int | None = None) -> list[int]:
    """Tokens of one prompt; UsageError if it has none, TooLong if more than `max_prompt_length` (None: no limit)."""
    ids = encoder.prompt(prompt)
    if not ids:
        raise UsageError("the prompt becomes no token")
    if max_prompt_length is not None and len(ids) > max_prompt_length:
        rows = sum(token < 0 for token in ids)
        of_images = f", {rows} of them of images, which --image-max-pixels makes fewer" if rows else ""
        raise TooLong(
            f"the prompt has {len(ids)} tokens{of_images}; --max-prompt-length allows {max_prompt_length}{TooLong.CURE}"
        )
    return ids


def load_prompts(
    value: str,
    flag: str = "--prompts",
    columns: Columns = Columns(),
    images: Images | None = None,
    images_folder: str | None = None,
) -> PromptSet:
    """Reads and checks every line or row of the files that `value` names (`sources.find_files`).

    One rank of a node does it for all. Blank lines may follow the last prompt of a JSON file.

    `flag`: names its option in error messages. `columns`: what the prompts are read for, and the columns that the user
    names. `images`: learns those of the lines; None: they are not read. `images_folder`: of their paths; None: that of
    each data file. UsageError: with file and line for the first bad line or row; for a file that is missing, damaged,
    not UTF-8, without prompts, or without a column that is needed.
    """
    entries = read_mixture(value, flag, columns.purpose) if is_mixture(value) else ()
    found = [find_files(entry.prompts, f"{flag} {value}: {entry.name}:") for entry in entries]
    files = tuple(itertools.chain.from_iterable(found)) if entries else find_files(value, flag)

    def key() -> tuple:
        of_images = None if images is None else (images.fingerprint, images_folder)
        return "prompts", flag, value, columns, of_images, [(file, node_files.identity(file)) for file in files]

    table = None if images is None else ImageTable(images, images_folder)
    arrays = node_files.arrays(key, lambda: read_files(files, value, flag, columns, table))
    shared = SharedImages(arrays)
    if images is not None:
        images.add(shared, shared.read)
    about = json.loads(arrays["about"].tobytes())
    starts = [*about["starts"], len(arrays["offsets"]) - 1]
    firsts = [starts[sum(map(len, found[:i]))] for i in range(len(found) + 1)]
    for entry, first, end in zip(entries, firsts, firsts[1:], strict=False):
        if first == end:
            raise UsageError(f"{flag} {value}: {entry.name}: the files hold no prompt")
    notes = (*about["notes"], *shares(entries, firsts, f"{flag} {value}"))
    found_at = PromptFiles(flag, value, files, tuple(about["starts"]), about["verbatim"], notes, entries)
    source = dataclasses.replace(found_at, firsts=tuple(firsts[:-1]), columns=tuple(about["columns"]), images=shared)
    return PromptSet(Ragged.of_arrays(arrays), source)


def _texts_of(prompt: Prompt) -> list[str]:
    return [
        prompt.text,
        text_of(prompt.messages or []),
        *filter(None, (prompt.response, prompt.chosen, prompt.rejected)),
    ]
