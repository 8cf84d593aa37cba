"""Functions as tools: schemas as transformers makes them, and what a policy gets for a wrong call."""

import asyncio
import json
from typing import Any, Literal

import numpy
import pytest

from megarl.data.images.names import readable
from megarl.environments.protocol import Observation, Task, ToolCall, Turn, checked, seen_of
from megarl.environments.tools import ToolEnvironment, mismatch, schema_of
from tests.helpers.texts.picture_prompts import encoded, picture


def multiply(first: int, second: int = 2) -> int:
    """Multiplies two numbers.

    Of any size.

    Args:
        first: The first factor.
        second: The second factor, which may be
            left out.

    Returns:
        The product.
    """
    return first * second


def search(query: str, sites: list[str], limit: int | None = None, exact: bool = False) -> list[str]:
    """
    Searches the web.

    Args:
        query: What to look for.
        sites: Where to look.
        limit: At most so many results.
        exact: Whether the words must be next to each other.
    """
    return [query] * (limit or 1)


def convert(value: float, unit: Literal["m", "km"], options: dict[str, int]) -> str:
    """Converts a length.

    Args:
        value: The length.
        unit: Its unit.
        options: Numbers by name.
    """
    return f"{value} {unit}"


async def wait_for_ever() -> str:
    """Waits."""
    await asyncio.Event().wait()
    return ""


def fail(text: str) -> str:
    """Raises.

    Args:
        text: Of the error.
    """
    raise TimeoutError(text) if text == "a socket" else ValueError(text)


def leave() -> str:
    """Tries to end the process."""
    raise SystemExit(3)


@pytest.mark.parametrize("function", [multiply, search, convert])
def test_schemas_are_those_of_transformers(function):
    from transformers.utils import get_json_schema

    expected, found = get_json_schema(function)["function"], schema_of(function)["function"]
    expected.pop("return", None)
    assert found["parameters"] == expected["parameters"]
    assert found["name"] == expected["name"]
    assert " ".join(found["description"].split()) == " ".join(expected["description"].split())


@pytest.mark.parametrize("make, said", [
    (lambda: schema_of(lambda x: x), "parameter x has no type hint"),
    (lambda: ToolEnvironment([untyped]), "tool untyped: parameter other has no type hint"),
    (lambda: ToolEnvironment([with_object]), "has the type <class 'object'>, which JSON cannot hold"),
    (lambda: ToolEnvironment([with_rest]), "parameter rest must be one that is given by its name"),
])  # fmt: skip
def test_functions_that_have_no_schema_are_refused(make, said):
    with pytest.raises(TypeError, match=said):
        make()


def untyped(other):
    """No hint."""


def with_object(other: object):
    """A type that JSON has not."""


def with_rest(*rest: int):
    """Any number of values."""


def answer(*calls, errors=(), content="", **options) -> Observation:
    """What the tools answer to a turn with these calls."""
    environment = ToolEnvironment([multiply, search, convert, wait_for_ever, fail, leave], **options)
    environment.reset(Task([]))
    named = tuple(ToolCall(f"call_0_{i}", name, arguments) for i, (name, arguments) in enumerate(calls))
    return asyncio.run(environment.step(Turn(0, "", content, "", named, tuple(errors))))


def test_calls_are_answered_in_their_order_each_with_its_id():
    found = answer(("multiply", {"first": 3, "second": 4}), ("search", {"query": "é", "sites": [], "limit": 2}))
    assert found.messages == [
        {"role": "tool", "tool_call_id": "call_0_0", "name": "multiply", "content": "12"},
        {"role": "tool", "tool_call_id": "call_0_1", "name": "search", "content": '["é", "é"]'},
    ]
    assert not found.done and found.reward == 0.0


@pytest.mark.parametrize("call, said", [
    (("divide", {}),
     "Error: there is no tool 'divide'; there are: multiply, search, convert, wait_for_ever, fail, leave"),
    (("multiply", {}), "Error: multiply needs the argument first"),
    (("multiply", {"first": 1, "third": 2}), "Error: multiply has no argument 'third'; it has: first, second"),
    (("multiply", {"first": "1"}), "Error: the argument first of multiply must be integer, not string"),
    (("multiply", {"first": True}), "Error: the argument first of multiply must be integer, not boolean"),
    (("multiply", {"first": 1.5}), "Error: the argument first of multiply must be integer, not number"),
    (("search", {"query": "a", "sites": [1]}), "Error: the argument sites of search must be string, not integer"),
    (("convert", {"value": 1, "unit": "mile", "options": {}}),
     "Error: the argument unit of convert must be one of 'm', 'km'"),
    (("fail", {"text": "a\nb"}), "Error: ValueError: a b"),
    (("fail", {"text": "a socket"}), "Error: TimeoutError: a socket"),  # its own, not the limit's
    (("leave", {}), "Error: SystemExit: 3"),
])  # fmt: skip
def test_a_wrong_call_is_text_for_the_policy(call, said):
    assert answer(call).messages[0]["content"] == said


