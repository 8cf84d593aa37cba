"""Whether a tokenizer.json alone encodes as transformers does, which may replace parts of it by those of a class.

For example the class of Qwen2 has a pre-tokenizer of its own. A server that reads the file, or another version of
transformers, then gives other tokens.
"""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

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
    parts = (json.loads(each.to_str()) for each in (alone, loaded))
    return f"{found} ({_differing(*parts)})"


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


def _differing(one: dict[str, Any], other: dict[str, Any]) -> str:
    return ", ".join(name for name in _PARTS if one.get(name) != other.get(name)) or "in no part of its own"
