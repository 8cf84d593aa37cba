"""The examples of a file as a sequence that reads one when it is used."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from megarl.data.prompts import PromptSet
from megarl.data.ragged import Ragged


class Examples(Sequence):
    """Examples of k token sequences each, made when they are read; a slice is a plain list."""

    def __init__(self, prompts: PromptSet, tokens: Ragged, example: Callable[[int], Any], sequences: int = 1):
        """
        Args:
            prompts: the set whose lines the examples are.
            tokens: of all sequences; those of example i are the rows i·k … i·k + k − 1.
            example: makes an example.
            sequences: k.
        """
        self.prompts = prompts
        self._tokens, self._example, self._sequences = tokens, example, sequences

    def __len__(self) -> int:
        return len(self._tokens) // self._sequences

    def __getitem__(self, index):
        lines = range(len(self))[index]
        return [self._example(line) for line in lines] if isinstance(index, slice) else self._example(lines)

    def lengths(self, lines: Sequence[int]) -> np.ndarray:
        """[len(lines), k] int64: tokens of each sequence of these examples, which are not read."""
        return self._tokens.lengths(np.array(lines)[:, None] * self._sequences + np.arange(self._sequences))
