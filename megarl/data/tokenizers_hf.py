"""Hugging Face tokenizers: a tokenizer.json, and the tokenizer_config.json that names its special tokens."""

import functools
import hashlib
import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from megarl.data.special_tokens import REPLACEMENT, encode_around_special, pattern_of
from megarl.errors import UsageError

_NAMED = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")
_LISTED = ("additional_special_tokens", "extra_special_tokens")

_BATCH = 1024

# EOS candidates of a tokenizer.json without a tokenizer_config.json.
_USUAL_EOS = ("</s>", "<eos>", "<|endoftext|>", "<|end_of_text|>", "<|im_end|>", "<|eot_id|>", "[EOS]")


class HuggingFaceTokenizer:
    """The tokenizer of a folder, or of a tokenizer.json with tokenizer_config.json next to it.

    Special tokens are those that either file calls special, except the unknown token, which plain text can produce.
    Without a configuration, EOS is the one common EOS name among the special tokens. Ignores the file's post-processor
    (BOS, EOS), truncation and padding. Raises UsageError (naming `flag`).
    """

    special_ends_bytes = False

    def __init__(self, model_path: str, flag: str = "--tokenizer-model"):
        where = f"{flag} {model_path}"
        path = Path(model_path)
        file = path / "tokenizer.json" if path.is_dir() else path
        stored = _parsed(_read(file, where), f"{where}: {file.name}")
        config_text = _read(file.parent / "tokenizer_config.json", where, missing="{}")
        config = _parsed(config_text, f"{where}: tokenizer_config.json")
        try:
            named = {name: _content(config[name]) for name in _NAMED if config.get(name)}
            self._special = _mark_special(stored, {*named.values(), *_listed(config)}, named)
        except (AttributeError, IndexError, KeyError, TypeError):
            raise UsageError(
                f"{where}: the special tokens of {file.name} or tokenizer_config.json are malformed"
            ) from None
        if not all(isinstance(name, str) for name in self._special):
            raise UsageError(f"{where}: a special token of {file.name} or tokenizer_config.json is not a string")
        self._json = json.dumps(stored)
        self._plain = self._load(where)
        self._plain.encode_special_tokens = True
        vocabulary = self._plain.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise UsageError(f"{where}: {file.name} has an empty vocabulary")
        for name, token in named.items():
            if token not in vocabulary:
                raise UsageError(f"{where}: {name} {token!r} is not in the vocabulary of {file.name}")
        self._known_ids = frozenset(vocabulary.values())
        self.vocab_size = max(self._known_ids) + 1
        self.byte_level = (stored.get("decoder") or {}).get("type") == "ByteLevel"
        self.eos_token = named.get("eos_token") or self._usual_eos(where)
        self.bos_token = named.get("bos_token")
        self.eos_id = vocabulary[self.eos_token]
        self.bos_id = vocabulary[self.bos_token] if self.bos_token else None
        self.end_ids, self.end_tokens = self._ends(file.parent, vocabulary, where)
        files = repr((self._json, config_text, self.end_ids)).encode()
        self.fingerprint = hashlib.blake2b(files, digest_size=16).hexdigest()
        self.pad_id = vocabulary[named.get("pad_token", self.eos_token)]
        self.special = {name: vocabulary[name] for name in self._special if name in vocabulary}
        self._special_ids = frozenset(self.special.values())
        self._pattern = pattern_of(self.special)
        template = _read(file.parent / "chat_template.jinja", where, missing="")
        self.template = template or _default_template(config.get("chat_template"))

    def _ends(self, folder: Path, vocabulary: dict[str, int], where: str) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """Ids and strings of the tokens that end a response: EOS, then others in the model's configuration."""
        configs = (
            _parsed(_read(folder / name, where, missing="{}"), f"{where}: {name}").get("eos_token_id")
            for name in ("generation_config.json", "config.json")  # the second is for folders without the first
        )
        listed = next((ids for ids in configs if ids is not None), [])
        strings = {number: name for name, number in vocabulary.items()}
        listed = [self.eos_id, *(listed if isinstance(listed, list) else [listed])]
        for number in listed:
            if type(number) is not int or number not in strings:
                raise UsageError(
                    f"{where}: eos_token_id {number!r} of the model's configuration is not in the vocabulary"
                )
        ids = tuple(dict.fromkeys(listed))
        return ids, tuple(strings[number] for number in ids)

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, without BOS or EOS; a special token's string is encoded like any other text."""
        return self._without_special(self._plain.encode(text, add_special_tokens=False).ids)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` of each text, on several threads."""
        return [self._without_special(ids) for ids in _batched(self._plain, texts)]

    def encode_template(self, text: str) -> list[int]:
        """Ids of `text`, in which the string of a special token becomes its id."""
        return self._checked(text, self._matching.encode(text, add_special_tokens=False).ids)

    def encode_template_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode_template` of each text, on several threads."""
        return [self._checked(*each) for each in zip(texts, _batched(self._matching, texts), strict=True)]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids` without special tokens; an id without a token becomes U+FFFD."""
        kept = (int(i) for i in ids if int(i) not in self._special_ids)
        runs = itertools.groupby(kept, key=self._known_ids.__contains__)
        return "".join(
            self._plain.decode(list(run), skip_special_tokens=False) if known else REPLACEMENT * len(list(run))
            for known, run in runs
        )

    def piece(self, number: int) -> str | None:
        """The vocabulary's string of an id, or None for an id without a token."""
        return self._plain.id_to_token(number) if number in self._known_ids else None

    def _checked(self, text: str, ids: list[int]) -> list[int]:
        """`ids`, if their special tokens are those of `text`; else the text is encoded around its special tokens.

        They differ if the model also has a special token as an ordinary one, or a normalizer turns other text into it.
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
        """Maps a special id to the ids of its string, encoded character by character."""
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
            raise UsageError(f"{where}: not a tokenizer.json that `tokenizers` can read: {_line(error)}") from None
        # Add only those that the model has as ordinary tokens; the others are special already.
        added = {token.content for token in loaded.get_added_tokens_decoder().values()}
        tokens = [name for name in self._special if name not in added and loaded.token_to_id(name) is not None]
        loaded.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in tokens])
        loaded.no_truncation()
        loaded.no_padding()
        return loaded

    def _usual_eos(self, where: str) -> str:
        candidates = [name for name in self._special if name in _USUAL_EOS]
        if len(candidates) != 1:
            raise UsageError(f"{where}: no eos_token; name it in a tokenizer_config.json next to tokenizer.json")
        return candidates[0]


def _batched(tokenizer: Tokenizer, texts: Sequence[str]) -> Iterator[list[int]]:
    """Ids of each text, in batches, because the library's result takes far more memory than the ids."""
    for start in range(0, len(texts), _BATCH):
        encodings = tokenizer.encode_batch_fast(list(texts[start : start + _BATCH]), add_special_tokens=False)
        yield from (encoding.ids for encoding in encodings)


