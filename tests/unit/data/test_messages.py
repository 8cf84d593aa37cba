"""Messages with tool calls, thoughts and results: what is valid, their keys, their text, and training on them."""

import itertools
import json

import pyarrow
import pytest
from pyarrow import parquet

from megarl.data.columns import Columns
from megarl.data.conversations import Encoder
from megarl.data.examples import sft_examples
from megarl.data.messages import THOUGHTS, conversation_of, key_of, message_error, template_message, text_of
from megarl.data.prompt import Prompt
from megarl.data.prompts import load_prompts
from megarl.errors import UsageError
from tests.helpers.texts.chat_encoders import encoder_of, spelled
from tests.helpers.texts.chat_templates import HERMES, QWEN25
from tests.helpers.texts.prompt_tables import write_jsonl
from tests.helpers.texts.small_tokenizers import CHATML, chatml

USER = {"role": "user", "content": "How warm?"}
CALL = {"id": "call_0_0", "type": "function", "function": {"name": "look", "arguments": {"b": 1, "a": "<|im_end|>"}}}
CALLS = {"role": "assistant", "content": "Well:", "reasoning_content": "I look.", "tool_calls": [CALL, CALL]}
RESULT = {"role": "tool", "content": "21 <|im_end|>", "tool_call_id": "call_0_0", "name": "look"}
ANSWER = {"role": "assistant", "content": "21."}
WHOLE = [USER, CALLS, RESULT, RESULT, ANSWER]


def calling(**changes):
    """The assistant's message with one call, changed."""
    return {"role": "assistant", "content": "", "tool_calls": [CALL | changes]}


def function(**changes):
    return calling(function=CALL["function"] | changes)


@pytest.mark.parametrize("message", [
    USER, CALLS, RESULT, {"role": "tool", "content": "3"}, {"role": "assistant", "tool_calls": [CALL]},
    {"role": "assistant", "content": None, "tool_calls": [CALL]}, {"role": "user", "content": "a", "name": None},
    calling(id=None, type=None), function(arguments='{"x": 1}'), function(arguments=""), ANSWER | {"tool_calls": []},
    {"role": "developer", "content": "a"}, USER | {"content": [{"type": "text", "text": "a"}]},
    ANSWER | {"thinking": "b"}, ANSWER | {"reasoning": "b", "reasoning_content": None},
])  # fmt: skip
def test_valid_messages(message):
    assert message_error([USER, message]) is None


@pytest.mark.parametrize("message, error", [
    ("a", "message 2 must be an object with role and content"), ({"role": "user"}, "message 2 must be an object with"),
    ({"role": "assistant", "content": None}, "the content of message 2 must be a string, not NoneType"),
    ({"role": "assistant", "content": None, "tool_calls": None}, "the content of message 2 must be a string"),
    (USER | {"weight": 1}, "message 2 has an unknown field 'weight'; allowed: role, content, tool_calls"),
    (USER | {"tool_calls": [CALL]}, "message 2 of the role user has tool_calls, which belongs to the role assistant"),
    (ANSWER | {"name": "a"}, "message 2 of the role assistant has name, which belongs to the role tool"),
    (RESULT | {"tool_call_id": 3}, "the tool_call_id of message 2 must be a string, not int"),
    (USER | {"thinking": "a"}, "message 2 of the role user has thinking, which belongs to the role assistant"),
    (ANSWER | {"reasoning_content": []}, "the reasoning_content of message 2 must be a string, not list"),
    (ANSWER | {"tool_calls": {}}, "the tool_calls of message 2 must be a list of calls"),
    ({"role": "assistant", "tool_calls": []}, "the content of message 2 must be a string, not NoneType"),
    (USER | {"content": [{"type": "image_url"}]}, "the content of message 2 has a part of the type image_url"),
    (USER | {"content": [{"type": "texts"}]}, 'the content of message 2 must be a string, or a list of {"type"'),
    (USER | {"content": [{"type": "text"}]}, "the content of message 2 must be a string, or a list"),
    (ANSWER | {"tool_calls": ["look"]}, "tool call 1 of message 2 must be an object with function"),
    (calling(index=0), "tool call 1 of message 2 must be an object with function and, optionally, id and type"),
    (calling(type="code"), "the type of tool call 1 of message 2 must be 'function', not 'code'"),
    (calling(id=3), "id and name of tool call 1 of message 2 must be strings"),
    (function(name=None), "id and name of tool call 1 of message 2 must be strings"),
    (calling(function={"name": "look"}), "the function of tool call 1 of message 2 must be an object with name"),
    (function(arguments=[]), "the arguments of tool call 1 of message 2 must be a JSON object, or the text of one"),
    (function(arguments="[]"), "the arguments of tool call 1 of message 2 must be a JSON object"),
    (function(arguments="{"), "the arguments of tool call 1 of message 2 must be a JSON object"),
    (function(arguments="[" * 10**5), "the arguments of tool call 1 of message 2 must be a JSON object"),
])  # fmt: skip
def test_wrong_messages(message, error):
    assert message_error([USER, message]).startswith(error)


