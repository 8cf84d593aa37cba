"""The thinking budget: a turn that still thinks after so many tokens gets the tokens that end its thoughts.

Whether it gets them, and where, follows from its tokens alone. So the engine that forces them, the batch that does not
train on them, and a run that continues a response agree without telling each other.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

from megarl.data.detokenizer import Vocabulary
from megarl.tool_formats.reader import REASONING, Said
from megarl.tool_formats.tool_format import ToolFormat

_LAST_TOKENS = 64  # of a prompt: enough for a mark, one character each, and white space


class ThoughtReader:
    """Whether the thoughts of a turn are open, in the format of the policy."""

    def __init__(self, vocabulary: Vocabulary, form: ToolFormat):
        self.marks, self._vocabulary, self._form = form.thought_marks, vocabulary, form
        self.encode = functools.lru_cache(16)(self._encode)  # a request to a server may have thousands of answers

    def is_open(self, prompt: Sequence[int], tokens: Sequence[int]) -> bool:
        """Whether what follows the first `tokens` of a turn belongs to its thoughts, which the turn or the prompt has
        begun."""
        opened = self.text(prompt[-_LAST_TOKENS:]).rstrip().endswith(self.marks.begin)
        return self._thinks(self.text(tokens), opened)

    def _thinks(self, text: str, opened: bool) -> bool:
        reader = self._form.reader((), opened)
        reader.feed(text)
        return any(isinstance(part, Said) and part.kind == REASONING for part in reader.feed("x"))

    def text(self, tokens: Sequence[int]) -> str:
        """The text of some tokens, with marks that are special tokens."""
        return self._vocabulary.text(tokens, self._form.all_marks)

    @property
    def default_text(self) -> str:
        """What ends thoughts if nothing else is given."""
        marks = self.marks
        return f"\n\nMy time to think is over, so I answer with what I have.\n{marks.end}{marks.after}"

    def _encode(self, text: str) -> tuple[int, ...]:
        """The tokens that end thoughts. ValueError, with what is wrong, for a text that does not end them."""
        tokens = tuple(self._vocabulary.tokenizer.encode_template(text))
        if self.marks.end not in text:
            raise ValueError(f"needs {self.marks.end}, with which this policy ends its thoughts")
        if self._thinks(self.marks.begin + (known := self.text(tokens)), opened=False):
            raise ValueError(f"its tokens do not end thoughts: they read {known[:200]!r}")
        return tokens


class ThinkingBudget(NamedTuple):
    """The tokens that a turn may think for, and those that it gets then."""

    limit: int
    text: str  # of the tokens
    tokens: tuple[int, ...]
    reader: ThoughtReader

    def forced(self, prompt: Sequence[int], response: Sequence[int]) -> range:
        """The places of a turn's tokens that are forced, also those to which it has not come; empty before the limit,
        or if it thinks no more. A turn that continues otherwise was written without the budget.
        """
        after = response[self.limit : self.limit + len(self.tokens)]
        is_due = len(response) >= self.limit and tuple(after) == self.tokens[: len(after)]
        if not is_due or not self.reader.is_open(prompt, response[: self.limit]):
            return range(0)
        return range(self.limit, self.limit + len(self.tokens))
