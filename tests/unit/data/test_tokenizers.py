"""Tokenizers: exact round trips, special ids, and one clear line for each wrong input."""

import io

import pytest
import sentencepiece

from megarl.data.tokenizers import build_tokenizer
from megarl.errors import UsageError

TEXTS = [f"{a} + {b} =" for a in range(0, 100, 3) for b in range(0, 100, 7)] + [str(i) for i in range(200)]


def train_model(path, **options):
    settings = dict(model_type="bpe", vocab_size=32, hard_vocab_limit=False, split_digits=True, add_dummy_prefix=False)
    settings |= dict(normalization_rule_name="identity", remove_extra_whitespaces=False, character_coverage=1.0)
    settings |= dict(pad_id=0, unk_id=1, bos_id=2, eos_id=3, num_threads=1, minloglevel=2)
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(TEXTS), model_writer=model, **(settings | options))
    path.write_bytes(model.getvalue())
    return str(path)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return build_tokenizer("SentencePieceTokenizer", train_model(tmp_path_factory.mktemp("t") / "sums.model"))


def test_prompt_and_response_encoded_apart_give_the_text(tokenizer):
    for prompt, response in [("12 + 30 =", "42"), ("7 + 7 =", " 14 "), ("1 +  2 =", "3")]:
        ids = tokenizer.encode(prompt) + tokenizer.encode(response)
        assert tokenizer.decode(ids) == prompt + response
        assert tokenizer.decode(tokenizer.encode(response)) == response


def test_encode_adds_no_special_id(tokenizer):
    special = {tokenizer.eos_id, tokenizer.bos_id, tokenizer.pad_id}
    assert special == {0, 2, 3}
    assert not special & set(tokenizer.encode("1 + 2 ="))
    assert tokenizer.encode("") == []


def test_digits_stay_single(tokenizer):
    assert len(tokenizer.encode("9753")) == 4


def test_decode_drops_special_ids(tokenizer):
    ids = tokenizer.encode("42")
    assert tokenizer.decode([2, *ids, 3, 0, 0]) == "42"
    assert tokenizer.decode([]) == ""


def test_decode_shows_ids_without_a_token(tokenizer):
    four, two = tokenizer.encode("42")
    assert tokenizer.decode([four, tokenizer.vocab_size, two]) == "4\ufffd2"
    assert tokenizer.decode([four, -1, tokenizer.vocab_size + 90]) == "4\ufffd\ufffd"


def test_model_without_bos_and_padding(tmp_path):
    path = train_model(tmp_path / "m.model", bos_id=-1, pad_id=-1, unk_id=0, eos_id=1)
    tokenizer = build_tokenizer("SentencePieceTokenizer", path)
    assert tokenizer.bos_id is None
    assert tokenizer.pad_id == tokenizer.eos_id == 1


def test_model_without_eos_is_rejected(tmp_path):
    path = train_model(tmp_path / "m.model", eos_id=-1)
    with pytest.raises(UsageError, match=r"--tokenizer-model .*m\.model: .*EOS"):
        build_tokenizer("SentencePieceTokenizer", path)


@pytest.mark.parametrize("content", [b"", b"garbage", b"\x00\x01\x02" * 50, b'{"model": {}}'])
def test_other_format_is_rejected(tmp_path, content):
    path = tmp_path / "other.model"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=r"--tokenizer-model .*other\.model: not a SentencePiece model"):
        build_tokenizer("SentencePieceTokenizer", str(path))


def test_missing_file_directory_and_no_file(tmp_path):
    with pytest.raises(UsageError, match="--tokenizer-model .*gone.model: no such file"):
        build_tokenizer("SentencePieceTokenizer", str(tmp_path / "gone.model"))
    with pytest.raises(UsageError, match="--tokenizer-model .*: cannot be read"):
        build_tokenizer("SentencePieceTokenizer", str(tmp_path))
    with pytest.raises(UsageError, match="--tokenizer-model: missing"):
        build_tokenizer("SentencePieceTokenizer", None)


def test_unknown_type_lists_the_known(tmp_path):
    with pytest.raises(UsageError, match="--tokenizer-type Fancy: unknown; allowed: HuggingFaceTokenizer, Sent"):
        build_tokenizer("Fancy", str(tmp_path))
    with pytest.raises(UsageError, match="--reward-tokenizer-type Fancy: unknown"):
        build_tokenizer("Fancy", str(tmp_path), "reward-")
