"""Streams of tokens as text: equal to the text of all tokens with every kind of tokenizer."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.data.detokenizer import Vocabulary
from megarl.data.tokenizers import build_tokenizer
from tests.helpers.texts import small_tokenizers

NAMES = [*small_tokenizers.HUGGING_FACE, "characters", "sentence_piece", "sentence_piece_trimmed"]
TEXTS = ["Hello world, Grüße 你好 \U0001f600!", " the  user\n\n\tthe", "é", "\u0301a\ufffdb\U0001f469\u200d\U0001f4bb"]


@pytest.fixture(scope="module")
def vocabularies(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizers")
    made = {}
    for name in NAMES:
        if name.startswith("sentence_piece"):
            trimmed = dict(add_dummy_prefix=True, remove_extra_whitespaces=True) if "trimmed" in name else {}
            path = small_tokenizers.sentence_piece(folder / f"{name}.model", **trimmed)
            made[name] = Vocabulary(build_tokenizer("SentencePieceTokenizer", path))
        else:
            path = getattr(small_tokenizers, name)(folder / name)
            made[name] = Vocabulary(build_tokenizer("HuggingFaceTokenizer", path))
    return made


def pieces(vocabulary, tokens):
    detokenizer = vocabulary.detokenizer()
    return [detokenizer.feed(token) for token in tokens] + [detokenizer.finish()]


def test_a_special_token_keeps_the_bytes_of_sentence_piece_apart(vocabularies):
    vocabulary = vocabularies["sentence_piece"]
    ids = {vocabulary.tokenizer.piece(number): number for number in range(vocabulary.tokenizer.vocab_size)}
    first, second, special = ids["<0xC2>"], ids["<0x80>"], ids["<pad>"]
    for tokens in ([first, special, second], [first, special, special, second], [first, second]):
        assert "".join(pieces(vocabulary, tokens)) == vocabulary.tokenizer.decode(tokens)


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data())
@settings(deadline=None, max_examples=150)
def test_concatenated_pieces_are_the_text_of_all_tokens(name, vocabularies, data):
    vocabulary = vocabularies[name]
    size = vocabulary.tokenizer.vocab_size
    bytes_only = [i for i in range(size) if vocabulary.piece_bytes(i) is not None] or [0]
    one = st.one_of(st.integers(0, size + 2), st.sampled_from(bytes_only))
    tokens = data.draw(st.lists(one, max_size=30))
    assert "".join(pieces(vocabulary, tokens)) == vocabulary.tokenizer.decode(tokens)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("text", TEXTS)
def test_no_piece_has_a_part_of_a_character(name, text, vocabularies):
    vocabulary = vocabularies[name]
    tokens = vocabulary.tokenizer.encode(text)
    found = pieces(vocabulary, tokens)
    whole = vocabulary.tokenizer.decode(tokens)
    assert "".join(found) == whole and sum(piece.count("\ufffd") for piece in found) == whole.count("\ufffd")


def test_text_comes_as_early_as_it_is_certain(vocabularies):
    vocabulary = vocabularies["chatml"]
    found = pieces(vocabulary, vocabulary.tokenizer.encode("aé\U0001f600b"))
    assert found == ["a", "", "é", "", "", "", "\U0001f600", "b", ""]


@pytest.mark.parametrize("name", NAMES)
def test_the_cost_is_linear_in_the_length(name, vocabularies):
    vocabulary = vocabularies[name]
    tokenizer, decoded = vocabulary.tokenizer, []
    original = tokenizer.decode
    tokenizer.decode = lambda ids: decoded.append(len(ids)) or original(ids)
    try:
        tokens = [number % tokenizer.vocab_size for number in range(3000)] + tokenizer.encode(" ") * 500 + [10**6] * 500
        pieces(vocabulary, tokens)
    finally:
        del tokenizer.decode
    assert sum(decoded) < 20 * len(tokens)


def test_single_tokens_have_strings_and_bytes(vocabularies):
    chatml, mistral, wordpiece = (vocabularies[name] for name in ("chatml", "mistral", "wordpiece"))
    first, second = chatml.tokenizer.encode("é")
    assert [chatml.token(i) for i in (first, second)] == [("bytes:\\xc3", b"\xc3"), ("bytes:\\xa9", b"\xa9")]
    end = chatml.tokenizer.eos_id
    assert chatml.token(end) == ("<|im_end|>", b"<|im_end|>") and chatml.token(10**6)[0] == "\ufffd"
    assert "".join(mistral.token(i)[0] for i in mistral.tokenizer.encode("Hello world")) == " Hello world"
    assert wordpiece.token(wordpiece.tokenizer.encode("the")[0])[0] == " the"
