"""Texts with named places, {question}: they are filled once and never evaluated.

What fills a place stays text: the name of a place inside it is not filled, and no special token arises from it, since
the whole is encoded as a text.
"""

import re
from collections.abc import Mapping

PLACE = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]*)\}")


def names_in(text: str) -> list[str]:
    """The names of the places in a text, in their order."""
    return PLACE.findall(text)


def filled(text: str, values: Mapping[str, str]) -> str:
    """The text with its places filled; KeyError for a place without a value."""
    return PLACE.sub(lambda place: values[place[1]], text)
