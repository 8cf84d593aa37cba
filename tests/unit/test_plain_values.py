"""Halves of surrogate pairs do no harm, wherever a text goes: to a tokenizer, a file, a client or the terminal."""

import io
import json
import math

import pytest

from megarl.data.chat import ChatTemplate
from megarl.data.conversations import Encoder
from megarl.data.prompt import Prompt
from megarl.data.prompts import load_prompts
from megarl.data.tokenizers import build_tokenizer
from megarl.environments.agents.dialect import streamed
from megarl.observe.files import json_bytes
from megarl.plain_values import is_unicode, whole_unicode
from megarl.serving.answers import event
from megarl.serving.error_answers import JSONResponse
from megarl.trainers.prompt_inputs import print_notes
from tests.helpers.programs import write_lines
from tests.helpers.texts import small_tokenizers

HALVES = ["\ud800", "a\ud800b", "\udc00\ud800", "é\udfff", "\ud83d\ude42", "x\ud83d", "\ud800" * 30_000, "數\ud800 the"]
TOKENIZERS = ("chatml", "llama", "mistral", "gemma", "unigram", "wordpiece", "characters", "sentence_piece")


@pytest.mark.parametrize("text", HALVES, ids=range(len(HALVES)))
def test_halves_are_joined_or_replaced(text):
    whole = whole_unicode(text)
    assert not is_unicode(text) and is_unicode(whole) and len(whole) == len(text) - (text == "\ud83d\ude42")
    assert whole == whole_unicode(whole) and whole.count("\ufffd") in (0, 1, 2, 30_000)
    assert json.loads(json.dumps(text).replace("\\ud83d\\ude42", "🙂")) == (whole if whole == "🙂" else text)


@pytest.fixture(scope="module", params=TOKENIZERS)
def tokenizer(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizers") / request.param
    is_sentence_piece = request.param == "sentence_piece"
    made = getattr(small_tokenizers, request.param)(path)
    return build_tokenizer("SentencePieceTokenizer" if is_sentence_piece else "HuggingFaceTokenizer", str(made or path))


def test_each_tokenizer_reads_them_as_u_fffd(tokenizer):
    special = next(iter(tokenizer.special))
    texts = [*HALVES, *(f"{special}{text}{special}" for text in HALVES)]
    whole = [whole_unicode(text) for text in texts]
    for encode, together in (
        (tokenizer.encode, tokenizer.encode_batch),
        (tokenizer.encode_template, tokenizer.encode_template_batch),
    ):
        expected = [encode(text) for text in whole]
        assert [encode(text) for text in texts] == expected == together(texts) == together(whole)
    assert tokenizer.encode_template(texts[-1]).count(tokenizer.special[special]) == 2


def test_a_template_that_writes_halves_is_no_traceback(tokenizer):
    written = "{% for message in messages %}{{ '\\ud800' }}{{ message.content }}\ud83d{% endfor %}"
    encoder = Encoder(tokenizer, ChatTemplate(written, tokenizer))
    assert encoder.prompt(Prompt(0, "the")) == tokenizer.encode_template("\ufffdthe\ufffd")


def test_answers_have_them_as_escapes():
    content = {"template": "{{ 'é\ud800' }}"}
    for body in (
        JSONResponse(content).body,
        event(content).removeprefix(b"data: "),
        streamed([content]).body.removeprefix(b"data: "),
        json_bytes(content),
    ):
        assert json.loads(body.decode()) == content and "é".encode() in body
    assert json.loads(json_bytes({"a": [math.nan, math.inf]})) == {"a": [None, None]}


def test_notes_about_files_of_any_name_are_printed(tmp_path):
    path = write_lines(tmp_path / "p\udcffompts.jsonl", [{"prompt": "a"}])
    prompts = load_prompts(str(path)).noted("a \x1b[2J note")
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)
    print_notes({"prompts": prompts}, 0, terminal)
    printed = terminal.buffer.getvalue().decode()
    assert printed.endswith("p\\udcffompts.jsonl: a \\x1b[2J note\n") and printed.count("\n") == 1
