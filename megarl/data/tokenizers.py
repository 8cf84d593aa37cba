"""The tokenizer interface, SentencePiece, and the tokenizers by the name of `--tokenizer-type`.

Special tokens are also strings: they are found in a text, and marked in user text so that they stay ordinary text.
"""

import hashlib
import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

import sentencepiece

from megarl import plugins
from megarl.data import TOKENIZERS
from megarl.errors import UsageError
from megarl.plain_files import read_bytes, reading
from megarl.plain_values import whole_unicode


class Tokenizer(Protocol):
    """Text to ids and back. `encode` adds no BOS, EOS or padding; `decode` drops them. Half of a surrogate pair, which
    UTF-8 lacks, is encoded as U+FFFD.

    `end_ids`: ids that end a response, `eos_id` among them; `end_tokens`: their strings. `special`: strings of the
    special tokens that a chat template may write, with their ids. `encode` never returns such an id, whatever the text
    says; `encode_template` returns it wherever the string occurs. `template`: the chat template in the tokenizer's
    files, or None. `fingerprint`: hash of these files. `byte_level`: whether the pieces spell bytes (byte-level BPE).
    `special_ends_bytes`: whether `decode` reads byte pieces before and after a special token apart. `prefix_ids`: what
    the tokenizer's own rules put before a text: BOS, or nothing. `named`: strings of special tokens by the name that
    chat templates use (bos_token, eos_token …). `piece`: the vocabulary's string of an id, None without a token,
    which `decode` gives as U+FFFD. Batches are encoded on several threads.
    """

    eos_id: int
    end_ids: tuple[int, ...]
    bos_id: int | None
    pad_id: int
    vocab_size: int
    eos_token: str
    end_tokens: tuple[str, ...]
    bos_token: str | None
    special: Mapping[str, int]
    template: str | None
    fingerprint: str
    byte_level: bool
    special_ends_bytes: bool
    prefix_ids: tuple[int, ...]
    named: Mapping[str, str]

    def encode(self, text: str) -> list[int]: ...

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]: ...

    def encode_template(self, text: str) -> list[int]: ...

    def encode_template_batch(self, texts: Sequence[str]) -> list[list[int]]: ...

    def decode(self, ids: Sequence[int]) -> str: ...

    def piece(self, number: int) -> str | None: ...


class SentencePieceTokenizer:
    """A SentencePiece model file; its control pieces are the special tokens.

    A user-defined piece is ordinary text, which any text may contain. `bos_id` is None if the model has none; without
    a padding piece `pad_id` is `eos_id`. Raises UsageError (naming `flag`) for a missing or unreadable
    file, or a model without EOS.
    """

    template = None
    byte_level, special_ends_bytes = False, True
    prefix_ids = ()  # a model file has no such rule

    def __init__(self, model_path: str, flag: str = "--tokenizer-model"):
        where = f"{flag} {model_path}"
        self._pieces = _read_pieces(model_path, where)
        self.fingerprint = hashlib.blake2b(self._pieces.serialized_model_proto(), digest_size=16).hexdigest()
        self.vocab_size = self._pieces.vocab_size()
        if self.vocab_size == 0:
            raise UsageError(f"{where}: not a SentencePiece model file (it holds no pieces)")
        if self._pieces.eos_id() < 0:
            raise UsageError(f"{where}: the model has no end-of-sequence (EOS) piece; train it with an eos_id")
        self.eos_id = self._pieces.eos_id()
        self.bos_id = self._pieces.bos_id() if self._pieces.bos_id() >= 0 else None
        self.pad_id = self._pieces.pad_id() if self._pieces.pad_id() >= 0 else self.eos_id
        self.eos_token = self._pieces.id_to_piece(self.eos_id)
        self.end_ids, self.end_tokens = (self.eos_id,), (self.eos_token,)
        self.bos_token = None if self.bos_id is None else self._pieces.id_to_piece(self.bos_id)
        names = {"bos_token": self.bos_token, "eos_token": self.eos_token}
        self.named = {name: token for name, token in names.items() if token is not None}
        control = [i for i in range(self.vocab_size) if self._pieces.is_control(i)]
        self.special = {self._pieces.id_to_piece(i): i for i in control}
        self._pattern = pattern_of(self.special)

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, without BOS or EOS; a special token's string is encoded like any other text."""
        return self._pieces.encode(whole_unicode(text))

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` of each text, on several threads."""
        return self._pieces.encode([whole_unicode(text) for text in texts]) if texts else []

    def encode_template(self, text: str) -> list[int]:
        """Ids of `text`, in which the string of a special token becomes its id."""
        return encode_around_special(text, self.special, self._pattern, self.encode)

    def encode_template_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode_template` of each text."""
        return [self.encode_template(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids` without BOS, EOS and padding; an id outside the vocabulary becomes U+FFFD."""
        return decode_known(map(int, ids), range(self.vocab_size).__contains__, self._pieces.decode)

    def piece(self, number: int) -> str | None:
        """The vocabulary's string of an id, or None for an id outside the vocabulary."""
        return self._pieces.id_to_piece(number) if 0 <= number < self.vocab_size else None


