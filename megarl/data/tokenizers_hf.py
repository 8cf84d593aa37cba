"""Hugging Face tokenizers: transformers reads a folder's files, and `tokenizers` encodes.

Of transformers come the vocabulary, the special tokens and their names, the rule for BOS, and the chat template, with
all forms of files that it knows. Own is what happens to special tokens' strings in ordinary text.
"""

import contextlib
import functools
import hashlib
import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken, Tokenizer

from megarl.data.tokenizers import decode_known, encode_around_special, pattern_of
from megarl.errors import UsageError
from megarl.plain_files import MAX_BYTES, check_regular, parse_json, read_text, reading
from megarl.plain_values import whole_unicode

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Of a folder, without chat templates.
_OF_FAST = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
FILES = (*_OF_FAST, "tokenizer.model", "vocab.json", "merges.txt")

_READ = (*FILES, "chat_template.jinja", "config.json", "generation_config.json")
_BATCH = 1024
LONG_TEXT = 20_000  # characters
_TEXTS = (".json", ".jinja", ".txt", ".model")  # that transformers reads whole
_SHOWN = 200  # characters of a library's error


class HuggingFaceTokenizer:
    """The tokenizer of a folder, or of a tokenizer.json with tokenizer_config.json next to it.

    Special tokens are those that the files call special, except the unknown token, which plain text can produce.
    Ignores truncation and padding. `notice`: a line for the user, or None. Raises UsageError (naming `flag`).
    """

    special_ends_bytes = False

    def __init__(self, model_path: str, flag: str = "--tokenizer-model"):
        where = f"{flag} {model_path}"
        read = _read_with_transformers(Path(model_path), where)
        stored = json.loads(read.backend_tokenizer.to_str())
        self.prefix_ids = _prefix(read.backend_tokenizer)
        stored["post_processor"] = None
        self.named = {
            name: str(token) for name, token in read.special_tokens_map.items() if not isinstance(token, list)
        }
        listed = {token.content for token in read.added_tokens_decoder.values() if token.special}
        self._special = _mark_special(stored, {*self.named.values(), *listed}, self.named)
        self._json = json.dumps(stored)
        self._plain = self._load_plain(where)
        vocabulary = self._plain.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise UsageError(f"{where}: the vocabulary is empty")
        self._known_ids = frozenset(vocabulary.values())
        self.vocab_size = max(self._known_ids) + 1
        decoder = stored.get("decoder") or {}
        self.byte_level = any(part.get("type") == "ByteLevel" for part in decoder.get("decoders", [decoder]))
        ids, tokens = self._ends(_folder_of(Path(model_path)), vocabulary, where)
        self.end_ids, self.end_tokens = ids, tokens
        self.eos_id, self.eos_token = ids[0], tokens[0]
        self.bos_token = self.named.get("bos_token")
        self.bos_id = vocabulary[self.bos_token] if self.bos_token else None
        self.named = {"eos_token": self.eos_token} | self.named
        self.fingerprint = self._hash(Path(model_path))
        self.pad_id = vocabulary[self.named.get("pad_token", self.eos_token)]
        self.special = {name: vocabulary[name] for name in self._special if name in vocabulary}
        self._special_ids = frozenset(self.special.values())
        self._pattern = pattern_of(self.special)
        self.template = _one_template(read.chat_template)
        self.notice = _notice(Path(model_path), where, read.backend_tokenizer)

    def _hash(self, path: Path) -> str:
        """Hash of the files, which does not change with the version that reads them, and of the rules for both ends."""
        digest = hashlib.blake2b(repr((self.prefix_ids, self.end_ids)).encode(), digest_size=16)
        for file in [_folder_of(path) / name for name in FILES] if _is_folder(path) else [path]:
            digest.update(file.read_bytes() if file.is_file() else b"")
        return digest.hexdigest()

    def _ends(self, folder: Path, vocabulary: dict[str, int], where: str) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """Ids and strings of the tokens that end a response: EOS, then others in the model's configuration."""
        configs = (
            _parsed(_read(folder / name, where), f"{where}: {name}").get("eos_token_id")
            for name in ("generation_config.json", "config.json")  # the second is for folders without the first
        )
        listed = next((ids for ids in configs if ids is not None), [])
        strings = {number: name for name, number in vocabulary.items()}
        listed = listed if isinstance(listed, list) else [listed]
        if "eos_token" in self.named:
            listed = [vocabulary[self.named["eos_token"]], *listed]
        if not listed:
            raise UsageError(f"{where}: no eos_token; name it in tokenizer_config.json")
        for number in listed:
            if type(number) is not int or number not in strings:
                raise UsageError(
                    f"{where}: eos_token_id {number!r} of the model's configuration is not in the vocabulary"
                )
        ids = tuple(dict.fromkeys(listed))
        return ids, tuple(strings[number] for number in ids)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("_plain", "_matching", "_spelling")}

    def __setstate__(self, state: dict[str, Any]):
        vars(self).update(state)
        self._plain = self._load_plain("")

    def _load_plain(self, where: str) -> Tokenizer:
        loaded = self._load(where)
        loaded.encode_special_tokens = True
        return loaded

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, without BOS or EOS; a special token's string is encoded like any other text."""
        return self._without_special(_ids(self._plain, text))

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` of each text, on several threads."""
        return [self._without_special(ids) for ids in _batched(self._plain, texts)]

    def encode_template(self, text: str) -> list[int]:
        """Ids of `text`, in which the string of a special token becomes its id."""
        return self._checked(text, _ids(self._matching, text))

    def encode_template_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode_template` of each text, on several threads."""
        return list(map(self._checked, texts, _batched(self._matching, texts)))

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids` without special tokens; an id without a token becomes U+FFFD."""
        kept = (int(i) for i in ids if int(i) not in self._special_ids)
        decode = functools.partial(self._plain.decode, skip_special_tokens=False)
        return decode_known(kept, self._known_ids.__contains__, decode)

    def piece(self, number: int) -> str | None:
        """The vocabulary's string of an id, or None for an id without a token."""
        return self._plain.id_to_token(number) if number in self._known_ids else None

    def _checked(self, text: str, ids: list[int]) -> list[int]:
        """`ids`, if their special tokens are those of `text`; else the text is encoded around its special tokens. They
        differ if the model also has a special token as an ordinary one, or a normalizer turns other text into it.
        """
        if [i for i in ids if i in self._special_ids] == [self.special[name] for name in self._pattern.findall(text)]:
            return ids
        return encode_around_special(text, self.special, self._pattern, self.encode)

    def _without_special(self, ids: list[int]) -> list[int]:
        if self._special_ids.isdisjoint(ids):
            return ids
        return [i for each in ids for i in (self._spelling[each] if each in self._special_ids else [each])]

    @functools.cached_property
    def _spelling(self) -> dict[int, list[int]]:
        spelling = {
            number: [token.id for character in name for token in self._plain.model.tokenize(character)]
            for name, number in self.special.items()
        }
        return {number: [i for i in ids if i not in self._special_ids] for number, ids in spelling.items()}

    @functools.cached_property
    def _matching(self) -> Tokenizer:
        """A second tokenizer, which matches special tokens: only templates need it."""
        return self._load("")

    def _load(self, where: str) -> Tokenizer:
        try:
            loaded = Tokenizer.from_str(self._json)
        except Exception as error:
            raise UsageError(f"{where}: `tokenizers` cannot run it: {_line(error)}") from None
        # Add only those that the model has as ordinary tokens; the others are special already.
        added = {token.content for token in loaded.get_added_tokens_decoder().values()}
        tokens = [name for name in self._special if name not in added and loaded.token_to_id(name) is not None]
        loaded.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in tokens])
        loaded.no_truncation()
        loaded.no_padding()
        return loaded


