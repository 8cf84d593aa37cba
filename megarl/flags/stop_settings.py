"""Flags of what ends a response besides the tokenizer's end tokens, and of what ends its thoughts."""

import dataclasses
import json

from megarl.flags.fields import flag, parse_ints, parses, positive
from megarl.unicode_text import is_unicode


def parse_stops(text: str) -> tuple[str, ...]:
    """`"</answer>"` -> ("</answer>",); `'["a", "b"]'` -> ("a", "b"). ValueError unless each has some Unicode text."""
    found = json.loads(text) if text.lstrip().startswith("[") else [text]
    if not found or not all(isinstance(each, str) and each and is_unicode(each) for each in found):
        raise ValueError(f"{text!r} is no list of strings with some text")
    return tuple(dict.fromkeys(found))


@dataclasses.dataclass(frozen=True)
class StopSettings:
    """What ends a response, and its thoughts."""

    stop: str | None = flag(None, "a string that ends a response, or several as '[\"a\", \"b\"]'; its tokens are part"
                             " of the response and trained on", parses(parse_stops), "strings with some text",
                             programs="rl evaluate", when="engine")  # fmt: skip
    stop_token_ids: str | None = flag(None, "tokens that end a response like the tokenizer's end tokens, as '7,9'",
                                       parses(parse_ints), "whole numbers with commas", programs="rl evaluate",
                                       when="engine")  # fmt: skip
    thinking_budget: int | None = positive(None, "tokens of a response, or of a turn, after which thoughts that are"
                                            " still open are ended by tokens that the policy does not choose and is not"
                                            " trained on; default: none", programs="rl evaluate")  # fmt: skip
    thinking_budget_text: str | None = flag(None, "the text of these tokens, with the mark that ends thoughts; default:"
                                             " a sentence and the mark", bool, "a text",
                                             programs="rl evaluate serve", when="thinks")  # fmt: skip
