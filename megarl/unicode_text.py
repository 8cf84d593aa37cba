"""Texts that have halves of surrogate pairs, which UTF-8 and every tokenizer refuse.

JSON's escapes write them, so they come from files, templates, requests and policies.
"""

import re

_HALF = re.compile("[\ud800-\udfff]")


def is_unicode(text: str) -> bool:
    """Whether a text has no half of a surrogate pair."""
    return text.isascii() or _HALF.search(text) is None


def whole_unicode(text: str) -> str:
    """The text with halves that make a pair joined, and U+FFFD for each other one."""
    return text if is_unicode(text) else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
