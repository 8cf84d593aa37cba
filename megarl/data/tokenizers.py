"""Tokenizers behind one small interface, and the table that names them."""

import itertools
from pathlib import Path
from typing import Protocol, Sequence

import sentencepiece

from megarl.errors import UsageError

# Stands for an id that has no piece, e.g. a row that only pads the embedding to a round size.
_NO_PIECE = "\ufffd"


class Tokenizer(Protocol):
    """Text to ids and back. Neither direction adds or keeps BOS, EOS or padding."""

    eos_id: int
    bos_id: int | None
    pad_id: int
    vocab_size: int

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


class SentencePieceTokenizer:
    """A SentencePiece model file.

    `bos_id` is None where the model has none; where it has no padding piece `pad_id` is `eos_id`.
    Raises UsageError (flag --tokenizer-model) for a missing or unreadable file, or a model without EOS.
    """

    def __init__(self, model_path: str):
        where = f"--tokenizer-model {model_path}"
        try:
            model = Path(model_path).read_bytes()
        except FileNotFoundError:
            raise UsageError(f"{where}: no such file") from None
        except OSError as error:
            raise UsageError(f"{where}: cannot be read: {error.strerror}") from None
        self._pieces = sentencepiece.SentencePieceProcessor()
        try:
            self._pieces.LoadFromSerializedProto(model)
        except (RuntimeError, OSError, TypeError):
            raise UsageError(f"{where}: not a SentencePiece model file") from None
        self.vocab_size = self._pieces.vocab_size()
        if self.vocab_size == 0:
            raise UsageError(f"{where}: not a SentencePiece model file (it holds no pieces)")
        if self._pieces.eos_id() < 0:
            raise UsageError(f"{where}: the model has no end-of-sequence (EOS) piece; train it with an eos_id")
        self.eos_id = self._pieces.eos_id()
        self.bos_id = self._pieces.bos_id() if self._pieces.bos_id() >= 0 else None
        self.pad_id = self._pieces.pad_id() if self._pieces.pad_id() >= 0 else self.eos_id

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, without BOS or EOS."""
        return self._pieces.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`; BOS, EOS and padding vanish, an id outside the vocabulary becomes U+FFFD.

        An id without a piece stays visible, so that a verifier never reads a clean answer where there was none.
        """
        runs = itertools.groupby((int(i) for i in ids), key=lambda i: 0 <= i < self.vocab_size)
        return "".join(self._pieces.decode(list(run)) if known else _NO_PIECE * len(list(run)) for known, run in runs)


_TOKENIZERS = {
    "SentencePieceTokenizer": SentencePieceTokenizer,
}


def build_tokenizer(tokenizer_type: str, tokenizer_model: str | None) -> Tokenizer:
    """The tokenizer of `--tokenizer-type` read from `--tokenizer-model`; UsageError where either is wrong."""
    if tokenizer_type not in _TOKENIZERS:
        raise UsageError(f"--tokenizer-type {tokenizer_type}: unknown; allowed: {', '.join(sorted(_TOKENIZERS))}")
    if not tokenizer_model:
        raise UsageError(f"--tokenizer-model: missing; {tokenizer_type} needs a model file")
    return _TOKENIZERS[tokenizer_type](tokenizer_model)
