"""The messages of docs/failures.md are those of the code."""

from collections.abc import Iterable

from tests.helpers.pages import documents
from tests.helpers.programs import ROOT

PAGE = ROOT / "docs" / "failures.md"
MESSAGES = documents.text_of(PAGE).partition("\n## Messages\n")[2]
FEWEST = 40


def is_in_code(message: str, texts: Iterable[str]) -> bool:
    """Whether each piece between two holes is in a text, and one of at least nine letters.

    A message may be made of several texts: of a rule, the flag and the reason.
    """
    pieces = [piece.strip(" :;,.?()") for piece in message.split(documents.HOLE)]
    pieces = [piece for piece in pieces if len(piece) > 2]
    return max(map(len, pieces), default=0) >= 9 and all(any(piece in text for text in texts) for piece in pieces)


def messages() -> list[str]:
    """The first column of every table below the heading of messages."""
    lines = MESSAGES.split("\n")
    rows = [line.split(" | ")[0].removeprefix("| ") for line in lines if line.startswith("| `")]
    return [row.strip().strip("`") for row in rows]


def test_every_message_is_in_the_code():
    gone = [message for message in messages() if not is_in_code(message, documents.code_texts())]
    assert not gone, "\n".join(gone)
    assert len(messages()) >= FEWEST and len(set(messages())) == len(messages())


def test_every_message_has_a_cause_and_a_cure():
    rows = [line for line in MESSAGES.split("\n") if line.startswith("| `")]
    assert all(len([cell for cell in row.strip("| ").split(" | ") if cell.strip()]) == 3 for row in rows)


def test_invented_messages_are_found():
    for message in (
        "the flux capacitor is empty",
        "…: unknown flag; did you intend …?",
        "rank …",
        "failed in …: the moon",
    ):
        assert not is_in_code(message, documents.code_texts())
