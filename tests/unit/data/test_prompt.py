"""Lines of prompt files: fields that are read, and the line that each error names."""

import json

import pytest

from megarl.data.prompt import Prompt
from megarl.data.prompts import load_prompts
from tests.helpers.texts.refusals import refusal


def write(tmp_path, *lines):
    path = tmp_path / "p.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return str(path)


def test_all_fields_are_read(tmp_path):
    full = {"prompt": "1+1=", "answer": "2", "task": "sums", "metadata": {"a": [1]}, "response": "two"}
    pair = {"prompt": "x", "answer": None, "chosen": "y", "rejected": "", "margin": 0.5}
    whole = {"messages": [{"role": "user", "content": ""}, {"role": "assistant", "content": "b"}], "task": "t"}
    prompts = load_prompts(write(tmp_path, full, pair, whole))
    assert len(prompts) == 3
    assert prompts[0] == Prompt(0, "1+1=", "2", "sums", {"a": [1]}, "two")
    assert prompts[1] == Prompt(1, "x", chosen="y", rejected="", margin=0.5)
    assert prompts[2] == Prompt(2, task="t", messages=whole["messages"])
    assert [prompt.index for prompt in prompts] == [0, 1, 2]
    assert prompts.where(1) == f"--prompts {prompts.path}:2"
    with pytest.raises(AttributeError):
        prompts[0].prompt = "y"


def test_a_prompt_in_messages(tmp_path):
    said = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    one, raw = load_prompts(write(tmp_path, {"prompt": said}, {"prompt": "a\nb"}))
    assert (one.conversation, one.text, one.key) == (said, "system: s\nuser: u", (("system", "s"), ("user", "u")))
    assert (raw.conversation, raw.text, raw.key) == ([{"role": "user", "content": "a\nb"}], "a\nb", "a\nb")


BAD_LINES = [
    ('{"prompt": "a"', "malformed JSON"),
    ('{"prompt": "a", }', "malformed JSON: a comma before }; remove it"),
    ('{"prompt": "a"},', "malformed JSON: a comma after the object; remove it"),
    ("[" * 100000, "malformed JSON"),
    ('{"prompt": ' + "1" * 5000 + "}", "malformed JSON"),
    ("", "blank line"),
    ('["a"]', "expected a JSON object, not list"),
    ("{}", "prompt is missing"),
    ('{"prompt": null}', "prompt is missing"),
    ('{"prompt": ""}', "prompt is empty"),
    ('{"prompt": " \\n"}', "prompt is empty"),
    ('{"prompt": 3}', "prompt must be a string or a list of messages, not int"),
    ('{"prompt": []}', "prompt: must be a list of messages, at least one"),
    ('{"prompt": ["a"]}', "prompt: message 1 must be an object with role and content"),
    ('{"prompt": [{"role": "user", "content": "a", "name": "b"}]}', "prompt: message 1 of the role user has name"),
    ('{"prompt": [{"role": "tool", "content": "a", "name": "\\ud800"}]}', "prompt holds half of a surrogate pair"),
    ('{"prompt": [{"role": "me", "content": "a"}]}', "prompt: message 1 has the role 'me'; allowed: system, dev"),
    ('{"prompt": [{"role": "user", "content": null}]}', "prompt: the content of message 1 must be a string"),
    ('{"prompt": [{"role": "user", "content": " "}]}', "prompt is empty"),
    ('{"prompt": [{"role": "assistant", "content": "a"}]}', "the prompt's last message must not be the assistant's"),
    ('{"messages": [{"role": "user", "content": "a"}]}', "messages hold no message of the assistant"),
    ('{"messages": [{"role": "assistant", "content": "a"}], "prompt": "a"}', "both messages and prompt"),
    ('{"messages": "a"}', "messages must be a list of messages, not str"),
    ('{"messages": [{"role": "assistant", "content": "\\ud800"}]}', "messages holds half of a surrogate pair"),
    ('{"prompt": "a", "chosen": 1}', "chosen must be a string, not int"),
    ('{"prompt": "a", "margin": -1}', "margin is -1; it must be a number from 0 to 1e+09"),
    ('{"prompt": "a", "margin": NaN}', "margin is nan"),
    ('{"prompt": "a", "margin": true}', "margin must be a number, not bool"),
    ('{"prompt": "a", "answer": 3}', "answer must be a string, not int"),
    ('{"prompt": "a", "metadata": []}', "metadata must be an object, not list"),
    ('{"prompt": "a", "response": {}}', "response must be a string, not dict"),
    ('{"prompt": "a", "task": true}', "task must be a string, not bool"),
    ('{"prompt": "a", "anwser": "b"}', "unknown field 'anwser'; allowed: prompt, answer"),
    ('{"prompt": "\\ud800"}', "prompt holds half of a surrogate pair"),
]


@pytest.mark.parametrize("line, message", BAD_LINES, ids=[message for _, message in BAD_LINES])
def test_bad_line_is_named_with_its_number(tmp_path, line, message):
    path = write(tmp_path, {"prompt": "ok"}, line, {"prompt": "ok"})
    assert refusal(load_prompts, path, "--eval-prompts").startswith(f"--eval-prompts {path}:2: {message}")