def _mark_special(stored: dict[str, Any], names: set[str], named: dict[str, str]) -> list[str]:
    """Return the special tokens' strings; mark them in `stored`, and drop the unknown token from its added tokens.

    They are marked `normalized=False`, so that they match in the text itself, not in a normalizer's output.
    """
    ordinary = {_unknown(stored.get("model"))} - {named.get(name) for name in ("bos_token", "eos_token")}
    added = [token for token in stored.get("added_tokens") or [] if token["content"] not in ordinary]
    stored["added_tokens"] = added
    for token in added:
        if token.get("special") or token["content"] in names:
            token.update(special=True, normalized=False)
    special = [token["content"] for token in added if token.get("special")]
    return special + sorted(names - set(special) - ordinary)


def _read(path: Path, where: str, missing: str | None = None) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        if missing is not None:
            return missing
        raise UsageError(f"{where}: no such file" + (f": {path.name}" if path.parent.exists() else "")) from None
    except OSError as error:
        raise UsageError(f"{where}: {path.name} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"{where}: {path.name} is not UTF-8") from None


def _parsed(text: str, where: str) -> dict[str, Any]:
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where}: malformed JSON: {_line(error)}") from None
    if not isinstance(parsed, dict):
        raise UsageError(f"{where}: expected a JSON object, not {type(parsed).__name__}")
    return parsed


def _content(token: Any) -> str:
    """The string of a token in tokenizer_config.json, which is the string itself or an object."""
    return token.get("content") if isinstance(token, dict) else token


def _listed(config: dict[str, Any]) -> list[str]:
    """Special tokens of tokenizer_config.json other than the named ones."""
    decoder = (config.get("added_tokens_decoder") or {}).values()
    tokens = [token for token in decoder if token.get("special")]
    for name in _LISTED:
        listed = config.get(name) or []
        tokens += listed.values() if isinstance(listed, dict) else listed
    return [_content(token) for token in tokens]


def _unknown(model: Any) -> str | None:
    """The unknown token of a model, or None."""
    if not isinstance(model, dict):
        return None
    if model.get("unk_id") is not None:
        return model["vocab"][model["unk_id"]][0]
    return model.get("unk_token")


def _default_template(stored: str | list[dict[str, str]] | None) -> str | None:
    """The default chat template of a configuration, which holds one template or a list of named ones."""
    if isinstance(stored, list):
        return {each["name"]: each["template"] for each in stored}.get("default")
    return stored


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
