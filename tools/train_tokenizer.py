"""Trains a tokenizer on the texts of prompt files: prompts, responses, conversations and preferences.

    python tools/train_tokenizer.py --input data/sums/train.jsonl --vocab-size 32 --out data/tokenizer
    python tools/train_tokenizer.py --input data/prefs.jsonl --vocab-size 512 --out data/reward-tokenizer --kind bpe \\
        --special '<|im_start|>' --eos-token '<|im_end|>' --chat-template data/chatml.jinja

`--kind sentencepiece` (BPE) writes PREFIX.model and PREFIX.vocab; `--kind bpe`, byte-level BPE for Hugging Face
tokenizers, writes a folder PREFIX with tokenizer.json and tokenizer_config.json. Encoding and decoding preserve the
text, and prompt and response may be encoded separately: no normalisation, no added space. Each digit is a token. Every
character of the input can be encoded. The vocabulary is smaller than requested if the text has no more pairs to merge.
The same input gives the same bytes.
"""

import argparse
import io
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import sentencepiece
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from megarl.data.conversations import build_encoder
from megarl.data.messages import content_of
from megarl.data.prompt import Prompt
from megarl.data.prompts import load_prompts
from megarl.data.tokenizers import build_tokenizer
from megarl.errors import ArgumentParser, UsageError, refuses_in_one_line, writing
from megarl.plain_files import MAX_BYTES, read_text, reading

_SPECIAL_IDS: dict[str, Any] = {"pad_id": 0, "unk_id": 1, "bos_id": 2, "eos_id": 3}
_BYTES = 256
_TYPES = {"sentencepiece": "SentencePieceTokenizer", "bpe": "HuggingFaceTokenizer"}


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    parser = ArgumentParser(description=__doc__.split("\n\n")[0], allow_abbrev=False)
    parser.add_argument("--input", nargs="+", required=True, metavar="FILE", help="prompt files (JSON lines)")
    parser.add_argument(
        "--vocab-size", type=int, required=True, help="maximum number of tokens, including special ones"
    )
    parser.add_argument(
        "--out", required=True, metavar="PREFIX", help="writes PREFIX.model and PREFIX.vocab; bpe: folder PREFIX"
    )
    parser.add_argument(
        "--kind", choices=sorted(_TYPES), default="sentencepiece", help="tokenizer; default: %(default)s"
    )
    parser.add_argument("--bos-token", default="<s>", metavar="TOKEN", help="begin token; default: %(default)s")
    parser.add_argument("--eos-token", default="</s>", metavar="TOKEN", help="end token; default: %(default)s")
    parser.add_argument(
        "--special", nargs="+", default=[], metavar="TOKEN", help="further special tokens, e.g. of a chat template"
    )
    parser.add_argument("--chat-template", metavar="FILE", help="bpe: Jinja file stored with the tokenizer")
    parser.add_argument(
        "--byte-fallback",
        action="store_true",
        help="256 byte tokens, to encode characters outside the input as bytes instead of <unk> (bpe: always)",
    )
    arguments = parser.parse_args(argv)
    if arguments.kind == "bpe" and arguments.byte_fallback:
        raise UsageError("--byte-fallback: --kind bpe always encodes bytes; leave it out")
    if arguments.kind == "sentencepiece" and arguments.chat_template:
        raise UsageError(
            f"--chat-template {arguments.chat_template}: a SentencePiece model cannot store it; give it to the run"
        )
    special = ["<pad>", "<unk>", arguments.bos_token, arguments.eos_token, *arguments.special]
    repeated = next((token for token in special if special.count(token) > 1 or not token), None)
    if repeated is not None:
        raise UsageError(f"--special: {repeated!r} is empty or given twice; <pad> and <unk> always exist")
    return arguments


def read_texts(paths: list[str]) -> list[str]:
    """All texts of all lines: prompt or messages, response (otherwise answer), chosen and rejected."""
    return [text for path in paths for prompt in load_prompts(path, "--input") for text in _texts_of(prompt)]


def _texts_of(prompt: Prompt) -> list[str]:
    messages = prompt.messages if prompt.messages is not None else prompt.conversation
    response = prompt.response if prompt.response is not None else prompt.answer
    texts = [content_of(message) for message in messages] + [response, prompt.chosen, prompt.rejected]
    return [text for text in texts if text]


