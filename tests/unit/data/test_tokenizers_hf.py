"""Hugging Face tokenizers: special tokens and templates of their files, and one line for each error."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from megarl.data.tokenizers import build_tokenizer
from megarl.data.tokenizers_hf import LONG_TEXT, difference
from megarl.errors import UsageError
from tests.helpers.texts.refusals import refusal
from tests.helpers.texts.small_tokenizers import CHATML, GEMMA, chatml, gemma, unigram, wordpiece


def build(path, flag_prefix=""):
    return build_tokenizer("HuggingFaceTokenizer", str(path), flag_prefix)


def change(folder: str, **config) -> str:
    """Entries of tokenizer_config.json, None: taken out."""
    path = Path(folder) / "tokenizer_config.json"
    entries = json.loads(path.read_text()) | config
    path.write_text(json.dumps({name: value for name, value in entries.items() if value is not None}))
    return folder


def error_of(path, flag_prefix=""):
    return refusal(build, path, flag_prefix)


def test_special_tokens_and_templates(tmp_path):
    tokenizer = build(chatml(tmp_path / "a"))
    assert (tokenizer.eos_token, tokenizer.bos_token, tokenizer.template) == ("<|im_end|>", None, CHATML)
    assert tokenizer.bos_id is None and tokenizer.pad_id == tokenizer.special["<|endoftext|>"]
    assert sorted(tokenizer.special.values()) == list(range(tokenizer.vocab_size - 3, tokenizer.vocab_size))
    tokenizer = build(gemma(tmp_path / "b"))
    assert tokenizer.template == GEMMA and set(tokenizer.special) == {
        "<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>",
    }  # fmt: skip
    named = [{"name": "tools", "template": "x"}, {"name": "default", "template": "y"}]
    assert build(change(unigram(tmp_path / "c"), chat_template=named)).template == "y"
    assert build(change(wordpiece(tmp_path / "d"), chat_template=None)).template is None


def test_a_long_text_has_the_ids_of_the_library(tmp_path):
    """It goes through another call of the library than a short one."""
    folder = chatml(tmp_path / "a")
    text = "".join(f"The {number}th fox says <|im_end|> and é\U0001f600. " for number in range(2000))
    assert len(text) > LONG_TEXT
    reference = Tokenizer.from_file(f"{folder}/tokenizer.json")
    reference.encode_special_tokens = True
    assert build(folder).encode(text) == reference.encode(text, add_special_tokens=False).ids


def test_tokens_that_only_the_configuration_calls_special(tmp_path):
    folder = unigram(tmp_path / "a")
    stored = json.loads((tmp_path / "a" / "tokenizer.json").read_text())
    # </s> an ordinary added token, <pad> not even that: only a token of the model.
    stored["added_tokens"] = [t | {"special": False} for t in stored["added_tokens"] if t["content"] != "<pad>"]
    (tmp_path / "a" / "tokenizer.json").write_text(json.dumps(stored))
    tokenizer = build(change(folder, eos_token={"__type": "AddedToken", "content": "</s>"}, bos_token=None,
                             additional_special_tokens=["user", "<nowhere>"]))  # fmt: skip
    # transformers adds what the vocabulary lacks.
    user, added = tokenizer.special["user"], tokenizer.vocab_size - 1
    assert tokenizer.special == {"</s>": 1, "<pad>": 3, "user": user, "<nowhere>": added}
    assert not set(tokenizer.encode("a</s><pad>user")) & set(tokenizer.special.values())
    assert tokenizer.encode_template("a</s><pad>user")[-3:] == [1, 3, tokenizer.special["user"]]
    assert tokenizer.decode(tokenizer.encode_template("a</s><pad>user")) == "a"


def test_a_file_alone_and_its_eos(tmp_path):
    file = Path(unigram(tmp_path / "a")) / "tokenizer.json"
    assert build(file).bos_token == "<s>"
    (tmp_path / "a" / "tokenizer_config.json").unlink()
    assert "no eos_token; name it in tokenizer_config.json" in error_of(file)
    (tmp_path / "a" / "generation_config.json").write_text('{"eos_token_id": [1, 3]}')
    alone = build(file)
    assert (alone.eos_token, alone.bos_token, alone.pad_id, alone.template) == ("</s>", None, alone.eos_id, None)
    assert alone.end_tokens == ("</s>", "<pad>")
    other = file.rename(tmp_path / "a" / "other.json")
    assert build(other).encode("Hello") == alone.encode("Hello")


def test_nothing_is_added_cut_or_padded(tmp_path):
    folder = chatml(tmp_path / "a")
    stored = Tokenizer.from_file(f"{folder}/tokenizer.json")
    stored.enable_truncation(3)
    stored.enable_padding(length=30)
    stored.save(f"{folder}/tokenizer.json")
    tokenizer = build(folder)
    assert tokenizer.decode(tokenizer.encode("Hello world, Hello!")) == "Hello world, Hello!"
    assert tokenizer.encode("") == [] and tokenizer.encode_template("<|im_end|>") == [tokenizer.eos_id]


def test_decode_drops_special_ids_and_shows_ids_without_a_token(tmp_path):
    tokenizer = build(chatml(tmp_path / "a"))
    hello, unknown = tokenizer.encode("Hello"), tokenizer.vocab_size
    assert tokenizer.decode([tokenizer.pad_id, *hello, tokenizer.eos_id, *hello]) == "HelloHello"
    assert tokenizer.decode([*hello, unknown, -1, *hello]) == "Hello\ufffd\ufffdHello"
    # What the model could not spell stays visible too.
    tokenizer = build(wordpiece(tmp_path / "b"))
    assert tokenizer.decode(tokenizer.encode("the \u4f60 user")) == "the [UNK] user"


def test_the_unknown_token_may_be_the_padding(tmp_path):
    tokenizer = build(change(unigram(tmp_path / "a"), pad_token="<unk>"))
    assert tokenizer.pad_id == tokenizer.encode("\u4f60")[-1] and "<unk>" not in tokenizer.special
    assert tokenizer.decode(tokenizer.encode("a\u4f60")) == "a<unk>"


@pytest.mark.parametrize("name, content, message", [
    ("tokenizer.json", "{", "tokenizer.json: malformed JSON"),
    ("tokenizer.json", "[]", "tokenizer.json: expected a JSON object, not list"),
    ("tokenizer.json", "{}", "transformers cannot read the tokenizer"),
    ("tokenizer.json", '{"model": 3}', "transformers cannot read the tokenizer"),
    ("tokenizer.json", '{"model": {"type": "BPE"}, "added_tokens": []}', "transformers cannot read the tokenizer"),
    ("tokenizer.json", b"\xff", "tokenizer.json: cannot be read (it is not UTF-8: byte 0)"),
    ("tokenizer_config.json", "[" * 100000, "tokenizer_config.json: malformed JSON"),
])  # fmt: skip
def test_wrong_files(tmp_path, name, content, message):
    folder = chatml(tmp_path / "a")
    (tmp_path / "a" / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    error = error_of(folder, "reward-")
    assert error.startswith(f"--reward-tokenizer-model {folder}: ") and message in error


def test_missing_files(tmp_path):
    assert error_of(tmp_path) == f"--tokenizer-model {tmp_path}: no such file: tokenizer.json"
    assert error_of(tmp_path / "gone.json").startswith(f"--tokenizer-model {tmp_path / 'gone.json'}: no such file")
    with pytest.raises(UsageError, match="--tokenizer-model: missing"):
        build_tokenizer("HuggingFaceTokenizer", None)


# -- the file alone ------------------------------------------------------------------------------------------------


def edit(folder: str, **parts) -> Path:
    """The folder with other parts of its tokenizer.json."""
    path = Path(folder) / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | parts))
    return path


@pytest.mark.parametrize("make", [chatml, gemma, unigram, wordpiece])
def test_no_notice_where_the_file_encodes_as_transformers_does(make, tmp_path):
    assert build(make(tmp_path / "a")).notice is None


def test_a_class_that_replaces_the_pre_tokenizer_of_the_file(tmp_path):
    """transformers' class of Qwen2 has a pre-tokenizer of its own, whatever the file says."""
    folder = change(chatml(tmp_path / "a"), tokenizer_class="Qwen2Tokenizer")
    digits = {"type": "Sequence", "pretokenizers": [
        {"type": "Digits", "individual_digits": False},
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
    ]}  # fmt: skip
    edit(folder, pre_tokenizer=digits)
    found = build(folder)
    assert f"--tokenizer-model {folder}: its tokenizer.json alone encodes otherwise than transformers" in found.notice
    assert "pre_tokenizer" in found.notice and "\n" not in found.notice


