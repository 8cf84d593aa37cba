"""Prompts and bridges of conversations, compared token by token with those of `transformers`.

`references/transformers_turns.py` says how the reference was recorded.
"""

import json
from pathlib import Path

import pytest

from megarl.data.turns import TurnTokens
from tests.helpers.texts.chat_encoders import encoder_of, spelled
from tests.helpers.texts.chat_templates import RECORDED
from tests.references.transformers_turns import SPECIAL_FROM, TOOLS, conversations, prompts

FOUND = json.loads((Path(__file__).parents[2] / "references" / "transformers_turns.json").read_text())["results"]


@pytest.mark.parametrize("name", RECORDED)
def test_prompts_and_bridges_are_those_of_transformers(tmp_path, name):
    tokenizer, template, roles = RECORDED[name]
    encoder = encoder_of(tmp_path / "tokenizer", tokenizer, template)
    tokens, ends, bridges = TurnTokens(encoder, 10**6), encoder.tokenizer.end_ids, 0
    for number, (messages, rows) in enumerate(zip(conversations(roles), FOUND[name], strict=True)):
        if number >= SPECIAL_FROM:
            continue
        befores = prompts(messages)
        assert tokens.first_prompt(befores[0], TOOLS if "tool" in roles else None) == rows[0]["ids"]
        for before, after, row in zip(befores, befores[1:], rows[1:], strict=False):
            bridge, ids = tokens.bridge(after[len(before) + 1 :]), row["ids"]
            turn = ids[: len(ids) - len(bridge)]
            assert ids[len(turn) :] == bridge
            assert turn[-1] in ends and not set(turn[:-1]) & set(ends)
            bridges += 1
    assert bridges > 12


@pytest.mark.parametrize("name", ["qwen2.5", "hermes", "llama", "qwen3", "llama3"])
def test_strings_of_special_tokens_in_contents_stay_text(tmp_path, name):
    """The text is that of transformers, the special tokens are those of harmless contents."""
    tokenizer, template, roles = RECORDED[name]
    encoder = encoder_of(tmp_path / "tokenizer", tokenizer, template)
    tokens, special, hostile = TurnTokens(encoder, 10**6), set(encoder.tokenizer.special.values()), 0
    for messages, rows in list(zip(conversations(roles), FOUND[name], strict=True))[SPECIAL_FROM:]:
        befores = prompts(messages)
        first = tokens.first_prompt(befores[0], TOOLS if "tool" in roles else None)
        assert spelled(encoder.tokenizer, first) == rows[0]["text"]
        for before, after, row in zip(befores, befores[1:], rows[1:], strict=False):
            answers = after[len(before) + 1 :]
            bridge = tokens.bridge(answers)
            text = spelled(encoder.tokenizer, bridge)
            assert row["text"].endswith(text)
            harmless = tokens.bridge([{**message, "content": "a"} for message in answers])
            assert [i for i in bridge if i in special] == [i for i in harmless if i in special]
            hostile += any(string in message["content"] for message in answers for string in encoder.tokenizer.special)
    assert hostile >= 2
