"""Prompt files and supervised examples: what is read, and the line that each error names."""

import json

import pytest

from megarl.data.prompts import Prompt, load_prompts
from megarl.data.sft import sft_examples
from megarl.errors import UsageError


class CharacterTokenizer:
    """One id a character; tabs vanish."""

    eos_id, bos_id, pad_id, vocab_size = 0, None, 0, 0x110000

    def encode(self, text):
        return [ord(character) for character in text.replace("\t", "")]

    def decode(self, ids):
        return "".join(chr(i) for i in ids if i)


def write(tmp_path, *lines):
    path = tmp_path / "p.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return str(path)


def test_all_fields_are_read(tmp_path):
    full = {"prompt": "1+1=", "answer": "2", "task": "sums", "metadata": {"a": [1]}, "response": "two"}
    prompts = load_prompts(write(tmp_path, full, {"prompt": "x", "answer": None}))
    assert len(prompts) == 2
    assert prompts[0] == Prompt(0, "1+1=", "2", "sums", {"a": [1]}, "two")
    assert prompts[1] == Prompt(1, "x")
    assert [prompt.index for prompt in prompts] == [0, 1]
    assert prompts.where(1) == f"--prompts {prompts.path}:2"
    with pytest.raises(AttributeError):
        prompts[0].prompt = "y"


def test_line_ends_and_encodings(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_bytes("\ufeff{\"prompt\": \"é\u2028漢\"}\r\n{\"prompt\": \"b\"}\r\n\r\n  \n".encode())
    assert [prompt.prompt for prompt in load_prompts(str(path))] == ["é\u2028漢", "b"]


BAD_LINES = [
    ('{"prompt": "a"', "malformed JSON"),
    ("[" * 100000, "malformed JSON"),
    ('{"prompt": ' + "1" * 5000 + "}", "malformed JSON"),
    ("", "blank line"),
    ('["a"]', "expected a JSON object, not list"),
    ("{}", "prompt is missing"),
    ('{"prompt": null}', "prompt is missing"),
    ('{"prompt": ""}', "prompt is empty"),
    ('{"prompt": " \\n"}', "prompt is empty"),
    ('{"prompt": 3}', "prompt must be a string, not int"),
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
    with pytest.raises(UsageError) as caught:
        load_prompts(path, "--eval-prompts")
    assert str(caught.value).startswith(f"--eval-prompts {path}:2: {message}")
    assert "\n" not in str(caught.value)


def test_bad_files(tmp_path):
    def error_of(path):
        with pytest.raises(UsageError) as caught:
            load_prompts(str(path))
        return str(caught.value)

    path = tmp_path / "p.jsonl"
    assert error_of(path) == f"--prompts {path}: no such file"
    assert error_of(tmp_path).startswith(f"--prompts {tmp_path}: cannot be read")
    path.write_bytes(b"")
    assert error_of(path) == f"--prompts {path}: the file holds no prompt"
    path.write_bytes(b"\n \n\n")
    assert error_of(path) == f"--prompts {path}: the file holds no prompt"
    path.write_bytes('{"prompt": "é"}'.encode("latin-1"))
    assert error_of(path).startswith(f"--prompts {path}: not UTF-8 (byte 12)")


def test_encode_checks_lengths(tmp_path):
    path = write(tmp_path, {"prompt": "ab"}, {"prompt": "abcd"})
    prompts = load_prompts(path)
    assert prompts.encode(CharacterTokenizer(), 4) == [[97, 98], [97, 98, 99, 100]]
    with pytest.raises(UsageError) as caught:
        prompts.encode(CharacterTokenizer(), 3)
    assert str(caught.value) == f"--prompts {path}:2: the prompt has 4 tokens; --max-prompt-length allows 3"


class NothingTokenizer(CharacterTokenizer):
    """Knows no character."""

    def encode(self, text):
        return []


def test_encode_refuses_a_prompt_without_tokens(tmp_path):
    path = write(tmp_path, {"prompt": "a"})
    with pytest.raises(UsageError, match=":1: the prompt becomes no token"):
        load_prompts(path).encode(NothingTokenizer(), 4)


def test_sft_tokens_and_mask(tmp_path):
    prompts = load_prompts(
        write(tmp_path, {"prompt": "ab", "response": "c", "answer": "z"}, {"prompt": "d", "answer": "ef"})
    )
    examples = sft_examples(prompts, CharacterTokenizer(), max_prompt_length=2, max_response_length=3)
    assert examples == [
        ([97, 98, 99, 0], [False, False, True, True]),
        ([100, 101, 102, 0], [False, True, True, True]),
    ]


@pytest.mark.parametrize("line, message", [
    ({"prompt": "a"}, "needs a response"),
    ({"prompt": "a", "response": "\t"}, "the response is empty"),
    ({"prompt": "a", "response": "abc"}, "4 tokens with EOS; --max-response-length allows 3"),
    ({"prompt": "abcd", "response": "a"}, "4 tokens; --max-prompt-length allows 3"),
])
def test_sft_errors_name_the_line(tmp_path, line, message):
    prompts = load_prompts(write(tmp_path, {"prompt": "a", "answer": "b"}, line))
    with pytest.raises(UsageError, match=rf"p\.jsonl:2: .*{message}"):
        sft_examples(prompts, CharacterTokenizer(), max_prompt_length=3, max_response_length=3)
