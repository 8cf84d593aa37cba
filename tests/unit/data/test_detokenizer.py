"""Streams of tokens as text: equal to the text of all tokens with every kind of tokenizer; stop strings in them."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.data.detokenizer import StopMatcher, Vocabulary
from megarl.data.tokenizers import build_tokenizer
from megarl.flags.fields import parse_ints
from megarl.flags.generation_flags import parse_stops
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
@settings(max_examples=60)
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


# -- stop strings --------------------------------------------------------------------------------------------------

TEXT = "Hello world, Grüße 你好 \U0001f600! the user said </tool_call> and <|im_end|> and Hello world again"


def first_match(matcher: StopMatcher, tokens: list[int]) -> int | None:
    """Number of the token that completes a stop string."""
    place = matcher.START
    for number, token in enumerate(tokens):
        place, is_complete = matcher.follow(place, token)
        if is_complete:
            return number
    return None


def first_by_text(tokenizer, stops: tuple[str, ...], tokens: list[int]) -> int | None:
    """The same by the text of the first tokens, all decoded again."""
    texts = (tokenizer.decode(tokens[: number + 1]) for number in range(len(tokens)))
    return next((number for number, text in enumerate(texts) if any(stop in text for stop in stops)), None)


@pytest.mark.parametrize("name", NAMES[:-1])
@given(data=st.data())
@settings(max_examples=50)
def test_a_stop_string_ends_with_the_token_that_completes_it_in_the_decoded_text(name, vocabularies, data):
    tokenizer = vocabularies[name].tokenizer
    start = data.draw(st.integers(0, len(TEXT) - 2))
    tokens = tokenizer.encode(TEXT[start : data.draw(st.integers(start + 1, len(TEXT)))])
    text = tokenizer.decode(tokens)
    stops = []
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, max(0, len(text) - 1)))
        stops.append(text[place : place + data.draw(st.integers(1, 9))].lstrip(" ") or "x")
    assert first_match(StopMatcher(tokenizer, tuple(stops)), tokens) == first_by_text(tokenizer, tuple(stops), tokens)


def test_overlapping_beginnings_and_special_tokens(vocabularies):
    tokenizer = vocabularies["chatml"].tokenizer
    matcher = StopMatcher(tokenizer, ("aab", "</x>"))
    special = tokenizer.special[next(iter(tokenizer.special))]
    for text, stop in (("aaab", "aab"), ("aa" + "aab!", "aab"), ("<</x>", "</x>")):
        tokens = tokenizer.encode(text)
        assert first_match(matcher, tokens) == first_by_text(tokenizer, (stop,), tokens) is not None
    spread = [*tokenizer.encode("aa"), special, *tokenizer.encode("b")]  # special tokens have no text
    assert first_match(matcher, spread) == len(spread) - 1
    assert first_match(matcher, [tokenizer.vocab_size + 3, *tokenizer.encode("aa")]) is None


def test_a_string_that_forced_tokens_have_completed_is_not_completed_by_the_next_token(vocabularies):
    tokenizer = vocabularies["chatml"].tokenizer
    matcher, place = StopMatcher(tokenizer, ("ab", "xxabyy")), StopMatcher.START
    found = []
    for token in map(tokenizer.encode, "xxabzab"):
        place, is_complete = matcher.follow(place, *token)
        found.append(is_complete)
    assert found == [letter == "b" for letter in "xxabzab"]


def test_the_flags_values():
    assert parse_stops("</answer>") == ("</answer>",) and parse_stops('["a", "b c", "a"]') == ("a", "b c")
    assert parse_ints("7,0") == (7, 0)
    for parse, text in ((parse_stops, ""), (parse_stops, "[]"), (parse_stops, '["a", 1]'), (parse_stops, '["a"'),
                        (parse_stops, '["\\ud800"]'),
                        (parse_stops, '[""]'), (parse_ints, "-1"), (parse_ints, "x"), (parse_ints, "")):  # fmt: skip
        with pytest.raises(ValueError):
            parse(text)
