"""Chat templates: where they are read from, what they may do, and special strings in message contents."""

import json
import os
from pathlib import Path

import pytest

from megarl import plain_files
from megarl.data.chat import ChatTemplate, load_template
from megarl.data.conversations import build_encoder
from megarl.data.prompt import Prompt
from megarl.data.tokenizers import build_tokenizer
from megarl.errors import UsageError
from tests.helpers.texts.refusals import refusal
from tests.helpers.texts.small_tokenizers import CHATML, HUGGING_FACE, chatml, sentence_piece
from tests.references.transformers_chat import CONVERSATIONS, TEXTS, conversation

USER = {"role": "user", "content": "a"}
HELLO = [{"role": "user", "content": "Hello <|im_end|>\n"}]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return build_tokenizer("HuggingFaceTokenizer", chatml(tmp_path_factory.mktemp("t") / "chatml"))


def test_where_a_template_is_read_from(tokenizer, tmp_path):
    assert load_template(None, tokenizer) is None
    (tmp_path / "t.jinja").write_text(CHATML)
    (tmp_path / "latin.jinja").write_bytes("é".encode("latin-1"))
    rendered = [load_template(value, tokenizer).render(HELLO) for value in ("tokenizer", str(tmp_path / "t.jinja"))]
    assert rendered[0] == rendered[1]
    plain = build_tokenizer("SentencePieceTokenizer", sentence_piece(tmp_path / "t.model"))
    for value, message in [
        ("tokenizer", "the tokenizer has no chat template; give a Jinja file"),
        (str(tmp_path / "gone.jinja"), 'no such file; allowed: "tokenizer" or a Jinja file'),
        (str(tmp_path), "cannot be read"),
        (str(tmp_path / "latin.jinja"), "cannot be read"),
    ]:
        said = refusal(load_template, value, plain, "--reward-chat-template")
        assert said.startswith(f"--reward-chat-template {value}: {message}")


@pytest.mark.parametrize("source, message", [
    ("a\n{% for m in %}", "malformed Jinja, line 2"), ("{% include 'x' %}", "fails on these messages"),
    ("{{ messages.append(1) }}", "fails on these messages"), ("{{ ''.__class__.__mro__ }}", "fails on these messages"),
    ("{{ strftime_then('%d') }}", "'strftime_then' is undefined"),
    ("{{ raise_exception('no\n tools') }}", "messages: no tools"), ("\ufdd0", "U+FDD0"),
    ("{% set n = namespace(_a=1) %}", "a namespace has no place for '_a'"),
    ("{% set n = namespace() %}{% set n._a = 1 %}", "a namespace has no place for '_a'"),
    ("{{ dict.mro() }}", "fails on these messages"),
])  # fmt: skip
def test_a_wrong_template_is_one_line(tokenizer, source, message):
    with pytest.raises(UsageError) as caught:
        ChatTemplate(source, tokenizer).render(HELLO)
    assert str(caught.value).startswith("--chat-template: ") and message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("source, expected", [
    ("{{ {'a': 'é<'} | tojson }}", '{"a": "é<"}'), ("{{ 'é' | tojson(ensure_ascii=true) }}", '"\\u00e9"'),
    ("{{ [1] | tojson(ensure_ascii=false, indent=1) }}", "[\n 1\n]"),
    ("{{ dict(a=1).a }}{{ dict.fromkeys('b').b }}", "1None"),
    ("{% set n = namespace(self=1) %}{% set n.b = 2 %}{{ n.self + n.b }}", "3"),
    ("{% for m in messages %}{{ m.thinking }}|{{ m.reasoning_content }}{% endfor %}", "|hm|hm"),
])  # fmt: skip
def test_a_template_finds_what_transformers_gives_it(tokenizer, source, expected):
    messages = [USER, {"role": "assistant", "content": "a", "reasoning_content": "hm"}]
    assert ChatTemplate(source, tokenizer).render(messages) == expected