def _ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids of a text. Of a long one by the batch call, which alone lets the other threads run meanwhile."""
    if len(text) > LONG_TEXT:
        return next(_batched(tokenizer, [text]))
    return tokenizer.encode(whole_unicode(text), add_special_tokens=False).ids


def _batched(tokenizer: Tokenizer, texts: Sequence[str]) -> Iterator[list[int]]:
    """Ids of each text, in batches, because the library's result takes far more memory than the ids."""
    for start in range(0, len(texts), _BATCH):
        batch = [whole_unicode(text) for text in texts[start : start + _BATCH]]
        encodings = tokenizer.encode_batch_fast(batch, add_special_tokens=False)
        yield from (encoding.ids for encoding in encodings)


def _mark_special(stored: dict[str, Any], names: set[str], named: dict[str, str]) -> list[str]:
    """Return the special tokens' strings; mark them in `stored`, and drop the unknown token from its added tokens. They
    are marked `normalized=False`, so that they match in the text itself, not in a normalizer's output.
    """
    ordinary = {_unknown(stored.get("model"))} - {named.get(name) for name in ("bos_token", "eos_token")}
    added = [token for token in stored.get("added_tokens") or [] if token["content"] not in ordinary]
    stored["added_tokens"] = added
    for token in added:
        if token.get("special") or token["content"] in names:
            token.update(special=True, normalized=False)
    special = [token["content"] for token in added if token.get("special")]
    return special + sorted(names - set(special) - ordinary)


