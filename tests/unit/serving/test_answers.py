"""An answer is the same, whole or streamed."""

import asyncio

from megarl.serving.answers import MIN_LOGPROB, OpenAIAnswer, event, finite
from megarl.serving.schemas import OpenAIFields


class Words(OpenAIAnswer):
    """An answer of two choices, word by word."""

    kind, chunk_kind, prefix = "words", "words.chunk", "w"

    async def parts(self):
        for index, text, finish in ((1, "a", None), (0, "b", "stop"), (1, "c", "length")):
            self.generated_tokens += 1
            yield {"index": index, "text": text, "finish_reason": finish}

    def empty_choices(self):
        return [{"index": 0, "text": ""}, {"index": 1, "text": ""}]

    def merge(self, choice, part):
        choice["text"] += part["text"]
        super().merge(choice, part)


def made(**fields) -> Words:
    answer = Words("tiny", OpenAIFields(**fields))
    answer.more, answer.prompt_tokens = {"system_fingerprint": "f"}, 5
    return answer


def test_parts_make_choices():
    whole = asyncio.run(made().whole())
    assert whole["choices"] == [
        {"index": 0, "text": "b", "finish_reason": "stop"}, {"index": 1, "text": "ac", "finish_reason": "length"},
    ]  # fmt: skip
    assert whole["usage"] == {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8}
    assert list(whole) == ["id", "object", "created", "model", "system_fingerprint", "choices", "usage"]
    assert whole["object"] == "words" and whole["id"].startswith("w-")


def test_a_stream_tells_the_usage_at_its_end_if_it_is_wanted():
    async def chunks(answer):
        return [chunk async for chunk in answer.chunks()]

    plain = asyncio.run(chunks(made()))
    assert [chunk["choices"][0]["text"] for chunk in plain] == ["a", "b", "c"] and "usage" not in plain[0]
    *parts, last = asyncio.run(chunks(made(stream_options={"include_usage": True})))
    assert [chunk["usage"] for chunk in parts] == [None] * 3
    assert last["choices"] == [] and last["usage"]["total_tokens"] == 8 and last["object"] == "words.chunk"


def test_what_json_lacks():
    assert finite(float("-inf")) == MIN_LOGPROB and finite(None) is None and finite(-1.5) == -1.5
    assert event({"a": "\ud800"}, "said") == b'event: said\ndata: {"a":"\\ud800"}\n\n'