def test_a_template_reads_objects_and_contents():
    found = template_message({"role": "assistant", "content": None, "tool_calls": [
        {"id": None, "function": {"name": "look", "arguments": '{"b": 1, "a": 2}'}}]})  # fmt: skip
    function = {"name": "look", "arguments": {"b": 1, "a": 2}}
    assert found == {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
    assert list(template_message(CALLS)["tool_calls"][0]) == list(CALL) and template_message(CALLS) == CALLS


def test_other_forms_of_one_conversation():
    parts = [{"type": "text", "text": "How"}, {"type": "text", "text": "warm?"}]
    forms = [{"role": "developer", "content": parts}, USER, ANSWER | {"tool_calls": [], "reasoning_content": None}]
    plain = [{"role": "system", "content": "How\nwarm?"}, USER, ANSWER]
    assert [template_message(message) for message in forms] == plain and key_of(forms) == key_of(plain)
    assert text_of(forms) == text_of(plain).replace("system:", "developer:")
    thoughtful = [[USER, ANSWER | {name: "hm"}] for name in THOUGHTS]
    assert len({key_of(each) for each in thoughtful}) == len({text_of(each) for each in thoughtful}) == 1
    both = template_message(ANSWER | {"thinking": "b", "reasoning_content": "a"})
    assert both == ANSWER | {"reasoning_content": "a"}


def test_a_key_keeps_everything():
    key = key_of(WHOLE)
    assert conversation_of(key) == WHOLE and hash(key) == hash(key_of(json.loads(json.dumps(WHOLE))))
    # The order of the arguments is what the template writes.
    assert list(conversation_of(key)[1]["tool_calls"][0]["function"]["arguments"]) == ["b", "a"]
    other = CALLS | {"tool_calls": [CALL | {"id": "call_0_1"}, CALL]}
    keys = {key, key_of([USER, other, *WHOLE[2:]]), key_of([USER, ANSWER]), key_of([USER])}
    assert len(keys) == 4 and key_of([USER]) == (("user", "How warm?"),)
    prompt = Prompt(0, WHOLE[:-1])
    assert prompt.conversation == WHOLE[:-1] and prompt.key == key[:-1]


def test_readable_text():
    call = 'assistant calls look({"b": 1, "a": "<|im_end|>"})'
    lines = ["user: How warm?", "assistant thinks: I look.", "assistant: Well:", call, call,
             *["tool look: 21 <|im_end|>"] * 2, "assistant: 21."]  # fmt: skip
    assert text_of(WHOLE) == "\n".join(lines) and text_of([USER]) == "How warm?"
    assert text_of([USER, {"role": "assistant", "tool_calls": [CALL]}]) == f"{lines[0]}\n{call}"


def trained(ids, mask):
    """The runs of tokens that are learnt."""
    pairs = itertools.groupby(zip(ids, mask, strict=True), key=lambda pair: pair[1])
    return [[i for i, _ in run] for learnt, run in pairs if learnt]


@pytest.mark.parametrize("template, words", [(QWEN25, "Well:\n"), (HERMES, "")], ids=["qwen2.5", "hermes"])
def test_training_on_calls_and_not_on_results(tmp_path, template, words):
    encoder = encoder_of(tmp_path / "t", chatml, template)
    text = {"function": {"name": "look", "arguments": '{"b": 1, "a": "<|im_end|>"}'}}
    written = [USER, CALLS | {"tool_calls": [text, text]}, RESULT, RESULT, ANSWER]
    prompts = load_prompts(write_jsonl(tmp_path / "p.jsonl", [{"messages": WHOLE}, {"messages": written}]))
    ((ids, mask),), ((same_ids, same_mask),) = sft_examples(prompts, encoder, 500, 500)
    assert [*ids] == [*same_ids] and [*mask] == [*same_mask]
    call = '<tool_call>\n{"name": "look", "arguments": {"b": 1, "a": "<|im_end|>"}}\n</tool_call>'
    turns = [spelled(encoder.tokenizer, run) for run in trained(ids, mask)]
    assert turns == [f"{words}{call}\n{call}<|im_end|>", "21.<|im_end|>"]
    assert all(run.count(encoder.tokenizer.eos_id) == 1 for run in trained(ids, mask))
    assert spelled(encoder.tokenizer, ids) == encoder.template.plain(encoder.template.render(WHOLE))
    # As a prompt, the conversation before the last turn has the same tokens.
    start = len(ids) - 1 - len(trained(ids, mask)[-1])
    assert encoder.prompt(Prompt(0, WHOLE[:-1])) == [*ids[:start]]


TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]


