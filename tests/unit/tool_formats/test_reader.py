"""Every format reads pieces of any size, and hostile text, in linear time."""

import itertools
import json
import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.environments.protocol import parse_turn
from megarl.tool_formats import FORMATS
from megarl.tool_formats.reader import CONTENT, Said, TurnReader, Until, joined
from megarl.tool_formats.written_calls import MAX_CALLS
from tests.helpers.texts.tool_calls import CALLS, PLAIN, TOOLS
from tests.helpers.tiers import by_default

FUZZ = settings(max_examples=300)
PIECES = ['{"name": "f", "arguments": {"x": 1}}', '{"name": "f", "parameters": {"x": 1}}', '{"x": 1}', "[", "{", "]",
          "}", ";", " ", "\n", "f", "é", "\ud800", '"', "```json\n", "\n```", "<", "assistant", " to=functions.f",
          "analysis", "commentary", "final", "function", "functions.f:0", "<function=f>", "</function>",
          "<parameter=x>", "</parameter>", "1e999", "9" * 5000, "NaN", "null", '"arguments": {"x": ', "\\"]  # fmt: skip


def texts(form):
    return st.lists(st.sampled_from([*form.all_marks, *form.all_marks, *PIECES]), max_size=16).map("".join)


def read(form, text, sizes=(), opened=None):
    reader, at, parts = form.reader(TOOLS, opened), 0, []
    for size in sizes:
        parts += reader.feed(text[at : at + size])
        at += size
    return [*parts, *reader.feed(text[at:]), *reader.finish()]


@pytest.mark.parametrize("name", by_default(FORMATS, ("hermes", "gpt-oss")))
def test_how_the_text_is_cut_does_not_matter(name):
    form = FORMATS[name]
    lists, opened = st.lists(st.integers(0, 9), max_size=30), st.sampled_from([None, True, False])

    @FUZZ
    @given(text=texts(form), sizes=lists, opened=opened)
    def holds(text, sizes, opened):
        whole, cut, single = (read(form, text, each, opened) for each in ((), sizes, [1] * len(text)))
        assert joined(whole) == joined(cut) == joined(single)
        contents = ["".join(p.text for p in parts if p[0] == CONTENT) for parts in (whole, cut, single)]
        assert contents[0] == contents[1] == contents[2]

    holds()


@pytest.mark.parametrize("form", FORMATS.values(), ids=list(FORMATS))
def test_any_text_is_a_turn_that_programs_can_handle(form):
    @FUZZ
    @given(texts(form))
    def holds(text):
        turn = parse_turn(text, 0, form, TOOLS)
        assert pickle.loads(pickle.dumps(turn)) == turn
        for each in (turn.text, turn.content, turn.reasoning, *turn.errors):
            each.encode()
        assert len({call.id for call in turn.calls}) == len(turn.calls)
        for call in turn.calls:
            json.dumps([call.id, call.name, call.arguments], ensure_ascii=False, allow_nan=False).encode()

    holds()


def test_no_mark_is_part_of_another():
    """Otherwise it would depend on the pieces which of them is found."""
    for form in FORMATS.values():
        assert not [pair for pair in itertools.permutations(form.all_marks, 2) if pair[0] in pair[1]]


@pytest.mark.parametrize("name", by_default(FORMATS, ("hermes", "mistral", "qwen3-coder", "llama")))
def test_a_megabyte_of_marks(name):
    """Nothing takes more than linear time: with a quadratic step this test takes hours."""
    form = FORMATS[name]
    starts = (*form.all_marks, CALLS.get(name, PLAIN.get(name, "%s")).partition("%s")[0])
    repeated = (*form.all_marks, "{", '{"x":', " ", "\n", "<parameter=x></parameter>")
    for start, again in itertools.product(starts, repeated):
        for text in (start + again * (200_000 // len(again)), (start + again) * (200_000 // len(start + again))):
            turn = parse_turn(text, 0, form)
            assert len(turn.calls) <= MAX_CALLS and all(len(error) < 300 for error in turn.errors)


@pytest.mark.parametrize("name", ["hermes", "json"])
def test_a_megabyte_of_json(name):
    fence, opened, spaces = "```json\n" + "\n" * 10**6, '{"name": ' * 100_000, '[{"name":' + " " * 10**6
    for text in (fence, opened, spaces, "\\" * 10**6, "\ud800" * 10**6, "<think>" * 140_000, "</think>" * 120_000):
        turn = parse_turn(text, 0, FORMATS[name])
        assert turn.calls == () and len(turn.errors) <= 1 and all(len(error) < 300 for error in turn.errors)


@pytest.mark.long
def test_an_answer_of_single_characters_takes_linear_time():
    for form, character in itertools.product(FORMATS.values(), " {<a"):
        reader = form.reader()
        for _ in range(50_000):
            reader.feed(character)
        reader.finish()


def test_what_a_grammar_does_not_read_is_content():
    def ends_early():
        yield Until(("|",))

    reader = TurnReader(ends_early())
    assert [*reader.feed("a|b"), *reader.feed("c")] == [Said(CONTENT, "b"), Said(CONTENT, "c")]
