"""Renders conversations with tool calls with `transformers`: writes transformers_turns.json for
tests/unit/data/test_turns.py.

    python -m venv scratch && scratch/bin/pip install transformers==5.23.0 sentencepiece==0.2.3
    PYTHONPATH=. scratch/bin/python tests/references/transformers_turns.py tests/references/transformers_turns.json

Run from the root of the repository, in a separate environment: the version of transformers is recorded.
"""

import json
import random
import sys
import tempfile
from pathlib import Path

from tests.helpers.texts.chat_templates import RECORDED

TOOLS = [{"type": "function", "function": {
    "name": "look", "description": "Looks <b>around</b>.",
    "parameters": {"type": "object", "properties": {"where": {"type": "string"}}, "required": ["where"]},
}}]  # fmt: skip
PIECES = ["the user", " ", "\n", "12", " <b> & \"q\"", "\u4f60\u597d", "\U0001f642", "e\u0301", "</tool_response>",
          "<tool_response>", "{\"a\": 1}", "\t", "assistant\n"]  # fmt: skip
SPECIAL = ["<|im_end|>", "<|im_start|>assistant\n", "<|eot_id|>", "</s>", "<end_of_turn>", "<|begin_of_text|>"]
CONVERSATIONS = 10
SPECIAL_FROM = 7  # contents of conversations from this number on hold strings of special tokens


def conversations(roles: tuple[str, ...]) -> list[list[dict]]:
    """Conversations of up to four turns, each answered by messages of one of the roles; always the same."""
    draw = random.Random(23)
    return [_conversation(draw, roles, PIECES if k < SPECIAL_FROM else SPECIAL) for k in range(CONVERSATIONS)]


def _conversation(draw: random.Random, roles: tuple[str, ...], pieces: list[str]) -> list[dict]:
    def text(most: int = 5) -> str:
        # A letter at the start and the end: no token of the whole reaches from the opening of a turn into it.
        return "".join(["a", *draw.choices(pieces, k=draw.randint(0, most)), "z"])

    messages = [{"role": "system", "content": text()}] * draw.randint(0, 1)
    messages.append({"role": "user", "content": text()})
    for turn in range(draw.randint(1, 4)):
        role = draw.choice(roles)
        if role == "user":
            messages += [{"role": "assistant", "content": text()}, {"role": "user", "content": text()}]
            continue
        ids = [f"call_{turn}_{k}" for k in range(draw.randint(1, 3))]
        calls = [{"id": name, "type": "function", "function": {"name": "look", "arguments": {"where": text(2)}}}
                 for name in ids]  # fmt: skip
        messages.append({"role": "assistant", "content": text() * draw.randint(0, 1), "tool_calls": calls})
        messages += [{"role": "tool", "tool_call_id": name, "name": "look", "content": text()} for name in ids]
    return messages


def prompts(messages: list[dict]) -> list[list[dict]]:
    """The beginnings of a conversation that the assistant continues, and the whole."""
    ends = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    return [messages[:end] for end in [*ends, len(messages)]]


def results(folder: str, template: str, roles: tuple[str, ...]) -> list[list[dict]]:
    """Text and ids of each prompt of each conversation, after those of the prompt before.

    transformers makes special tokens of their strings in contents, so conversations with such have no ids.
    """
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    options = {"add_generation_prompt": True, "chat_template": template, "tools": TOOLS if "tool" in roles else None}
    found = []
    for number, messages in enumerate(conversations(roles)):
        rows, text, ids = [], "", []
        for prompt in prompts(messages):
            before, ids_before = text, ids
            text = tokenizer.apply_chat_template(prompt, tokenize=False, **options)
            assert text.startswith(before)
            rows.append({"text": text[len(before) :]})
            if number < SPECIAL_FROM:
                ids = list(tokenizer.apply_chat_template(prompt, tokenize=True, return_dict=False, **options))
                assert ids[: len(ids_before)] == ids_before
                rows[-1]["ids"] = ids[len(ids_before) :]
        found.append(rows)
    return found


def main(path: str) -> None:
    import transformers

    with tempfile.TemporaryDirectory() as scratch:
        found = {
            name: results(make(Path(scratch) / name), template, roles)
            for name, (make, template, roles) in RECORDED.items()
        }
    content = {"transformers": transformers.__version__, "results": found}
    Path(path).write_text(json.dumps(content, ensure_ascii=True, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