def test_a_late_tool_is_text_and_others_are_answered():
    found = answer(("wait_for_ever", {}), ("multiply", {"first": 2}), timeout=3.0)
    assert [m["content"] for m in found.messages] == ["Error: no result within 3 seconds", "4"]


def test_more_calls_than_allowed_and_unreadable_ones_are_said():
    found = answer(("multiply", {"first": 2}), ("multiply", {"first": 3}), errors=["malformed JSON"], max_calls=1)
    assert [m["content"] for m in found.messages] == [
        "4", "Error: at most 1 calls are made of a turn", "Error: a tool call could not be read: malformed JSON",
    ]  # fmt: skip
    assert found.messages[2] == {**found.messages[1], "content": found.messages[2]["content"]}  # of the last call
    assert set(answer(errors=["x"]).messages[0]) == {"role", "content"}


def test_a_turn_without_calls_ends_the_episode():
    assert answer(content="12") == Observation(done=True)
    assert answer(content="12", reward=lambda task, text: float(text == "12")).reward == 1.0


@pytest.mark.parametrize("value, hint, fits", [
    (1, int, True), (1, float, True), (None, int | None, True), (None, int, False), ("a", int | str, True),
    ([1], int | str, False), ({"a": 1}, dict[str, int], True), ({"a": "b"}, dict[str, int], False), ({}, Any, True),
    ([[1]], list[list[int]], True), ([["1"]], list[list[int]], False), (False, bool, True), (0, bool, False),
])  # fmt: skip
def test_values_are_compared_with_their_types(value, hint, fits):
    from megarl.environments.tools import type_schema

    assert (mismatch(json.loads(json.dumps(value)), type_schema(hint, "")) is None) == fits


async def paid_later(task, content):
    """A reward that is awaited."""
    await asyncio.sleep(0)
    return numpy.float32(len(content))


def table(size: int) -> dict:
    """Numbers of numpy.

    Args:
        size: How many.
    """
    return {"sum": numpy.int64(size), "is_even": numpy.bool_(size % 2 == 0), "mean": numpy.float64(0.5)}


def counts(up_to: int):
    """Counts.

    Args:
        up_to: The last number.
    """
    yield from range(up_to)


def test_a_reward_of_the_end_may_be_async_and_numbers_of_libraries_are_read():
    environment = ToolEnvironment([table], reward=paid_later)
    asked, end = Turn(0, "", "", calls=(ToolCall("c", "table", {"size": 4}),)), Turn(1, "four", "four")
    found = asyncio.run(environment.step(asked))
    assert json.loads(found.messages[0]["content"]) == {"sum": 4, "is_even": True, "mean": 0.5}
    assert checked(asyncio.run(environment.step(end))) == Observation(reward=4.0, done=True)
    with pytest.raises(TypeError, match="the tool counts yields"):
        ToolEnvironment([counts])


# -- images ------------------------------------------------------------------------------------------------------------


def draw(what: str):
    """Draws.

    Args:
        what: The kind of result.
    """
    image = picture(32, 48)
    return {
        "image": image, "bytes": encoded(image, "JPEG"), "list": ["a", image, {"x": 1}, encoded(image)],
        "damaged": encoded(image)[:90], "float": image.convert("F"), "text": b"GIF", "object": [object(), image],
    }[what]  # fmt: skip


@pytest.mark.parametrize("what, said", [("damaged", "PNG that cannot be decoded"), ("float", "in the mode F"),
                                        ("text", "not PNG, JPEG"), ("object", "is not JSON serializable")])  # fmt: skip
def test_an_image_that_cannot_be_read_is_text_for_the_policy(what, said):
    (message,) = asyncio.run(ToolEnvironment([draw]).step(turn_of(what))).messages
    assert message["content"].startswith("Error: ") and said in message["content"]


def turn_of(*kinds: str) -> Turn:
    calls = (ToolCall(f"call_0_{k}", "draw", {"what": kind}) for k, kind in enumerate(kinds))
    return Turn(0, "", "", calls=tuple(calls))


def test_results_may_have_images(monkeypatch):
    async def seen(*kinds):
        return await seen_of(await ToolEnvironment([draw]).step(turn_of(*kinds)))

    found, images = asyncio.run(seen("image", "bytes", "list"))
    contents = [readable(message["content"]) for message in found.messages]
    names = [f"[image 32×48 sha:{digest[:8]}]" for digest in images]
    png, jpeg = names[:2]
    assert contents[:2] == [png, jpeg] and contents[2].startswith(f'a{png}{{"x": 1}}[image 32×48')
    monkeypatch.setattr("megarl.environments.tools.MAX_BYTES", len(encoded(picture(32, 48), "JPEG")))
    found, images = asyncio.run(seen("bytes", "bytes"))
    assert len(images) == 1 and found.messages[1]["content"].startswith("Error: the images of a turn have more than")
