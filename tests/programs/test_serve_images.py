"""A server of a vision-language folder answers about the images that clients send, as transformers does."""

import base64

import numpy as np
import pytest
import torch
from PIL import Image

from megarl.data.images.decoding import decode
from tests.helpers.server.servers import served
from tests.helpers.texts.picture_prompts import encoded
from tests.helpers.worlds import run_world
from tools import make_number_pictures as numbers


def greedy_of_transformers(rank: int, folder, pictures: list[bytes]) -> list[str]:
    """Its greedy answers about images after the prompt that the template writes."""
    return [_answer(folder, data) for data in pictures]


def _answer(folder, data: bytes) -> str:
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    settings = {name: value for name, value in numbers.PROCESSOR.items() if name != "image_processor_type"}
    inputs = transformers.Qwen2VLImageProcessorPil(**settings)(images=[decode(data)], return_tensors="pt")
    place = tokenizer.convert_tokens_to_ids("<|image_pad|>")
    messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "number?"}]}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    rows = int(inputs["image_grid_thw"].prod()) // 4
    ids = torch.tensor([tokenizer(text.replace("<|image_pad|>", "<|image_pad|>" * rows))["input_ids"]])
    model = transformers.AutoModelForImageTextToText.from_pretrained(folder).eval()
    with torch.no_grad():
        answer = model.generate(
            input_ids=ids, mm_token_type_ids=(ids == place).long(), max_new_tokens=6, do_sample=False, **inputs
        )
    return tokenizer.decode(answer[0, ids.shape[1] :], skip_special_tokens=True)


@pytest.mark.long
def test_answers_are_those_of_transformers(tmp_path):
    folder, random = tmp_path / "model", np.random.default_rng(0)
    numbers.write_model(folder, 1)
    pictures = [encoded(Image.fromarray(numbers.draw(number, 30, random))) for number in ("07", "58", "93")]
    argv = ["--hf-model", str(folder), "--max-prompt-length", "64", "--max-response-length", "8", "--port", "0"]

    def ask(server, url: str):
        parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "number?"}]
        body = {"messages": [{"role": "user", "content": parts}], "temperature": 0, "max_tokens": 6, "ignore_eos": True}
        return server.post("/v1/chat/completions", body)

    with served(argv) as server:
        answers = []
        for data in (*pictures, pictures[0]):
            answer = ask(server, "data:image/png;base64," + base64.b64encode(data).decode()).json()
            assert answer["usage"]["prompt_tokens"] == 19  # 8 of them of the image
            answers.append(answer["choices"][0]["message"]["content"])
        refused = ask(server, "http://127.0.0.1/x.png")
    assert refused.status == 400 and "nothing is downloaded" in refused.json()["error"]["message"]
    assert answers == run_world(greedy_of_transformers, 1, folder, [*pictures, pictures[0]])[0]
    assert len(set(answers)) > 1  # it looks at them
