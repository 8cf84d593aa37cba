"""Train a SentencePiece tokenizer (BPE) on the prompts and responses of prompt files.

    python tools/train_tokenizer.py --input data/sums/train.jsonl --vocab-size 32 --out data/tokenizer

Writes PREFIX.model and PREFIX.vocab. Text survives encoding and decoding unchanged, and prompt and response may be
encoded apart: no normalisation, no added space. Digits stay single. Every character of the input gets a piece; the
vocabulary ends smaller than asked for where the text has nothing more to merge. The same input gives the same bytes.
"""

import argparse
import io
import os
import sys
import typing
from pathlib import Path

import sentencepiece

from megarl.data.prompts import load_prompts
from megarl.data.tokenizers import build_tokenizer
from megarl.errors import UsageError

_SPECIAL_IDS = {"pad_id": 0, "unk_id": 1, "bos_id": 2, "eos_id": 3}
_BYTES = 256


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> typing.NoReturn:
        raise UsageError(message)


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    parser = _Parser(description=__doc__.split("\n\n")[0], allow_abbrev=False)
    parser.add_argument("--input", nargs="+", required=True, metavar="FILE", help="prompt files (JSON lines)")
    parser.add_argument("--vocab-size", type=int, required=True, help="upper limit, four special pieces included")
    parser.add_argument("--out", required=True, metavar="PREFIX", help="writes PREFIX.model and PREFIX.vocab")
    parser.add_argument(
        "--byte-fallback", action="store_true",
        help="256 pieces more, so that characters outside the input are spelt as bytes rather than lost",
    )
    return parser.parse_args(argv)


def read_texts(paths: list[str]) -> list[str]:
    """Prompt and response (or else answer) of every line."""
    texts = []
    for path in paths:
        for prompt in load_prompts(path, "--input"):
            response = prompt.response if prompt.response is not None else prompt.answer
            texts += [prompt.prompt, response] if response else [prompt.prompt]
    return texts


def train(texts: list[str], vocab_size: int, byte_fallback: bool) -> bytes:
    """A serialized SentencePiece model; UsageError where `vocab_size` cannot hold the characters of `texts`."""
    # A space is stored as U+2581 and so always takes one place.
    characters = set("".join(texts).replace(" ", "\u2581"))
    needed = len(characters) + len(_SPECIAL_IDS) + (_BYTES if byte_fallback else 0)
    if vocab_size < needed:
        raise UsageError(
            f"--vocab-size {vocab_size}: too small; {len(characters)} different characters, {len(_SPECIAL_IDS)} "
            f"special pieces{' and 256 bytes' if byte_fallback else ''} need at least {needed}"
        )
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(texts), model_writer=model, model_type="bpe", vocab_size=vocab_size,
            hard_vocab_limit=False, character_coverage=1.0, byte_fallback=byte_fallback, split_digits=True,
            normalization_rule_name="identity", add_dummy_prefix=False, remove_extra_whitespaces=False,
            # Longer texts would be skipped, and their characters with them; 10 is the least it takes.
            max_sentence_length=max(10, *(len(text.encode()) + 1 for text in texts)),
            num_threads=1, minloglevel=2, **_SPECIAL_IDS,
        )
    except (RuntimeError, OSError) as error:
        raise UsageError(f"--input: SentencePiece cannot train on this text: {error}") from None
    return model.getvalue()


def write_model(model: bytes, prefix: str) -> None:
    """PREFIX.model and PREFIX.vocab (piece, tab, score), each replaced in one step."""
    pieces = sentencepiece.SentencePieceProcessor(model_proto=model)
    vocab = "".join(f"{pieces.id_to_piece(i)}\t{pieces.get_score(i):g}\n" for i in range(pieces.vocab_size()))
    Path(prefix).parent.mkdir(parents=True, exist_ok=True)
    for ending, content in ((".vocab", vocab.encode()), (".model", model)):
        partial = Path(f"{prefix}{ending}.partial")
        partial.write_bytes(content)
        os.replace(partial, f"{prefix}{ending}")


def check_round_trip(model: bytes, texts: list[str]) -> None:
    """UsageError for the first text that encoding and decoding would change."""
    pieces = sentencepiece.SentencePieceProcessor(model_proto=model)
    for text in texts:
        if pieces.decode(pieces.encode(text)) != text:
            raise UsageError(f"--input: SentencePiece cannot represent {text[:60]!r}; remove its unusual characters")


def main(argv: list[str]) -> int:
    try:
        arguments = parse_arguments(argv)
        texts = read_texts(arguments.input)
        model = train(texts, arguments.vocab_size, arguments.byte_fallback)
        check_round_trip(model, texts)
        write_model(model, arguments.out)
    except UsageError as error:
        print(f"train_tokenizer: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"train_tokenizer: --out {arguments.out}: cannot be written: {error.strerror}", file=sys.stderr)
        return 2
    size = build_tokenizer("SentencePieceTokenizer", f"{arguments.out}.model").vocab_size
    print(f"{arguments.out}.model: {size} pieces from {len(texts)} texts")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
