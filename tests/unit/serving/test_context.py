"""The checks of prompts and lengths that all endpoints share."""

import asyncio
import base64

import pytest

from megarl.data.images.names import mark_of
from megarl.data.prompt import Prompt
from megarl.serving.error_answers import RequestError
from megarl.serving.schemas import ChatCompletionRequest
from tests.helpers.server.serving import without_leaders
from tests.helpers.texts.picture_prompts import encoded, encoder_of, picture, write_folder


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


@pytest.fixture(scope="module")
def sees(tmp_path_factory):
    """A server whose model reads images."""
    folder = tmp_path_factory.mktemp("server")
    return without_leaders(folder, encoder=encoder_of(write_folder(folder / "model"), max_images=2))


def asks(*urls: str, text: str = "What?") -> ChatCompletionRequest:
    parts = [{"type": "image_url", "image_url": {"url": url, "detail": "low"}} for url in urls]
    messages = [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]
    return ChatCompletionRequest.model_validate({"messages": messages})


def url_of(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


PICTURE = encoded(picture(90, 70, 4))


def test_images_of_messages_become_tokens(sees):
    tokens, images = asyncio.run(sees.encode_messages(asks(url_of(PICTURE), url_of(PICTURE), text="<image>")))
    assert [base64.b64decode(each) for each in images] == [PICTURE]  # replicas get an image once
    known = sees.encoder.images
    ref = known.add_bytes(PICTURE)
    assert [token for token in tokens if token < 0] == known.ids(ref) * 2
    content = mark_of(ref) * 2 + "<image>"
    assert tokens == sees.encoder.prompt(Prompt(0, [{"role": "user", "content": content}]))
    known.forget([ref])
    assert len(known) == 0  # of requests that have been read nothing stays


WRONG = {
    "network": (["https://127.0.0.1/x.png"], "nothing is downloaded"),
    "file": (["file:///etc/hostname"], "no file is read"),
    "path": (["x.png"], "no file is read"),
    "no picture": (["data:image/png;base64,AAAA"], "not PNG, JPEG, WebP, GIF or plain BMP"),
    "damaged": ([url_of(PICTURE[:-900])], "PNG that cannot be decoded"),
    "no base64": (["data:image/png;base64,@"], "no base64"),
    "many": ([url_of(PICTURE)] * 3, "has 3 images; this server allows 2"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_images_are_answered_in_one_line(name, sees):
    urls, needle = WRONG[name]
    with pytest.raises(RequestError, match=needle) as raised:
        asyncio.run(sees.encode_messages(asks(*urls)))
    assert raised.value.status == 400 and "\n" not in str(raised.value) and len(sees.encoder.images) == 0


def test_a_model_without_a_tower_refuses_images(tmp_path):
    with pytest.raises(RequestError, match="this server's model has no vision tower"):
        asyncio.run(without_leaders(tmp_path).encode_messages(asks(url_of(PICTURE))))
