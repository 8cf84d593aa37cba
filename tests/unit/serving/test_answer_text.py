"""Stop strings, tool calls and thoughts in generated text that comes in pieces."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.data.detokenizer import Vocabulary
from megarl.data.tokenizers import build_tokenizer
from megarl.serving.answer_text import AnswerText, StopStrings, ToolCallParser, has_opened_thoughts
from megarl.serving.replica_messages import RequestUpdate
from megarl.tool_formats import FORMATS
from tests.helpers.texts.small_tokenizers import chatml

CALL = '<tool_call>{"name": "f", "arguments": {"a": "<tool"}}</tool_call>'


def answer(text, sizes=(), name="hermes", **options):
    parser, start, found = ToolCallParser(FORMATS[name], **options), 0, []
    for size in sizes:
        found.append(parser.feed(text[start : start + size]))
        start += size
    found.append(parser.feed(text[start:], is_last=True))
    content, reasoning = ("".join(each[k] for each in found) for k in (0, 1))
    return content, reasoning, [call for each in found for call in each[2]]


def parsed(text, sizes=()):
    content, reasoning, calls = answer(text, sizes)
    assert reasoning == ""
    return content, [call["function"] for call in calls]


@given(
    st.lists(st.sampled_from([CALL, " ", "\n", "a", "<tool_call>", "</tool_call>", "<", "{"])),
    st.lists(st.integers(0, 9)),
)
def test_how_the_text_is_cut_does_not_matter(pieces, sizes):
    text = "".join(pieces)
    assert parsed(text, sizes) == parsed(text)
    if CALL not in text and "<tool_call>" not in text:
        assert parsed(text) == (text, [])


@pytest.mark.parametrize("text, content, count", [
    (f"a \n{CALL}\n{CALL} \n", "a", 2), (f"{CALL} b ", "b ", 1), (CALL.removesuffix("</tool_call>"), "", 1),
    ("<tool_call>[]</tool_call>", "<tool_call>[]</tool_call>", 0), ("a <tool_call>{\n", "a <tool_call>{\n", 0),
    ('<tool_call>{"name": 5}</tool_call>', '<tool_call>{"name": 5}</tool_call>', 0),
    ('<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>', None, 0),
    ('<tool_call>{"name": "\\ud800"}</tool_call>', None, 0), ("<tool_call>" + "[" * 10**5, None, 0),
])  # fmt: skip
def test_content_and_calls(text, content, count):
    found, calls = parsed(text)
    assert found == (text if content is None else content) and len(calls) == count


def test_arguments_are_always_valid_unicode():
    _, calls = parsed('<tool_call>{"name": "f", "arguments": {"é": "\\ud800"}}</tool_call>')
    assert json.loads(calls[0]["arguments"].encode()) == {"é": "\ufffd"}


DEEPSEEK = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>%s<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
HARMONY = "<|channel|>analysis<|message|> b <|end|><|start|>assistant<|channel|>final<|message|> a"


@pytest.mark.parametrize("name, text, opened, content, reasoning, count", [
    ("deepseek", "b\n</think>\n\na\n" + DEEPSEEK % "{}" + "\n", True, "a", "b", 1),
    ("deepseek", "b</think>a", False, "b</think>a", "", 0), ("deepseek", " a ", False, " a ", "", 0),
    ("deepseek", "a" + DEEPSEEK % "{", False, "a<｜tool▁call▁begin｜>f<｜tool▁sep｜>{<｜tool▁call▁end｜>", "", 0),
    ("glm", "\n<think>b</think>\na\n<tool_call>f\n</tool_call>", False, "a", "b", 1),
    ("gpt-oss", HARMONY, False, "a", "b", 0), ("mistral", "[THINK]b\n[/THINK]a", False, "a", "b", 0),
    ("gpt-oss", HARMONY + "<|end|><|start|>assistant to=functions.f<|channel|>commentary json<|message|>{}", False,
     "a", "b", 1),
    ("llama", '{"name": "f", "parameters": {}}', False, "", "", 1), ("json", "[1, 2]", False, "[1, 2]", "", 0),
    ("hermes", f"<think>b</think>\n\na {CALL}", False, "<think>b</think>\n\na", "", 1),
])  # fmt: skip
def test_formats(name, text, opened, content, reasoning, count):
    for sizes in ((), [1] * len(text)):
        found = answer(text, sizes, name, opened=opened)
        assert found[:2] == (content, reasoning) and [call["function"]["name"] for call in found[2]] == ["f"] * count


def test_calls_are_content_if_none_may_be_made():
    assert answer("a " + DEEPSEEK % "{}", name="deepseek", may_call=False) == (
        "a <｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜>", "", [])  # fmt: skip
    assert answer(HARMONY, name="gpt-oss", may_call=False) == ("a", "b", [])


def test_ids():
    kimi = "<|tool_call_begin|>%s<|tool_call_argument_begin|>{}<|tool_call_end|>"
    ids = [call["id"] for call in answer(kimi % "functions.f:0" + kimi % "functions.f:0", name="kimi")[2]]
    assert ids[0] == "functions.f:0" and ids[1].startswith("call_")
    ids = [call["id"] for call in answer("[TOOL_CALLS]f[ARGS]{}" * 2, name="mistral")[2]]
    assert len(set(ids)) == 2 and all(len(each) == 9 and each.isalnum() for each in ids)


def test_whether_the_prompt_has_begun_thoughts(tmp_path):
    tokenizer = build_tokenizer("HuggingFaceTokenizer", chatml(tmp_path / "t"))
    vocabulary = Vocabulary(tokenizer)
    for text, wanted in {"a<think>\n": True, "<think>": True, "<think></think>": False, "a": False, "": False}.items():
        prompt = tokenizer.encode_template(f"<|im_start|>assistant\n{text}")
        assert has_opened_thoughts(FORMATS["glm"], vocabulary, prompt) == wanted
        assert not has_opened_thoughts(FORMATS["gpt-oss"], vocabulary, prompt)


# -- stop strings ------------------------------------------------------------------------------------------------------

ALPHABET = st.text("ab", max_size=30)


@given(
    ALPHABET, st.lists(st.text("ab", min_size=1, max_size=6), max_size=4), st.lists(st.integers(0, 5)), st.booleans()
)
def test_the_first_complete_stop_string_cuts_the_text_however_it_is_cut_into_pieces(text, stops, sizes, include):
    ends = [(text.find(s) + len(s), -len(s), s) for s in stops if s in text]
    end, _, expected = min(ends, default=(len(text), 0, None))
    cut = end if include or expected is None else end - len(expected)
    found, start = StopStrings(stops, include), 0
    shown = ""
    for size in [*sizes, len(text)]:
        shown += found.feed(text[start : start + size])
        start += size
        assert text[:cut].startswith(shown)
    shown += found.finish()
    assert shown == text[:cut] and found.matched == expected


def test_only_what_may_begin_a_stop_string_is_held_back():
    stops = StopStrings(["\nUser:", "END"])
    assert [stops.feed(text) for text in ("a", "\nUse", "ful", " E", "N", "D")] == ["a", "", "\nUseful", " ", "", ""]
    assert stops.matched == "END" and stops.feed("more") == ""


@pytest.mark.parametrize("finish, text", [(None, "so "), ("length", "so E"), ("abort", "so E")])
def test_the_beginning_of_a_stop_string_is_text_once_the_answer_ends(finish, text, tmp_path):
    tokenizer = build_tokenizer("HuggingFaceTokenizer", chatml(tmp_path / "t"))
    vocabulary, tokens = Vocabulary(tokenizer), tokenizer.encode("so E")
    answer = AnswerText(vocabulary, (("END",), frozenset(), False))
    progress = answer.feed(RequestUpdate(1, tokens, [-1.0] * len(tokens), finish=finish))
    assert progress.text == text and progress.finish == finish and progress.stop_reason is None
