"""Encoders of the small tokenizers with chat templates."""

from pathlib import Path

from megarl.data.chat import ChatTemplate
from megarl.data.conversations import Encoder
from megarl.data.tokenizers import build_tokenizer
from tests.helpers.texts.chat_templates import TEMPLATES


def encoder_of(folder: Path, tokenizer, template: str) -> Encoder:
    """The encoder of a small tokenizer, which is written to a new folder, with a template."""
    made = build_tokenizer("HuggingFaceTokenizer", tokenizer(folder))
    return Encoder(made, ChatTemplate(template, made))


def template_encoders(folder: Path) -> dict[str, Encoder]:
    """An encoder for each of `TEMPLATES`."""
    return {name: encoder_of(folder / name, *TEMPLATES[name][:2]) for name in TEMPLATES}


def spelled(tokenizer, ids) -> str:
    """Text of ids with the strings of special tokens, of a tokenizer whose tokens stand for themselves."""
    names = {number: string for string, number in tokenizer.special.items()}
    text, run = "", []
    for number in [*ids, None]:
        if number is None or number in names:
            text, run = text + tokenizer.decode(run) + names.get(number, ""), []
        else:
            run.append(number)
    return text
