"""tools/train_tokenizer.py: lossless, reproducible tokenizers; special tokens, chat templates, byte-level BPE."""

import json

import pytest

from megarl.data.conversations import build_encoder
from megarl.data.prompt import Prompt
from megarl.data.prompts import load_prompts
from megarl.data.tokenizers import build_tokenizer
from tests.helpers.texts.small_tokenizers import CHATML, PLAIN
from tests.helpers.tools import run_tool
from tools import train_tokenizer

LINES = [
    {"prompt": "What is 12 + 30?", "chosen": "It is 42.", "rejected": "I do not know, \U0001f642."},
    {"prompt": [{"role": "user", "content": "the Zulu"}], "response": "the quokka and the quokka"},
    {"messages": [{"role": "user", "content": "<|im_end|> w\u00f6rld"}, {"role": "assistant", "content": "yes </s>"}]},
]


@pytest.fixture
def data(tmp_path):
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, LINES)))
    (tmp_path / "t.jinja").write_text(CHATML)
    (tmp_path / "plain.jinja").write_text(PLAIN)
    return tmp_path


def run(data, name, *options, size=300):
    options = ["--input", data / "p.jsonl", "--vocab-size", size, "--out", data / name, *options]
    return train_tokenizer.main([str(option) for option in options])


def test_all_texts_are_read(data):
    assert train_tokenizer.read_texts([str(data / "p.jsonl")]) == [
        "What is 12 + 30?", "It is 42.", "I do not know, \U0001f642.", "the Zulu", "the quokka and the quokka",
        "<|im_end|> w\u00f6rld", "yes </s>",
    ]  # fmt: skip


def test_bpe_with_special_tokens_and_a_template(data, capsys):
    options = ["--kind", "bpe", "--special", "<|im_start|>", "--eos-token", "<|im_end|>"]
    assert run(data, "a", *options, "--chat-template", data / "t.jinja") == 0
    assert capsys.readouterr().out == f"{data}/a/tokenizer.json: 300 pieces from 7 texts\n"
    tokenizer = build_tokenizer("HuggingFaceTokenizer", str(data / "a"))
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.vocab_size) == ("<s>", "<|im_end|>", 300)
    assert set(tokenizer.special) == {"<pad>", "<s>", "<|im_end|>", "<|im_start|>"} and tokenizer.pad_id == 0
    assert len(tokenizer.encode("quokka")) < 6 and len(tokenizer.encode("9753")) == 4
    encoder = build_encoder(tokenizer, "tokenizer")
    text = "the quokka <|im_end|> \U0001f600"
    response = encoder.response(Prompt(0, "a"), text)
    assert tokenizer.decode(response) == text and response.count(tokenizer.eos_id) == 1
    assert run(data, "b", *options, "--chat-template", data / "t.jinja") == 0
    for name in ("tokenizer.json", "tokenizer_config.json"):
        content = (data / "a" / name).read_bytes()
        assert content == (data / "b" / name).read_bytes() and str(data).encode() not in content


def test_sentencepiece_with_special_tokens(data):
    assert run(data, "a", "--byte-fallback", "--special", "<|im_start|>", "--eos-token", "<|im_end|>", size=400) == 0
    tokenizer = build_tokenizer("SentencePieceTokenizer", str(data / "a.model"))
    assert (tokenizer.eos_token, tokenizer.eos_id, tokenizer.special["<|im_start|>"]) == ("<|im_end|>", 3, 4)
    encoder = build_encoder(tokenizer, str(data / "t.jinja"))
    assert encoder.prompt(Prompt(0, "a"))[0] == 4 and encoder.response(Prompt(0, "a"), "<|im_end|>")[-1] == 3


@pytest.mark.parametrize(
    "options, size, message",
    [
        (["--kind", "bpe"], 258, "--vocab-size 258: too small; 256 bytes and 3 special tokens need at least 259"),
        (["--kind", "bpe", "--byte-fallback"], 300, "--byte-fallback: --kind bpe always encodes"),
        (["--chat-template", "t"], 300, "--chat-template t: a SentencePiece model cannot store it"),
        (["--kind", "bpe", "--chat-template", "gone"], 300, "--chat-template gone: cannot be read"),
        (["--special", "</s>"], 300, "--special: '</s>' is empty or given twice"),
        (["--kind", "bpe", "--eos-token", ""], 300, "--special: '' is empty or given twice"),
        (["--kind", "words"], 300, "invalid choice: 'words'"),
    ],
)
def test_wrong_options_are_one_line(data, refusal, options, size, message):
    assert message in refusal(run, data, "a", *options, size=size) and not (data / "a").exists()


