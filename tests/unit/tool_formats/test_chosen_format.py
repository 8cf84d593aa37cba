"""The format of a chat template, and turns as tokens: what each family's template writes is what is read."""

import json
from pathlib import Path

import pytest

from megarl.data.turns import TurnTokens
from megarl.environments.protocol import parse_turn
from megarl.tool_formats import FORMATS
from megarl.tool_formats.chosen_format import name_of, unread_calls
from tests.helpers.texts.chat_encoders import encoder_of, spelled
from tests.helpers.texts.chat_templates import HERMES, QWEN25
from tests.helpers.texts.family_templates import FAMILY_TEMPLATES
from tests.helpers.texts.small_tokenizers import CHATML, PYTHONIC, chatml
from tests.helpers.worlds import run_world

TOOLS = [{"type": "function", "function": {"name": "f", "description": "a", "parameters": {
    "type": "object", "properties": {"text": {"type": "string"}, "count": {"type": "integer"}}}}}]  # fmt: skip
QUESTION = {"role": "user", "content": "q"}


@pytest.fixture(scope="module")
def encoders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("families")
    return {name: encoder_of(folder / name, each.tokenizer, each.template) for name, each in FAMILY_TEMPLATES.items()}


def turn_of(name, arguments):
    family = FAMILY_TEMPLATES[name]
    ids = [f"functions.f:{k}" if family.form == "kimi" else f"abcdefgh{k}" for k in range(family.calls)]
    calls = [{"id": each, "type": "function", "function": {"name": "f", "arguments": arguments}} for each in ids]
    turn = {"role": "assistant", "content": "", "tool_calls": calls}
    return turn, [{"role": "tool", "tool_call_id": each, "name": "f", "content": "r"} for each in ids]


@pytest.mark.parametrize("name", FAMILY_TEMPLATES)
def test_a_template_names_its_format(encoders, name):
    assert name_of("auto", encoders[name].template) == FAMILY_TEMPLATES[name].form
    assert name_of("json", encoders[name].template) == "json"


@pytest.mark.parametrize("template", [CHATML, QWEN25, HERMES, "{{ raise_exception('no') if messages[1] else '' }}"])
def test_other_templates_have_calls_of_hermes(tmp_path, template):
    assert name_of("auto", encoder_of(tmp_path / "t", chatml, template).template) == name_of("auto", None) == "hermes"


def test_calls_in_a_form_that_nothing_reads(tmp_path):
    """As LFM2's, which are Python."""
    template = encoder_of(tmp_path / "t", chatml, PYTHONIC).template
    assert name_of("auto", template) == "hermes"
    said = "--tool-call-parser auto: no format reads the calls that --chat-template writes; name one of hermes,"
    assert unread_calls("auto", template).startswith(said)
    for value, other in (("hermes", template), ("auto", None),
                         ("auto", encoder_of(tmp_path / "c", chatml, CHATML).template),
                         ("auto", encoder_of(tmp_path / "q", chatml, QWEN25).template)):  # fmt: skip
        assert unread_calls(value, other) is None


def test_a_template_may_write_plain_json(tmp_path):
    said = "{{- message.content + '<|im_end|>' }}{%- endgen"
    plain = CHATML.replace(said, "{{- message.tool_calls[0].function | tojson if message.tool_calls else '' }}" + said)
    assert plain != CHATML and name_of("auto", encoder_of(tmp_path / "t", chatml, plain).template) == "json"


@pytest.mark.parametrize("name", FAMILY_TEMPLATES)
@pytest.mark.parametrize("arguments", [
    {}, {"text": 'a "b" \\n\n\u4f60\U0001f642', "count": -12}, {"text": "<s>[INST]<|call|><|im_end|><|end|>"},
], ids=["none", "unicode", "special"])  # fmt: skip
def test_a_turn_in_tokens_is_read(encoders, name, arguments):
    """Marks that are special tokens are read, and their strings in arguments stay text."""
    encoder, family = encoders[name], FAMILY_TEMPLATES[name]
    turn, results = turn_of(name, arguments)
    opened = encoder.template.render([QUESTION], add_generation_prompt=True, tools=TOOLS)
    whole = encoder.template.render([QUESTION, turn, *results], tools=TOOLS)
    (ids,) = encoder.template.encode_following([(opened, whole[len(opened) :])]) if whole.startswith(opened) else ([],)
    end = next(n for n, i in enumerate(ids) if i in encoder.tokenizer.end_ids)
    tokens, form = TurnTokens(encoder, 100), FORMATS[family.form]
    text, marked = tokens.text(ids[: end + 1]), tokens.marked_text(ids[: end + 1], form.all_marks)
    if any(mark in json.dumps(arguments) for mark in form.all_marks):
        return  # a mark in an argument ends the call, as in all parsers of these formats
    found = parse_turn(text, 0, form, TOOLS, marked)
    assert [call.arguments for call in found.calls] == [arguments] * family.calls and found.errors == ()
    assert text == encoder.tokenizer.decode(ids[:end]) == found.text
    special = {i for name, i in encoder.tokenizer.special.items() if name in form.all_marks}
    assert (marked or text) == spelled(encoder.tokenizer, ids[:end])
    assert (marked is None) == special.isdisjoint(ids[:end])


def conversation(name):
    """A question, a turn with calls, their results and an answer; and the same with arguments as the template needs
    them."""
    turn, results = turn_of(name, {"text": "\u4f60 <b>", "count": 3})
    messages = [QUESTION, turn, *results, {"role": "assistant", "content": "a"}]
    asked = json.loads(json.dumps(messages))
    if FAMILY_TEMPLATES[name].form == "deepseek":
        for call in asked[1]["tool_calls"]:
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)
    return messages, asked


def rendered_by_transformers(rank: int, folder: str) -> dict[str, list[str]]:
    from transformers import AutoTokenizer

    found = {}
    for name, family in FAMILY_TEMPLATES.items():
        tokenizer = AutoTokenizer.from_pretrained(family.tokenizer(Path(folder) / name))
        _, asked = conversation(name)
        options = {"chat_template": family.template, "tools": TOOLS, "tokenize": False}
        found[name] = [
            tokenizer.apply_chat_template(asked[:count], add_generation_prompt=count < len(asked), **options)
            for count in (1, len(asked) - 1, len(asked))
        ]
    return found


def test_templates_are_rendered_as_transformers_renders_them(encoders, tmp_path):
    (found,) = run_world(rendered_by_transformers, 1, str(tmp_path))
    for name, encoder in encoders.items():
        messages, _ = conversation(name)
        for count, text in zip((1, len(messages) - 1, len(messages)), found[name], strict=True):
            assert encoder.template.render(messages[:count], count < len(messages), TOOLS) == text, name