def _one_template(found: str | dict[str, str] | None) -> str | None:
    """The chat template; of a tokenizer that has another one for conversations with tools, both in one."""
    if not isinstance(found, dict) or not {"default", "tool_use"} <= found.keys():
        return found.get("default") if isinstance(found, dict) else found
    # Jinja drops the new line after a block; the empty text keeps it from trimming the white space before one.
    with_tools, without = (found[name].removesuffix("\n") + "{{ '' }}" for name in ("tool_use", "default"))
    return f"{{% if tools %}}\n{with_tools}{{% else %}}\n{without}{{% endif %}}"


def _notice(path: Path, where: str, loaded: Tokenizer) -> str | None:
    file = _folder_of(path) / "tokenizer.json"
    found = difference(file, loaded) if _is_folder(path) and file.is_file() else None
    if found is None:
        return None
    from transformers import __version__

    return (
        f"{where}: its tokenizer.json alone encodes otherwise than transformers {__version__}, which megarl follows: "
        f"{found}; a server of another version may read the file"
    )


def _is_folder(path: Path) -> bool:
    return path.is_dir() or path.name == "tokenizer.json"


def _folder_of(path: Path) -> Path:
    return path if path.is_dir() else path.parent


def _read_with_transformers(path: Path, where: str) -> "PreTrainedTokenizerBase":
    """The tokenizer as transformers reads it, without code of the folder and without a hub."""
    if not path.exists():
        raise UsageError(f"{where}: no such file or folder")
    _check_regular(path, where)
    from transformers import AutoTokenizer, PreTrainedTokenizerFast, logging  # takes a second of start-up

    logging.set_verbosity_error()
    try:
        if _is_folder(path):
            folder = _folder_of(path)
            read = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
            names = {*read.vocab_files_names.values(), "tokenizer.json"}
            if not any((folder / name).exists() for name in names):
                raise UsageError(f"{where}: has no tokenizer; known files are {', '.join(sorted(names))}")
        else:
            read = PreTrainedTokenizerFast(tokenizer_file=str(path))
        if getattr(read, "backend_tokenizer", None) is None:
            raise UsageError(f"{where}: {type(read).__name__} of transformers is not run by `tokenizers`")
    except (UsageError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # whatever wrong files raise in there; a panic of `tokenizers` is no Exception
        _check_files(_folder_of(path), where)
        raise UsageError(f"{where}: transformers cannot read the tokenizer: {_line(error)}") from None
    return read


def _check_regular(path: Path, where: str):
    """UsageError for files that would be read without end: pipes, devices, and texts far above any tokenizer's."""
    for file in _folder_of(path).glob("*") if _is_folder(path) else [path]:
        if file.name in _READ or (file.exists() and not file.is_dir()):
            with reading(f"{where}: {file.name}"):
                check_regular(file, MAX_BYTES if file.suffix in _TEXTS or file == path else None)


def _check_files(folder: Path, where: str):
    vocabularies = [folder / "tokenizer.json", *folder.glob("*.model"), *folder.glob("vocab*")]
    if not any(file.exists() for file in vocabularies):
        raise UsageError(f"{where}: no such file: tokenizer.json")
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        _parsed(_read(folder / name, where), f"{where}: {name}")
    _read(folder / "chat_template.jinja", where)


def _prefix(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Ids that the tokenizer's post-processor writes before a text: BOS, or nothing."""
    found = tokenizer.encode("a")
    pairs = zip(found.ids, found.special_tokens_mask, strict=True)
    return tuple(number for number, is_added in itertools.takewhile(lambda pair: pair[1], pairs))


def _read(path: Path, where: str) -> str:
    """The text of a file; an empty JSON object if there is none."""
    with reading(f"{where}: {path.name}"), contextlib.suppress(FileNotFoundError):
        return read_text(path, MAX_BYTES)
    return "{}"


def _parsed(text: str, where: str) -> dict[str, Any]:
    try:
        parsed = parse_json(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where}: malformed JSON: {_line(error)}") from None
    if not isinstance(parsed, dict):
        raise UsageError(f"{where}: expected a JSON object, not {type(parsed).__name__}")
    return parsed


def _unknown(model: Any) -> str | None:
    if not isinstance(model, dict):
        return None
    if model.get("unk_id") is not None:
        return model["vocab"][model["unk_id"]][0]
    return model.get("unk_token")


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:_SHOWN]


# -- whether tokenizer.json alone encodes as transformers does, which may replace its parts by those of a class ------

# Texts that published pre-tokenizers, normalizers and models of pieces treat differently.
PROBES = (
    "1234567890 3.14159, 2,024 x2^10", "It's we'LL they’re DON'T", "caf\u00e9 cafe\u0301 \ufb01 Stra\u00dfe \u00c5",
    "\u4f60\u597d\uff0c\u4e16\u754c\uff01\u3053\u3093\u306b\u3061\u306f\ud55c\uad6d\uc5b4",
    "\u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35 \u0928\u092e\u0938\u094d\u0924\u0947", "  a   b\t\tc \n\n\n  d\r\n e ",
    "Hello, world!!! (a-b)/[c_d]... #1 $5 100% --- ===", "def f(x):\n    return x**2  # \u00b2\n\tif a!=b:\n",
    "\U0001f600\U0001f469\u200d\U0001f4bb \u00ab\u201cq\u201d\u00bb", " a", "a", "CamelCase HTTPServer2 foo_bar",
)  # fmt: skip
_PARTS = ("normalizer", "pre_tokenizer", "post_processor", "decoder", "model", "added_tokens")


def difference(path: Path, loaded: Tokenizer) -> str | None:
    """In what a tokenizer.json differs from the tokenizer that transformers has made of its folder; None: in nothing.
    Of a file that `tokenizers` cannot read alone it is None, too.
    """
    try:
        alone = Tokenizer.from_file(str(path))
    except Exception:  # transformers has read it, or does without it
        return None
    alone.no_truncation()
    alone.no_padding()
    found = _of_texts(alone, loaded)
    if found is None:
        return None
    one, other = (json.loads(each.to_str()) for each in (alone, loaded))
    parts = [name for name in _PARTS if one.get(name) != other.get(name)]
    return f"{found} ({', '.join(parts) or 'in no part of its own'})"


def _of_texts(alone: Tokenizer, loaded: Tokenizer) -> str | None:
    for text in PROBES:
        own, other = (each.encode(text, add_special_tokens=False).ids for each in (alone, loaded))
        if own != other:
            return f"{text!r} has {len(own)} tokens by the file and {len(other)} other ones by transformers"
        if alone.decode(own) != loaded.decode(own):
            return f"the tokens of {text!r} are read back as another text"
    own, other = (each.encode("a").ids for each in (alone, loaded))
    if own != other:
        return f"special tokens around a text: the file gives {own}, transformers {other}"
    for number, token in sorted(alone.get_added_tokens_decoder().items()):
        if loaded.token_to_id(token.content) != number:
            return f"the token {token.content!r} is {number} in the file, {loaded.token_to_id(token.content)} there"
    return None
