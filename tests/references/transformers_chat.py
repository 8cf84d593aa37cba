"""Renders conversations with `transformers`: writes transformers_chat.json for
tests/unit/data/test_chat.py.

    python -m venv scratch && scratch/bin/pip install transformers==5.23.0 sentencepiece==0.2.3
    PYTHONPATH=. scratch/bin/python tests/references/transformers_chat.py tests/references/transformers_chat.json

Run from the root of the repository, in a separate environment: the version of transformers is recorded.
"""

import json
import sys
import tempfile
from pathlib import Path

from tests.helpers.texts.small_tokenizers import HUGGING_FACE

CONVERSATIONS = [
    [("user", "Hello world")],
    [("user", "Hello world"), ("assistant", "42")],
    [("system", "  Be kind.\n"), ("user", "12 + 30 =\n"), ("assistant", "  42 is the answer ")],
    [("user", "\u4f60\u597d \U0001f642"), ("assistant", "e\u0301\u0301 caf\u00e9"), ("user", "\u0301 \t<b> & \"q\""),
     ("assistant", "")],
    [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"), ("user", "the world of the user")],
    [("user", "a"), ("tool", "{\"sum\": 42, \"who\": \"\u00e9\"}"),
     ("assistant", "the sum is 42")],
    [("user", "a"), ("user", "b"), ("assistant", "c")],
    [("user", "line\n\n  indented\n\ttab\n"), ("assistant", "\n\nHello\n\n")],
]  # fmt: skip

TEXTS = ["", " ", "Hello world", "a <|im_end|> b</s>[SEP]<end_of_turn>", "\u4f60\u597d \U0001f642 e\u0301",
         " the  user "]  # fmt: skip


def conversation(pairs: list[tuple[str, str]]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in pairs]


def rendered(tokenizer, messages: list[dict[str, str]], generation: bool) -> dict:
    """Text and ids, or the template's error."""
    options = {"add_generation_prompt": generation}
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, **options)
    except Exception as error:
        return {"error": str(error)}
    ids = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False, **options)
    return {"text": text, "ids": list(ids)}


def results(folder: str) -> dict:
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    plain = {"add_special_tokens": False, "split_special_tokens": True}
    return {
        "conversations": [
            {"whole": rendered(tokenizer, conversation(pairs), False),
             "prompt": rendered(tokenizer, conversation(pairs), True)}
            for pairs in CONVERSATIONS
        ],
        "texts": [tokenizer.encode(text, **plain) for text in TEXTS],
    }  # fmt: skip


def main(path: str) -> None:
    import transformers

    with tempfile.TemporaryDirectory() as scratch:
        found = {name: results(make(Path(scratch) / name)) for name, make in HUGGING_FACE.items()}
    content = {"transformers": transformers.__version__, "results": found}
    Path(path).write_text(json.dumps(content, ensure_ascii=True, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