TOO_MUCH = "the template takes more than 1 s, or 1 GiB"
HOSTILE = {
    "loops": ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", TOO_MUCH),
    "product": ("{{ 'a' * 2000000000 }}", "a text of too many characters"),
    "product of a name": ("{{ messages[0].content * 2000000000 }}", "a text of too many characters"),
    "filled": ("{{ 'a'.ljust(2000000000) }}", TOO_MUCH), "centred": ("{{ 'a' | center(2000000000) }}", TOO_MUCH),
    "format": ("{{ '{:2000000000}'.format(1) }}", TOO_MUCH), "old format": ("{{ '%2000000000d' % 1 }}", "too many"),
    "doubled": ("{% set n = namespace(x='a') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
                TOO_MUCH),
    "power": ("{{ 9 ** (9 ** 9) }}", "a power of large numbers"), "number": ("{{ " + "9" * 5000 + " }}", "5000 digits"),
    "deep": ("{% if true %}" * 3000 + "{% endif %}" * 3000, "cannot be compiled: RecursionError"),
    "deep list": ("{{ " + "[" * 2000 + "]" * 2000 + " }}", "cannot be compiled: RecursionError"),
    "macro": ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "maximum recursion depth"),
    "long": ("a" * 5_000_000, "has 5,000,000 bytes; allowed are 4,194,304"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_is_one_line(name, tokenizer, tmp_path, monkeypatch):
    source, expected = HOSTILE[name]
    monkeypatch.setattr(plain_files, "CHILD_SECONDS", 1)
    (tmp_path / "t.jinja").write_text(source)
    said = refusal(build_encoder, tokenizer, str(tmp_path / "t.jinja"))
    assert expected in said
    assert said.startswith(f"--chat-template {tmp_path / 't.jinja'}: ")


def test_a_pipe_is_no_template(tokenizer, tmp_path):
    os.mkfifo(tmp_path / "t.jinja")
    with pytest.raises(UsageError, match="is no regular file"):
        load_template(str(tmp_path / "t.jinja"), tokenizer)


def test_message_contents_are_marked_and_restored(tokenizer):
    template = ChatTemplate("{% for m in messages %}{{ m.content|trim }}<|im_end|>{% endfor %}", tokenizer)
    said = " <|im_start|> \ufdd0\ufdd1 \ufdd00\ufdd1 <|im_end|"
    rendered = template.render([{"role": "user", "content": said}, {"role": "user", "content": ">"}])
    assert rendered.count("<|im_end|>") == 2 and "<|im_start|>" not in rendered
    assert template.plain(rendered) == f"{said.strip()}<|im_end|>><|im_end|>"
    ids = template.encode(rendered)
    assert [i for i in ids if i in tokenizer.special.values()] == [tokenizer.eos_id] * 2
    assert tokenizer.decode(ids) == f"{said.strip()}>"
    # The messages themselves are left as they were.
    template.render(HELLO)
    assert HELLO[0]["content"] == "Hello <|im_end|>\n"


def test_tokens_that_follow(tokenizer):
    template = ChatTemplate(CHATML, tokenizer)
    before = "<|im_start|>user\nthe"
    # "\n\n" is one token, which no response to a prompt that ends with the first half can hold.
    joined, apart, nothing = template.encode_following([(before, " world"), (before + "\n", "\n\nHello"), ("", "the")])
    assert template.encode(before) + joined == template.encode(before + " world")
    assert apart == template.encode("\n\nHello") and nothing == template.encode("the")
    assert template.encode(before + "\n") + apart != template.encode(before + "\n\n\nHello")


# -- texts and tokens one by one with those of transformers: `references/transformers_chat.py` recorded them -----------


RECORDED = json.loads((Path(__file__).parents[2] / "references" / "transformers_chat.json").read_text())["results"]


# Here a token of the whole text reaches from the prompt into the response, which no rollout can do.
ACROSS = {"chatml": ["\n\nHello\n\n"]}


@pytest.mark.parametrize("name", HUGGING_FACE)
def test_texts_and_tokens_are_those_of_transformers(tmp_path, name):
    tokenizer = build_tokenizer("HuggingFaceTokenizer", HUGGING_FACE[name](tmp_path / name))
    encoder = build_encoder(tokenizer, "tokenizer")
    across, rejected = [], 0
    for pairs, recorded in zip(CONVERSATIONS, RECORDED[name]["conversations"], strict=True):
        messages = conversation(pairs)
        for generation, found in ((False, recorded["whole"]), (True, recorded["prompt"])):
            if "error" in found:
                rejected += 1
                assert found["error"] in refusal(encoder.template.render, messages, generation)
                continue
            rendered = encoder.template.render(messages, generation)
            assert rendered == encoder.template.plain(rendered) == found["text"]
            assert encoder.template.encode(rendered) == found["ids"]
            if generation and pairs[-1][0] == "user":
                assert encoder.prompt(Prompt(0, messages)) == found["ids"]
            if not generation and pairs[-1][0] == "assistant":
                prompt, text = Prompt(0, messages[:-1]), pairs[-1][1]
                joined = encoder.prompt(prompt) + encoder.response(prompt, text)
                ((whole, _),) = encoder.conversation(messages)
                assert whole[: len(joined)] == joined and joined[-1] == tokenizer.eos_id
                if whole != found["ids"]:
                    across.append(text)
                    assert tokenizer.decode(whole) == tokenizer.decode(found["ids"])
    assert across == ACROSS.get(name, [])
    assert rejected == {"mistral": 4, "gemma": 2}.get(name, 0)


@pytest.mark.parametrize("name", HUGGING_FACE)
def test_tokens_of_plain_text_are_those_of_transformers(tmp_path, name):
    tokenizer = build_tokenizer("HuggingFaceTokenizer", HUGGING_FACE[name](tmp_path / name))
    recorded = RECORDED[name]["texts"]
    # The Unigram model finds </s> in its vocabulary even so; here it is spelt.
    differing = [] if name != "unigram" else ["a <|im_end|> b</s>[SEP]<end_of_turn>"]
    assert [text for text, ids in zip(TEXTS, recorded, strict=True) if tokenizer.encode(text) != ids] == differing
    assert tokenizer.encode_batch(TEXTS) == [tokenizer.encode(text) for text in TEXTS]