END = {"id": "<|im_end|>", "ids": [0], "tokens": ["<|im_end|>"]}
BEGIN = {
    "type": "TemplateProcessing", "pair": [], "special_tokens": {"<|im_end|>": END},
    "single": [{"SpecialToken": {"id": "<|im_end|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
}  # fmt: skip
CHANGES = {
    "normalizer": ({"normalizer": {"type": "Lowercase"}}, "tokens by the file", "normalizer"),
    "pre_tokenizer": ({"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True,
                                         "use_regex": True}}, "tokens by the file", "pre_tokenizer"),
    "decoder": ({"decoder": None}, "are read back as another text", "decoder"),
    "post_processor": ({"post_processor": BEGIN}, "special tokens around a text", "post_processor"),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_each_part_of_a_file_that_differs_is_named(name, tmp_path):
    parts, said, part = CHANGES[name]
    loaded = Tokenizer.from_file(f"{chatml(tmp_path / 'a')}/tokenizer.json")
    assert difference(tmp_path / "a" / "tokenizer.json", loaded) is None
    found = difference(edit(chatml(tmp_path / "b"), **parts), loaded)
    assert said in found and f"({part})" in found


def test_an_added_token_of_another_number(tmp_path):
    loaded = Tokenizer.from_file(f"{chatml(tmp_path / 'a')}/tokenizer.json")
    other = Tokenizer.from_file(f"{tmp_path}/a/tokenizer.json")
    other.add_special_tokens(["<new>"])
    other.save(f"{tmp_path}/a/tokenizer.json")
    assert "the token '<new>' is " in difference(tmp_path / "a" / "tokenizer.json", loaded)
    (tmp_path / "a" / "tokenizer.json").write_text("{}")
    assert difference(tmp_path / "a" / "tokenizer.json", loaded) is None