def _read_pieces(model_path: str, where: str) -> sentencepiece.SentencePieceProcessor:
    with reading(where, missing="no such file"):
        model = read_bytes(model_path)
    pieces = sentencepiece.SentencePieceProcessor()
    try:
        pieces.LoadFromSerializedProto(model)
    except (RuntimeError, OSError, TypeError):
        raise UsageError(f"{where}: not a SentencePiece model file") from None
    return pieces


def build_tokenizer(
    tokenizer_type: str, tokenizer_model: str | None, flag_prefix: str = "", flag: str | None = None
) -> Tokenizer:
    """The tokenizer of `--tokenizer-type` read from `--tokenizer-model`; UsageError if either is wrong. `flag_prefix`:
    a role's prefix of the flags' names in error messages, e.g. "reward-"; `flag`: that gave the path, if not
    --tokenizer-model.
    """
    if tokenizer_type not in TOKENIZERS:
        raise UsageError(
            f"--{flag_prefix}tokenizer-type {tokenizer_type}: unknown; allowed: {', '.join(sorted(TOKENIZERS))}"
        )
    flag = flag or f"--{flag_prefix}tokenizer-model"
    if not tokenizer_model:
        raise UsageError(f"{flag}: missing; {tokenizer_type} needs a model file")
    return plugins.load("--tokenizer-type", tokenizer_type, TOKENIZERS)(tokenizer_model, flag)


# -- special tokens as strings -----------------------------------------------------------------------------------------


# Unicode noncharacters: never in text meant for interchange, and not white space that a template would trim.
MARK, _END = "\ufdd0", "\ufdd1"

# Decoded text of an id without a token, e.g. of a row that only pads the embedding.
REPLACEMENT = "\ufffd"


def pattern_of(strings: Iterable[str]) -> re.Pattern[str]:
    """A pattern that matches any of `strings`, longest first; its one group makes `split` keep them. None: no match."""
    longest_first = sorted(strings, key=len, reverse=True)
    return re.compile(f"({'|'.join(map(re.escape, longest_first)) or '(?!)'})")


def encode_around_special(
    text: str, special: Mapping[str, int], pattern: re.Pattern[str], encode: Callable[[str], list[int]]
) -> list[int]:
    """Ids of `text`: special strings become their ids, and `encode` gives those of the text between them."""
    ids: list[int] = []
    for number, segment in enumerate(pattern.split(text)):
        if number % 2:
            ids.append(special[segment])
        elif segment:
            ids += encode(segment)
    return ids


def decode_known(ids: Iterable[int], is_known: Callable[[int], bool], decode: Callable[[list[int]], str]) -> str:
    """Text of `ids`, with U+FFFD for each without a token. It stays visible, so that a verifier never sees a clean
    answer where the policy gave none.
    """
    runs = itertools.groupby(ids, key=is_known)
    return "".join(decode(list(run)) if known else REPLACEMENT * len(list(run)) for known, run in runs)


class Marks:
    """Replaces special tokens' strings in user text by marks before a template is rendered around it.

    Marks in the text are replaced too, so every mark in a marked text comes from `mark`, whatever the text holds.
    """

    def __init__(self, special: Iterable[str]):
        self._strings = [*special, MARK]
        self._numbers = {string: number for number, string in enumerate(self._strings)}
        self._pattern = pattern_of(self._strings)
        self._marks = re.compile(f"{MARK}([0-9]+){_END}")

    def mark(self, text: str) -> str:
        return self._pattern.sub(lambda match: f"{MARK}{self._numbers[match[0]]}{_END}", text)

    def unmark(self, text: str) -> str:
        """The original of a marked text."""
        return self._marks.sub(lambda match: self._strings[int(match[1])], text) if MARK in text else text
