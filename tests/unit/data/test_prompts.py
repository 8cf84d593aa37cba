"""Prompt files: fields that are read, and the line that each error names."""

import json

import pytest

from megarl.data.columns import SFT, Columns
from megarl.data.conversations import Encoder
from megarl.data.prompts import load_prompts
from megarl.data.tokenizers import build_tokenizer
from megarl.errors import UsageError
from tests.helpers.programs import write_lines
from tests.helpers.texts.character_tokenizer import CHAT, PLAIN, CharacterTokenizer
from tests.helpers.texts.refusals import refusal
from tests.helpers.texts.small_tokenizers import chatml


def write(tmp_path, *lines):
    path = tmp_path / "p.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return str(path)


def test_line_ends_and_encodings(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_bytes('\ufeff{"prompt": "é\u2028漢"}\r\n{"prompt": "b"}\r\n\r\n  \n'.encode())
    assert [prompt.prompt for prompt in load_prompts(str(path))] == ["é\u2028漢", "b"]


def test_bad_files(tmp_path):
    def error_of(path):
        return refusal(load_prompts, str(path))

    path = tmp_path / "p.jsonl"
    assert error_of(path) == f"--prompts {path}: no such file"
    assert error_of(tmp_path).startswith(f"--prompts {tmp_path}: the folder holds no data; expected files named .jsonl")
    path.write_bytes(b"")
    assert error_of(path) == f"--prompts {path}: the file holds no prompt"
    path.write_bytes(b"\n \n\n")
    assert error_of(path) == f"--prompts {path}: the file holds no prompt"
    path.write_bytes('{"prompt": "é"}'.encode("latin-1"))
    assert error_of(path).startswith(f"--prompts {path}: not UTF-8 (byte 12)")


def test_encode_checks_lengths(tmp_path):
    path = write(tmp_path, {"prompt": "ab"}, {"prompt": "abcd"})
    prompts = load_prompts(path)
    assert list(prompts.encode(PLAIN, 4)) == [[97, 98], [97, 98, 99, 100]] == list(prompts.encode(PLAIN))
    assert list(prompts.encode(CHAT, 6)) == [list(map(ord, text)) for text in ("uaba", "uabcda")]
    with pytest.raises(UsageError) as caught:
        prompts.encode(PLAIN, 3)
    what = "the prompt has 4 tokens; --max-prompt-length allows 3; --filter-long-prompts drops such lines"
    assert str(caught.value) == f"--prompts {path}:2: {what}"


@pytest.mark.parametrize("line, message", [
    ({"messages": [{"role": "assistant", "content": "a"}]}, "prompt is missing; messages are for supervised training"),
    ({"prompt": [{"role": "user", "content": "a"}]}, "a prompt in messages needs --chat-template"),
])  # fmt: skip
def test_encode_names_the_line(tmp_path, line, message):
    prompts = load_prompts(write(tmp_path, {"prompt": "ok"}, line))
    with pytest.raises(UsageError, match=rf"p\.jsonl:2: {message}"):
        prompts.encode(PLAIN)


class NothingTokenizer(CharacterTokenizer):
    """Knows no character."""

    def encode(self, text):
        return []


def test_encode_rejects_a_prompt_without_tokens(tmp_path):
    path = write(tmp_path, {"prompt": "a"})
    with pytest.raises(UsageError, match=":1: the prompt becomes no token"):
        load_prompts(path).encode(Encoder(NothingTokenizer()), 4)


def test_texts_with_special_tokens_are_noted_once(tmp_path):
    encoder = Encoder(build_tokenizer("HuggingFaceTokenizer", chatml(tmp_path / "a")))
    rendered = {"prompt": "<|im_start|>user\nhello<|im_end|>\n"}
    noted = load_prompts(write(tmp_path, {"prompt": "hello"}, rendered, rendered)).note_special_tokens(encoder)
    where = f"--prompts {tmp_path / 'p.jsonl'}:2"
    assert noted.notes == (f"{where}: '<|im_start|>' is read as text, not as the special token of this name",)
    assert encoder.tokenizer.special["<|im_start|>"] not in encoder.prompt(noted[1])
    for plain in ({"prompt": "hello"}, {"prompt": "<s>"}):
        assert load_prompts(write(tmp_path, plain)).note_special_tokens(encoder).notes == ()
    later = {"prompt": "hello", "response": "bye<|im_end|>"}
    assert "'<|im_end|>'" in load_prompts(write(tmp_path, later)).note_special_tokens(encoder).notes[0]


def test_a_table_may_have_a_column_of_teachers(tmp_path):
    rows = [{"question": f"{i}", "answer": "1", "teacher": ("math", "code")[i % 2]} for i in range(4)]
    found = load_prompts(str(write_lines(tmp_path / "a.jsonl", rows)))
    assert [prompt.teacher for prompt in found] == ["math", "code"] * 2
    assert found[1].metadata == {"teacher": "code"}  # which a reward may read
    messages = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]
    rows = [{"conversations": messages, "teacher": "math"}]
    (found,) = load_prompts(str(write_lines(tmp_path / "b.jsonl", rows)), "--prompts", Columns(SFT))
    assert found.teacher == "math"
