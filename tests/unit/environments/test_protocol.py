"""What an environment returns is checked, and one that cannot be replayed is found out."""

import asyncio
import base64
import contextlib
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from megarl.data.images.decoding import decode
from megarl.data.images.names import ImageRef, mark_of, readable, sha256_of
from megarl.environments.protocol import Observation, Task, ToolCall, Turn, checked, parse_turn, seen_of
from megarl.errors import UsageError
from megarl.serving.answer_text import ToolCallParser
from megarl.tool_formats import FORMATS
from megarl.tool_formats.chosen_format import load_format, user_format
from tests.helpers.envs.odd_environments import HERE, Wrong
from tests.helpers.envs.sum_environments import PicturedSums
from tests.helpers.texts.picture_prompts import encoded, picture


@pytest.mark.parametrize("name", sorted(set(Wrong.ANSWERS) - {"surrogate"}))
def test_wrong_observations_are_failures_that_say_why(name, play):
    plays = play("Wrong", retries=0)
    plays.start(0)
    said = {
        "none": "returned NoneType, not an Observation", "reward": "reward is nan, not a finite number",
        "role": "a message has the role 'assistant'; allowed are user, system, tool",
        "content": "content of a message is int, not text", "messages": "messages are str, not a list",
        "field": "a message is an object with role, content and perhaps tool_call_id and name",
        "parts": "a is 'b', not a finite number", "size": "the messages have 2,000,",
    }  # fmt: skip
    assert plays.step({0: name})[0].failure.startswith(f"ValueError: {HERE}:Wrong: {said[name]}")


def test_an_environment_that_only_says_that_it_can_be_replayed_is_found_out(play):
    plays = play("Unlike", retries=1)
    plays.start(0)
    assert plays.text(0, "a") == "1"
    event = plays.step({0: "b"})[0]
    assert event.failure == "RuntimeError: Unlike: turn 0 was answered differently when replayed"


HERMES, JSON_TEXT = FORMATS["hermes"], FORMATS["json"]
FUZZ = settings(max_examples=400)
CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
PIECES = ["<tool_call>", "</tool_call>", "<think>", "</think>", '{"name": "f", "arguments": {"x": 1}}',
          '{"name": "g"}', '{"name": ', '"arguments": {"x": ', "}}", "[", "]", ",", "{}", "NaN", "1e999", "9" * 5000,
          '"\\ud800"', "\ud800", "```json\n", "\n```", "null", '"', "\\", "a", " ", "\n", CALL]  # fmt: skip
JSON = st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
                    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
                        st.sampled_from(["name", "arguments", "x"]), inner, max_size=3), max_leaves=8)  # fmt: skip


def hermes(text):
    return parse_turn(text, 2, HERMES)


def test_thoughts_content_and_calls():
    turn = hermes(f"<think>\nI say <tool_call>\n</think>\n\nLet us see.\n{CALL}\n{CALL} Done. ")
    assert turn.reasoning == "I say <tool_call>" and turn.content == "Let us see.\nDone." and turn.errors == ()
    assert turn.calls == (ToolCall("call_2_0", "f", {"x": 1}), ToolCall("call_2_1", "f", {"x": 1}))
    assert turn.number == 2 and turn.text.startswith("<think>\nI say")


@pytest.mark.parametrize("text, reasoning, content", [
    ("a", "", "a"), ("b</think>a", "b", "a"), (" <think> b </think> a </think>", "b", "a </think>"),
    ("</think>", "", ""), ("<think></think>", "", ""), ("a <think>b", "", "a <think>b"),
    # Thoughts that do not end: nothing in them is a call.
    (f"<think>b {CALL}", f"b {CALL}", ""), (f"b {CALL}</think>a", f"b {CALL}", "a"),
])  # fmt: skip
def test_thoughts(text, reasoning, content):
    turn = hermes(text)
    assert (turn.reasoning, turn.content, turn.calls, turn.errors) == (reasoning, content, (), ())


@FUZZ
@given(st.lists(st.sampled_from(PIECES), max_size=12).map("".join))
def test_the_servers_parser_finds_the_same_calls(text):
    """It reads the text in pieces, and leaves thoughts of Hermes in the content."""
    _, _, calls = ToolCallParser(HERMES).feed(text, is_last=True)
    streamed = [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]
    turn = parse_turn(f"</think>{text}", 0, HERMES)
    assert [(call.name, call.arguments) for call in turn.calls] == streamed


@FUZZ
@given(JSON)
def test_json_values_are_read_as_json_reads_them(value):
    written = json.dumps(value)
    turn = hermes(f"<tool_call>{written}</tool_call>")
    is_call = (isinstance(value, dict) and isinstance(value.get("name"), str) and value["name"].strip() != ""
               and isinstance(value.get("arguments", {}), dict) and is_finite(value))  # fmt: skip
    if is_call:
        assert [(call.name, call.arguments) for call in turn.calls] == [(value["name"], value.get("arguments", {}))]
        assert turn.errors == ()
    else:
        assert turn.calls == () and len(turn.errors) == 1
    plain = parse_turn(written, 0, JSON_TEXT)
    if is_call and "arguments" in value:
        assert plain.calls == (ToolCall("call_0_0", value["name"], value["arguments"]),) and plain.content == ""
    elif not isinstance(value, list):
        assert plain.calls == ()


def is_finite(value) -> bool:
    try:
        return bool(json.dumps(value, allow_nan=False))
    except ValueError:
        return False


