"""Texts and tokens of conversations, compared one by one with those of `transformers`.

`references/transformers_chat.py` says how the reference was recorded.
"""

import json
from pathlib import Path

import pytest

from megarl.data.conversations import build_encoder
from megarl.data.prompt import Prompt
from megarl.data.tokenizers import build_tokenizer
from tests.helpers.texts.refusals import refusal
from tests.helpers.texts.small_tokenizers import HUGGING_FACE
from tests.references.transformers_chat import CONVERSATIONS, TEXTS, conversation

RECORDED = json.loads((Path(__file__).parents[2] / "references" / "transformers_chat.json").read_text())["results"]


# Here a token of the whole text reaches from the prompt into the response, which no rollout can do.
ACROSS = {"chatml": ["\n\nHello\n\n"]}


@pytest.mark.parametrize("name", HUGGING_FACE)
def test_texts_and_tokens_are_those_of_transformers(tmp_path, name):
    tokenizer = build_tokenizer("HuggingFaceTokenizer", HUGGING_FACE[name](tmp_path / name))
    encoder = build_encoder(tokenizer, "tokenizer")
    across, rejected = [], 0
    for pairs, recorded in zip(CONVERSATIONS, RECORDED[name]["conversations"], strict=True):
        messages = conversation(pairs)
        for generation, found in ((False, recorded["whole"]), (True, recorded["prompt"])):
            if "error" in found:
                rejected += 1
                assert found["error"] in refusal(encoder.template.render, messages, generation)
                continue
            rendered = encoder.template.render(messages, generation)
            assert rendered == encoder.template.plain(rendered) == found["text"]
            assert encoder.template.encode(rendered) == found["ids"]
            if generation and pairs[-1][0] == "user":
                assert encoder.prompt(Prompt(0, messages)) == found["ids"]
            if not generation and pairs[-1][0] == "assistant":
                prompt, text = Prompt(0, messages[:-1]), pairs[-1][1]
                joined = encoder.prompt(prompt) + encoder.response(prompt, text)
                ((whole, _),) = encoder.conversation(messages)
                assert whole[: len(joined)] == joined and joined[-1] == tokenizer.eos_id
                if whole != found["ids"]:
                    across.append(text)
                    assert tokenizer.decode(whole) == tokenizer.decode(found["ids"])
    assert across == ACROSS.get(name, [])
    assert rejected == {"mistral": 4, "gemma": 2}.get(name, 0)


@pytest.mark.parametrize("name", HUGGING_FACE)
def test_tokens_of_plain_text_are_those_of_transformers(tmp_path, name):
    tokenizer = build_tokenizer("HuggingFaceTokenizer", HUGGING_FACE[name](tmp_path / name))
    recorded = RECORDED[name]["texts"]
    # The Unigram model finds </s> in its vocabulary even so; here it is spelt.
    differing = [] if name != "unigram" else ["a <|im_end|> b</s>[SEP]<end_of_turn>"]
    assert [text for text, ids in zip(TEXTS, recorded, strict=True) if tokenizer.encode(text) != ids] == differing
    assert tokenizer.encode_batch(TEXTS) == [tokenizer.encode(text) for text in TEXTS]
