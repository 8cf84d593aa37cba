"""The sequences of an engine's requests as arrays, so that drafts for all of them are found together.

A sequence is a prompt and its response as far as it was followed.
Shapes: n sequences, named by their rows in the arrays.
"""

from collections.abc import Sequence

import numpy as np

from megarl.batch import expand_array_counts
from megarl.mcore.inference.draft_index import MAX_CONTEXT, NO_TOKEN, DraftIndex

MAX_DEPTH = 16  # drafted tokens of a request in a step


class DraftSequences:
    """Up to a number of sequences, each with the guesses of its next tokens that were made last."""

    def __init__(self, count: int, max_length: int):
        """`count`: of sequences at a time; `max_length`: of a sequence in tokens."""
        # Pages of the array that no sequence reaches take no memory.
        self._tokens = np.empty((count, MAX_CONTEXT + max_length), np.int32)
        self._tokens[:, :MAX_CONTEXT] = NO_TOKEN
        self.prompt_keys = np.zeros(count, np.uint64)
        self.lengths, self._indexed = np.zeros(count, np.int64), np.zeros(count, np.int64)
        self.guessed = np.zeros((count, MAX_DEPTH), np.int32)
        self.evidence = np.zeros((count, MAX_DEPTH), np.int32)
        self.guess_counts = np.zeros(count, np.int64)
        self._row_of = np.zeros(max(count, 1), np.int64)  # by request id
        self._ended: list[int] = []  # rows of sequences that are not indexed yet
        self._rest: dict[int, Sequence[int]] = {}  # tokens of those rows that are not added yet
        self.clear()

    def clear(self):
        self._ended.clear()
        self._rest.clear()
        self._free = list(range(len(self.lengths)))

    @property
    def is_full(self) -> bool:
        """Whether `index_all` has to free rows of sequences that ended before another one begins."""
        return not self._free

    def begin(self, request_id: int, prompt: Sequence[int]):
        row, size = self._free.pop(), len(prompt)
        if request_id >= len(self._row_of):
            self._row_of = np.resize(self._row_of, 2 * request_id)
        self._row_of[request_id] = row
        self._tokens[row, MAX_CONTEXT : MAX_CONTEXT + size] = prompt
        self.prompt_keys[row] = hash(tuple(prompt)) & ((1 << 64) - 1)
        self.lengths[row], self._indexed[row] = size, max(size, 1)
        self.guess_counts[row] = 0

    def rows_of(self, request_ids: np.ndarray) -> np.ndarray:
        """Returns the rows of some requests."""
        return self._row_of[request_ids]

    def end(self, request_id: int, sequence: Sequence[int]):
        """Completes a sequence; `take_ended` and `index_all` do the rest for many sequences together."""
        row = int(self._row_of[request_id])
        self._ended.append(row)
        self._rest[row] = sequence[self.lengths[row] :]

    def take_ended(self) -> tuple[np.ndarray, np.ndarray]:
        """Adds the last tokens of sequences that ended; returns what `extend` does."""
        rest, self._rest = self._rest, {}
        counts = np.array([len(tokens) for tokens in rest.values()], np.int64)
        tokens = np.array([token for tokens in rest.values() for token in tokens], np.int32)
        return self.extend(np.array(list(rest), np.int64), counts, tokens)

    def extend(self, rows: np.ndarray, counts: np.ndarray, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Adds tokens to some sequences, and compares the guesses of them with these tokens.

        Args:
            rows: [n] the sequences.
            counts: [n] of each sequence's tokens in `tokens` [Σ counts].

        Returns:
            ([m] evidence of the guesses whose earlier ones were right, [m] whether each is right).
        """
        owner, place = expand_array_counts(counts)
        columns = MAX_CONTEXT + self.lengths[rows][owner] + place
        self._tokens[rows[owner], columns] = tokens
        self.lengths[rows] += counts
        is_guessed = place < np.minimum(self.guess_counts[rows], MAX_DEPTH)[owner]
        guessed = rows[owner[is_guessed]], place[is_guessed]
        right = self.guessed[guessed] == tokens[is_guessed]
        first_wrong = np.full(len(rows), MAX_DEPTH)
        np.minimum.at(first_wrong, owner[is_guessed][~right], guessed[1][~right])
        is_checked = guessed[1] <= first_wrong[owner[is_guessed]]
        self.guess_counts[rows] = 0
        return self.evidence[guessed][is_checked], right[is_checked]

    def contexts(self, rows: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Returns [n, `MAX_CONTEXT`] the last tokens of the first `lengths` [n] tokens of some sequences."""
        return self._tokens[rows[:, None], lengths[:, None] + np.arange(MAX_CONTEXT)]

    def index_all(self, rows: np.ndarray | Sequence[int], index: DraftIndex):
        """Adds what is new of sequences `rows`, and of those that ended, to an index; frees the latter."""
        rows = np.concatenate([np.asarray(rows, np.int64), np.array(self._ended, np.int64)])
        owner, place = expand_array_counts(np.maximum(self.lengths[rows] - self._indexed[rows], 0))
        sequences = rows[owner]
        places = self._indexed[sequences] + place
        if len(sequences):
            following = self._tokens[sequences, MAX_CONTEXT + places]
            index.add(self.prompt_keys[sequences], self.contexts(sequences, places), following)
        self._indexed[rows] = np.maximum(self.lengths[rows], self._indexed[rows])
        self._free += self._ended
        self._ended.clear()