def shouts(text):
    """A parser of a user: lines in capitals are calls."""
    if "!" in text:
        raise KeyError("no exclamations")
    return "", [(line.lower(), {}) for line in text.split("\n")], ["half a call"]


def test_a_parser_of_a_user():
    form = load_format(f"{__name__}:shouts")
    turn = parse_turn("b</think>GO\nSTOP", 1, form)
    assert [(call.id, call.name) for call in turn.calls] == [("call_1_0", "go"), ("call_1_1", "stop")]
    assert turn.errors == ("half a call",) and turn.reasoning == "b"
    broken = parse_turn("GO!", 1, form)
    assert broken.content == "GO!" and broken.calls == () and broken.errors == ("KeyError: 'no exclamations'",)
    assert parse_turn(" <think>b", 1, form).content == "" and parse_turn(" a\n", 1, form).calls[0].name == " a"
    wrong = parse_turn("a", 1, user_format(lambda text: ("", [(3, {}), ("f", []), ("g", {})], [])))
    assert [call.name for call in wrong.calls] == ["g"] and len(wrong.errors) == 2
    assert parse_turn("a", 1, user_format(lambda text: None)).errors[0].startswith("TypeError")
    with pytest.raises(UsageError, match="^--tool-call-parser xml: unknown; allowed: auto, hermes, qwen3-c.*json, "):
        load_format("xml")


# -- images ------------------------------------------------------------------------------------------------------------


PICTURE = picture(48, 32)
DATA = encoded(PICTURE)


def url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def seen(*content) -> Observation:
    return Observation([{"role": "user", "content": [*content]}])


def text(value: str) -> dict:
    return {"type": "text", "text": value}


def image(value) -> dict:
    return {"type": "image", "image": value}


@pytest.mark.parametrize("part", [image(PICTURE), image(DATA), image({"bytes": DATA}), image(url(DATA)),
                                  {"type": "image_url", "image_url": {"url": url(DATA), "detail": "low"}},
                                  {"type": "image_url", "image_url": url(DATA)}])  # fmt: skip
def test_images_become_marks_and_bytes(part):
    found, images = asyncio.run(seen_of(seen(text("a \ufdd2"), part, text("b"))))
    ((digest, data),) = images.items()
    assert decode(data) == PICTURE and found.messages[0]["content"] == f"a \ufffd\ufdd2{digest}:48x32\ufdd3b"
    assert checked(found) == found  # as a journal brings it


def test_texts_in_parts_are_lines():
    found, images = asyncio.run(seen_of(seen(text("a"), text("b"))))
    assert found.messages == [{"role": "user", "content": "a\nb"}] and not images


@pytest.mark.parametrize("part, said", [
    (image("http://x/a.png"), "image 'http://x/a.png': nothing is downloaded; give a path, bytes or a data: URL"),
    (image("/etc/passwd"), "image '/etc/passwd': no file is read; give a data: URL"),
    (image(b"GIF89a"), "GIF that Pillow cannot open"), (image(DATA[:200]), "PNG that cannot be decoded"),
    (image(encoded(Image.new("1", (16000, 8000)))), "16000 × 8000 pixels; allowed"),
    (image(url(b"<svg/>", "image/svg+xml")), "not PNG, JPEG, WebP, GIF or plain BMP; it begins with b'<svg/>'"),
    ({"type": "image"}, "has 1 places for images"), (image(7), "an image is a path, bytes"),
    ({"type": "video", "video": "a"}, "the content of message 1 has a part of the type video"),
    ("a", "must be a string"),
])  # fmt: skip
def test_hostile_images_are_one_line(part, said):
    with pytest.raises(ValueError) as raised:
        asyncio.run(seen_of(seen(part), "name"))
    assert said in str(raised.value) and str(raised.value).startswith("name: ") and "\n" not in str(raised.value)


def test_an_environment_with_images_is_played_again():
    task, turns = Task([], seed=3), [Turn(number, "a" * number, "") for number in range(3)]
    for factory, is_same in ((PicturedSums, True), (lambda: Other(), False)):
        one, answers = PicturedSums(), []
        one.reset(task)
        answers = [asyncio.run(seen_of(one.step(turn)))[0] for turn in turns]
        assert all("\ufdd2" in answer.messages[0]["content"] for answer in answers)
        with contextlib.nullcontext() if is_same else pytest.raises(RuntimeError, match="turn 0 was answered diff"):
            asyncio.run(factory().restore(task, turns, answers))


class Other(PicturedSums):
    """The same texts with other pictures."""

    def _shown(self, text, number):
        shown = super()._shown(text, number)
        return {**shown, "content": [image(PICTURE), *shown["content"][1:]]}


def test_a_task_has_the_images_of_its_line():
    mark = mark_of(ImageRef(sha256_of(DATA), 48, 32))
    other = mark_of(ImageRef("a" * 64, 48, 32))
    messages = [{"role": "system", "content": mark}, {"role": "assistant", "content": mark},
                {"role": "user", "content": f"a{mark}{other}b"}]  # fmt: skip
    task = Task(messages, images=({"bytes": DATA, "width": 48, "height": 32},))
    assert [readable(each["content"]) for each in messages] == [each["content"] for each in task.with_names().messages]
    system, assistant, user = (message["content"] for message in task.with_parts().messages)
    shown = {"type": "image_url", "image_url": {"url": url(DATA)}}
    assert system == [shown] and assistant == mark and user == [text("a"), shown, text(other), text("b")]
    assert task.with_parts().prompt == f"a{other}b" and Task(messages).with_parts().messages == messages
