"""The checks of prompts and lengths that all endpoints share."""

import asyncio

import pytest

from megarl.serving.error_answers import RequestError
from tests.helpers.server.serving import without_leaders


def test_lengths_and_prompts(tmp_path):
    context = without_leaders(tmp_path)  # 100 tokens together, and of a response
    assert context.response_length([1] * 40, None) == 60 and context.response_length([1] * 40, 60) == 60
    assert context.response_length([1] * 100, 0) == 0
    for prompt, wanted in (([1] * 40, 61), ([1] * 100, None)):
        with pytest.raises(RequestError, match="prompt and response have at most 100") as raised:
            context.response_length(prompt, wanted)
        assert raised.value.code == "context_length_exceeded"
    for prompt in ([], [-1], [304]):
        with pytest.raises(RequestError, match="prompt: "):
            context.check_prompt(prompt, "prompt")
    context.check_prompt([0, 303], "prompt")


def test_another_model_and_a_missing_template_are_said(tmp_path):
    context = without_leaders(tmp_path)
    context.check_model(None)
    with pytest.raises(RequestError, match="the model 'other' does not exist"):
        context.check_model("other")
    with pytest.raises(RequestError, match="no chat template"):
        asyncio.run(context.encode_chat([{"role": "user", "content": "a"}], None))
    assert context.tokenizer_info()["chat_template"] is None and context.model_card()["max_model_len"] == 100