def train(
    texts: list[str], vocab_size: int, byte_fallback: bool, bos: str = "<s>", eos: str = "</s>",
    special: Sequence[str] = (),
) -> bytes:  # fmt: skip
    """A serialized SentencePiece model; UsageError if `vocab_size` is too small for the characters of `texts`."""
    # A space is stored as U+2581, which always takes a token.
    characters = set("".join(texts).replace(" ", "\u2581"))
    reserved = len(_SPECIAL_IDS) + len(special)
    needed = len(characters) + reserved + (_BYTES if byte_fallback else 0)
    if vocab_size < needed:
        raise UsageError(
            f"--vocab-size {vocab_size}: too small; {len(characters)} different characters, {reserved} "
            f"special pieces{' and 256 bytes' if byte_fallback else ''} need at least {needed}"
        )
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(texts),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab_size,
            hard_vocab_limit=False,
            character_coverage=1.0,
            byte_fallback=byte_fallback,
            split_digits=True,
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            bos_piece=bos,
            eos_piece=eos,
            control_symbols=list(special),
            # Longer texts would be skipped with their characters; 10 is SentencePiece's minimum.
            max_sentence_length=max(10, *(len(text.encode()) + 1 for text in texts)),
            num_threads=1,
            minloglevel=2,
            **_SPECIAL_IDS,
        )
    except (RuntimeError, OSError) as error:
        raise UsageError(f"--input: SentencePiece cannot train on this text: {error}") from None
    return model.getvalue()


def train_bpe(texts: list[str], vocab_size: int, bos: str, eos: str, special: Sequence[str]) -> str:
    """The tokenizer.json of byte-level BPE; UsageError if `vocab_size` is too small for the bytes."""
    special = ["<pad>", bos, eos, *special]
    if vocab_size < _BYTES + len(special):
        raise UsageError(
            f"--vocab-size {vocab_size}: too small; 256 bytes and {len(special)} special tokens need at least "
            f"{_BYTES + len(special)}"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer.to_str(pretty=True)


def make_files(arguments: argparse.Namespace, texts: list[str]) -> dict[str, bytes]:
    """Path suffix -> content of each output file."""
    special = (arguments.bos_token, arguments.eos_token, arguments.special)
    if arguments.kind == "sentencepiece":
        model = train(texts, arguments.vocab_size, arguments.byte_fallback, *special)
        pieces = sentencepiece.SentencePieceProcessor(model_proto=model)
        vocab = "".join(f"{pieces.id_to_piece(i)}\t{pieces.get_score(i):g}\n" for i in range(pieces.vocab_size()))
        return {".vocab": vocab.encode(), ".model": model}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": arguments.bos_token,
        "eos_token": arguments.eos_token, "pad_token": "<pad>", "additional_special_tokens": arguments.special,
        "clean_up_tokenization_spaces": False,
    }  # fmt: skip
    if arguments.chat_template:
        config["chat_template"] = _read_template(arguments.chat_template)
    model = train_bpe(texts, arguments.vocab_size, *special)
    return {
        "/tokenizer_config.json": (json.dumps(config, ensure_ascii=False, indent=2) + "\n").encode(),
        "/tokenizer.json": (model + "\n").encode(),
    }


def _read_template(path: str) -> str:
    with reading(f"--chat-template {path}"):
        return read_text(path, MAX_BYTES)


def write_files(files: dict[str, bytes], prefix: str) -> None:
    """Replaces each file atomically; the last is the one that a run reads first."""
    for ending, content in files.items():
        path = Path(f"{prefix}{ending}")
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f"{path.name}.partial")
        partial.write_bytes(content)
        os.replace(partial, path)


def check(kind: str, files: dict[str, bytes], texts: list[str], template: str | None) -> int:
    """The vocabulary size; UsageError if a text changes in encoding and decoding, or for a broken template."""
    with tempfile.TemporaryDirectory() as scratch:
        write_files(files, f"{scratch}/t")
        tokenizer = build_tokenizer(_TYPES[kind], f"{scratch}/t{'.model' if kind == 'sentencepiece' else ''}")
    for text, ids in zip(texts, tokenizer.encode_batch(texts), strict=True):
        if tokenizer.decode(ids) != text:
            raise UsageError(f"--input: the tokenizer cannot represent {text[:60]!r}; remove its unusual characters")
    encoder = build_encoder(tokenizer, template)
    if encoder.template is not None:
        encoder.check_turns()
    return tokenizer.vocab_size


@refuses_in_one_line("train_tokenizer")
def main(argv: list[str]) -> int:
    arguments = parse_arguments(argv)
    with writing(f"--out {arguments.out}"):
        texts = read_texts(arguments.input)
        files = make_files(arguments, texts)
        size = check(arguments.kind, files, texts, arguments.chat_template)
        write_files(files, arguments.out)
    print(f"{arguments.out}{list(files)[-1]}: {size} pieces from {len(texts)} texts")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
