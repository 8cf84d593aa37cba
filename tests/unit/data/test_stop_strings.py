"""Stop strings: found with the token that completes them, whatever tokens the text has."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.data.stop_strings import StopMatcher
from megarl.data.tokenizers import build_tokenizer
from megarl.flags.fields import parse_ints
from megarl.flags.generation import parse_stops
from tests.helpers.texts import small_tokenizers

NAMES = [*small_tokenizers.HUGGING_FACE, "characters", "sentence_piece"]
TEXT = "Hello world, Grüße 你好 \U0001f600! the user said </tool_call> and <|im_end|> and Hello world again"


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    folder, made = tmp_path_factory.mktemp("tokenizers"), {}
    for name in NAMES:
        if name == "sentence_piece":
            path = small_tokenizers.sentence_piece(folder / "sentence_piece.model")
            made[name] = build_tokenizer("SentencePieceTokenizer", path)
        else:
            made[name] = build_tokenizer("HuggingFaceTokenizer", getattr(small_tokenizers, name)(folder / name))
    return made


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


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data())
@settings(deadline=None, max_examples=100)
def test_a_stop_string_ends_with_the_token_that_completes_it_in_the_decoded_text(name, tokenizers, data):
    tokenizer = tokenizers[name]
    start = data.draw(st.integers(0, len(TEXT) - 2))
    tokens = tokenizer.encode(TEXT[start : data.draw(st.integers(start + 1, len(TEXT)))])
    text = tokenizer.decode(tokens)
    stops = []
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, max(0, len(text) - 1)))
        stops.append(text[place : place + data.draw(st.integers(1, 9))].lstrip(" ") or "x")
    assert first_match(StopMatcher(tokenizer, tuple(stops)), tokens) == first_by_text(tokenizer, tuple(stops), tokens)


def test_overlapping_beginnings_and_special_tokens(tokenizers):
    tokenizer = tokenizers["chatml"]
    matcher = StopMatcher(tokenizer, ("aab", "</x>"))
    special = tokenizer.special[next(iter(tokenizer.special))]
    for text, stop in (("aaab", "aab"), ("aa" + "aab!", "aab"), ("<</x>", "</x>")):
        tokens = tokenizer.encode(text)
        assert first_match(matcher, tokens) == first_by_text(tokenizer, (stop,), tokens) is not None
    spread = [*tokenizer.encode("aa"), special, *tokenizer.encode("b")]  # special tokens have no text
    assert first_match(matcher, spread) == len(spread) - 1
    assert first_match(matcher, [tokenizer.vocab_size + 3, *tokenizer.encode("aa")]) is None


def test_a_string_that_forced_tokens_have_completed_is_not_completed_by_the_next_token(tokenizers):
    tokenizer = tokenizers["chatml"]
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