def test_a_template_without_the_end_token_is_rejected_before_anything_is_written(data, refusal):
    line = refusal(run, data, "a", "--kind", "bpe", "--chat-template", data / "t.jinja")
    assert "ends without the tokenizer's EOS '</s>'" in line
    assert not (data / "a").exists()
    assert run(data, "a", "--kind", "bpe", "--chat-template", data / "plain.jinja") == 0


def train_on(prefix, *files, vocab_size=32, options=()):
    return train_tokenizer.main(
        ["--input", *map(str, files), "--vocab-size", str(vocab_size), "--out", str(prefix), *options]
    )


def test_tokenizer_round_trips_every_prompt_and_answer(sums, tmp_path):
    assert train_on(tmp_path / "deep" / "tok", sums / "train.jsonl") == 0
    tokenizer = build_tokenizer("SentencePieceTokenizer", str(tmp_path / "deep" / "tok.model"))
    assert tokenizer.vocab_size <= 32
    assert (tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id) == (0, 2, 3)
    for name in ("train.jsonl", "heldout.jsonl"):
        for prompt in load_prompts(str(sums / name)):
            ids = tokenizer.encode(prompt.prompt) + tokenizer.encode(prompt.answer)
            assert tokenizer.decode(ids) == prompt.prompt + prompt.answer
            assert len(tokenizer.encode(prompt.answer)) == len(prompt.answer)
    vocab = (tmp_path / "deep" / "tok.vocab").read_text(encoding="utf-8").splitlines()
    assert len(vocab) == tokenizer.vocab_size and vocab[3].split("\t")[0] == "</s>"


def test_tokenizer_is_reproducible_and_holds_no_path(sums, tmp_path):
    for name in ("a", "b"):
        assert train_on(tmp_path / name, sums / "train.jsonl") == 0
    model = (tmp_path / "a.model").read_bytes()
    assert model == (tmp_path / "b.model").read_bytes()
    assert str(tmp_path).encode() not in model and str(sums).encode() not in model


def test_tokenizer_with_difficult_text(tmp_path):
    texts = ["two  spaces ", " lead\n\ttab", "é漢🙂", "x" * 20000 + "y", "ｆｕｌｌ ﬁ"]
    path = tmp_path / "p.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": text, "response": text[::-1]}) for text in texts))
    assert train_on(tmp_path / "tok", path, vocab_size=64) == 0
    tokenizer = build_tokenizer("SentencePieceTokenizer", str(tmp_path / "tok.model"))
    for text in texts + [text[::-1] for text in texts]:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    # The smallest vocabulary that fits: one token for each character.
    smallest = len(set("".join(texts))) + 4
    assert train_on(tmp_path / "tok", path, vocab_size=smallest) == 0
    assert train_on(tmp_path / "tok", path, vocab_size=smallest - 1) == 2


def test_byte_fallback_spells_unknown_characters(sums, tmp_path):
    assert train_on(tmp_path / "plain", sums / "train.jsonl") == 0
    assert train_on(tmp_path / "bytes", sums / "train.jsonl", vocab_size=300, options=["--byte-fallback"]) == 0
    plain, spelt = (
        build_tokenizer("SentencePieceTokenizer", str(tmp_path / f"{name}.model")) for name in ("plain", "bytes")
    )
    assert spelt.decode(spelt.encode("7 × é")) == "7 × é"
    assert plain.decode(plain.encode("7 × é")) != "7 × é"


def test_tokenizer_errors_are_one_line(sums, tmp_path, refusal):
    odd = tmp_path / "odd.jsonl"
    odd.write_text(json.dumps({"prompt": "a\u2581b"}))
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"prompt": "a"}\n{')
    (tmp_path / "file").write_text("")
    for expected, (prefix, path, vocab_size) in [
        ("--vocab-size 8: too small", (tmp_path / "tok", sums / "train.jsonl", 8)),
        ("cannot represent 'a\u2581b'", (tmp_path / "tok", odd, 32)),
        (f"--input {broken}:2: malformed JSON", (tmp_path / "tok", broken, 32)),
        ("--input gone.jsonl: no such file", (tmp_path / "tok", "gone.jsonl", 32)),
        ("cannot be written", (tmp_path / "file" / "tok", sums / "train.jsonl", 32)),
    ]:
        assert expected in refusal(train_on, prefix, path, vocab_size=vocab_size)
    assert not (tmp_path / "tok.model").exists()


def test_tokenizer_program_is_quiet(sums, tmp_path):
    done = run_tool("train_tokenizer", "--input", sums / "train.jsonl", "--vocab-size", 32, "--out", tmp_path / "tok")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("\n") == 1