def test_tools_of_a_row_are_rendered(tmp_path):
    encoder = encoder_of(tmp_path / "t", chatml, QWEN25)
    rows = [{"messages": WHOLE, "tools": tools} for tools in (TOOLS, json.dumps(TOOLS), [json.dumps(TOOLS[0])])]
    rows = [json.loads(json.dumps(row)) for row in rows]
    read = [
        load_prompts(write_jsonl(tmp_path / "own.jsonl", rows[:1]), columns=Columns("sft")),
        load_prompts(write_jsonl(tmp_path / "p.jsonl", rows), columns=Columns("sft", messages="messages")),
    ]
    assert "tools from tools" in read[1].notes[0]
    texts = {spelled(encoder.tokenizer, sft_examples(prompts, encoder, 900, 900)[i][0][0])
             for prompts in read for i in range(len(prompts))}  # fmt: skip
    assert texts == {encoder.template.plain(encoder.template.render(WHOLE, tools=TOOLS))}
    assert json.dumps(TOOLS[0]) in texts.pop()
    # In a prompt, also of a preference.
    row = {"prompt": [USER], "response": "21.", "chosen": "21.", "rejected": "3.", "tools": TOOLS}
    (prompt,) = load_prompts(write_jsonl(tmp_path / "r.jsonl", [row]))
    assert encoder.prompt(prompt) == encoder.chat_prompt([USER], TOOLS) != encoder.prompt(Prompt(0, [USER]))
    scored, tokens = encoder.reward_model_inputs([(prompt, "21.")], 900)[0][0], encoder.prompt(prompt)
    assert scored[: len(tokens)] == tokens
    with pytest.raises(UsageError, match="tools need --chat-template"):
        Encoder(encoder.tokenizer).prompt(Prompt(0, "a", tools=TOOLS))
    for tools in ("{", "3", [1], {"a": 1}):
        with pytest.raises(UsageError, match="p.jsonl:1: tools"):
            path = write_jsonl(tmp_path / "p.jsonl", [{"conversations": WHOLE, "tools": tools}])
            load_prompts(path, columns=Columns("sft"))


def test_a_template_that_leaves_calls_out_is_refused(tmp_path):
    encoder = encoder_of(tmp_path / "t", chatml, CHATML)
    with pytest.raises(UsageError, match="the template leaves out the assistant's call of 'look'"):
        encoder.conversation(WHOLE)


def test_names_that_only_other_rows_have_are_absent(tmp_path):
    """Arrow gives the arguments of all calls to each."""
    calls = [[calling(function={"name": "f", "arguments": arguments})] for arguments in ({"a": "x"}, {"b": [{"c": 1}]})]
    both = ({"strict": True}, {"description": "d"})
    tools = [[{"type": "function", "function": {"name": "f", **more}}] for more in both]
    parquet.write_table(pyarrow.table({"messages": calls, "tools": tools}), tmp_path / "p.parquet")
    prompts = load_prompts(str(tmp_path / "p.parquet"), columns=Columns("sft"))
    assert [[message["tool_calls"][0]["function"] for message in prompt.messages] for prompt in prompts] == [
        [{"name": "f", "arguments": {"a": "x"}}], [{"name": "f", "arguments": {"b": [{"c": 1}]}}],
    ]  # fmt: skip
    assert [prompt.tools for prompt in prompts] == tools


def test_calls_are_no_answers(tmp_path):
    """A response in one message is its content alone; with calls it would lose them."""
    call = {"role": "assistant", "tool_calls": [CALL]}
    path = write_jsonl(tmp_path / "p.jsonl", [{"question": [USER], "completion": [call]}])
    with pytest.raises(UsageError, match="completion: a response cannot hold tool_calls"):
        load_prompts(path, columns=Columns("sft"))
    path = write_jsonl(tmp_path / "q.jsonl", [{"prompt": [USER], "chosen": [ANSWER], "rejected": [CALLS]}])
    with pytest.raises(UsageError, match="rejected: a response cannot hold tool_calls or reasoning_content"):
        load_prompts(path, columns=Columns("reward"))
