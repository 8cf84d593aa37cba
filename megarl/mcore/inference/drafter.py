"""Chooses which predicted tokens of which requests are worth a row in a decode step.

A step takes a fixed time and then some for each row, so one with few requests tries unlikely tokens too. Looking for
drafts costs time itself: while they do not gain more, few steps look for them. The engine checks each draft: nothing
here changes a result. Nothing depends on a clock, so tensor-parallel ranks draft the same tokens.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from megarl.mcore.inference.draft_index import (
    EVIDENCES,
    MAX_CONTEXT,
    MAX_DEPTH,
    NO_TOKEN,
    DraftIndex,
    DraftSequences,
    Guesses,
)
from megarl.mcore.inference.draft_rows import SequenceGroups

FIRST_RATE = 0.5  # before any guess was checked; counts as two guesses
RATE_MEMORY = 64  # checked guesses over which a rate is averaged
SUFFICIENT_RATE = 0.9  # the first kind of n-gram with this rate is used
GAIN_MEMORY = 4  # steps with a look for drafts over which the gain is averaged
PREDICTED = EVIDENCES  # evidence of a token that a layer predicts
PROBING = 0.005  # share of the time in which it looks for drafts in any case


class StepCosts(NamedTuple):
    """Microseconds of a decode step. They decide what is tried, not what is generated."""

    step: float  # before its first row
    row: float  # of a request
    looking: float  # for drafts
    looking_row: float  # of a request
    drafting: float  # what a step with drafts takes more, before its first drafted row
    drafted_row: float  # it shares reads of the cache with its request's other rows

    @classmethod
    def on_cpu(cls, parameters: int, layers: int, threads: int) -> "StepCosts":
        """The costs of a model in which a token is multiplied by so many parameters. Measured with
        tools/bench/decode_operators.py on one core of an AMD EPYC, with 0.7 to 42 million parameters: 180 GFLOPS, and 5
        µs per row and layer outside products, of which attention has half."""
        product = parameters * 1.2e-5
        return cls(
            step=350 + 20 * layers + parameters * 1.2e-4,
            row=(product + 5 * layers) / threads,
            looking=400,
            looking_row=4,
            drafting=400,
            drafted_row=(product + 2.5 * layers) / threads + 1,
        )

    @classmethod
    def on_gpu(cls, parameters: int, layers: int) -> "StepCosts":
        """An estimate, never measured: 60 µs of launches a layer, weights read at 3 TB/s, 200 TFLOPS, in 16 bits."""
        row = 1 + parameters * 1e-8
        step = 60 * layers + parameters * 7e-7
        return cls(step=step, row=row, looking=400, looking_row=4, drafting=400, drafted_row=row)

    def plain(self, rows: int) -> float:
        """Of a step without drafts."""
        return self.step + self.row * rows

    def shares(self, groups: int, requests: int) -> bool:
        """Whether a step without drafts takes less time if it computes each of some groups of requests once."""
        return self.plain(groups) + self.drafting < self.plain(requests)

    def without_drafts(self, groups: int, requests: int) -> float:
        """Of a step without drafts in the faster way."""
        return min(self.plain(groups) + self.drafting, self.plain(requests))


class Drafts(NamedTuple):
    """Tokens to try after the last ones of m groups of requests with the same sequence."""

    tokens: np.ndarray  # [Σ counts] int64
    counts: np.ndarray  # [m] int64


class Drafter:
    """Drafts for the requests of an engine. Its index outlives the engine's calls, so that it knows earlier steps."""

    def __init__(self, costs: StepCosts, max_requests: int, max_length: int):
        """`max_requests`: at a time; `max_length`: of a request's prompt and response in tokens."""
        self.index, self.costs = DraftIndex(), costs
        self.rates = np.full(PREDICTED + 1, FIRST_RATE)  # share of right guesses by their evidence
        self.gains = [1.0] * 64  # share of a step's time that drafts save, by log2 of its requests
        self._checked = np.full(PREDICTED + 1, 2.0)  # guesses, at most `RATE_MEMORY`
        self._predicted = np.zeros(2, np.int64)  # what `take_predicted` returns
        self._sequences = DraftSequences(max_requests, max_length)
        self.groups = SequenceGroups()
        self._end_ids, self._unspent = np.zeros(0, np.int64), 0.0  # microseconds for probing

    def reset(self, end_ids: Iterable[int]):
        """Begins a call of the engine without requests. `end_ids`: tokens that end a response."""
        self._index(())
        self._sequences.clear()
        self.groups.reset()
        self._end_ids = np.array(sorted(end_ids), np.int64)

    def begin(self, request_id: int, prompt: Sequence[int]):
        if self._sequences.is_full:
            self._index(())
        self._sequences.begin(request_id, prompt)
        self.groups.begin(request_id, prompt)

    def finish(self, request_id: int, sequence: Sequence[int]):
        """Removes a request and indexes its whole sequence, prompt and response."""
        self._sequences.end(request_id, sequence)

    def rows_of(self, request_ids: np.ndarray) -> np.ndarray:
        """Returns the rows of some requests in the drafter's arrays, for the other methods."""
        return self._sequences.rows_of(request_ids)

    def should_look(self, count: int) -> bool:
        """Whether to look for drafts in the next step of so many requests."""
        plain, cost = self.costs.plain(count), self.costs.looking + self.costs.looking_row * count
        self._unspent += PROBING * plain
        if self._unspent >= cost:
            self._unspent = 0.0
            return True
        return self.gains[count.bit_length()] * plain > cost

    def catch_up(self, rows: np.ndarray, lengths: np.ndarray, last: np.ndarray, tail: Callable[..., Sequence[int]]):
        """Adds the tokens that requests, by their rows [n], got since the last call, and learns from them. `lengths`,
        `last`: [n] of their sequences, and their last tokens; `tail`: (i, k) -> the i-th one's last k tokens."""
        missing = lengths - self._sequences.lengths[rows]
        if missing.max() <= 1:
            tokens = last[missing == 1]
        else:
            tokens = np.array([token for i, more in enumerate(missing.tolist()) for token in tail(i, more)], np.int32)
        self._learn(*self._sequences.extend(rows, missing, tokens))

    def draft(
        self, rows: np.ndarray, room: np.ndarray, sizes: np.ndarray, max_rows: int, predicted: np.ndarray | None = None
    ) -> Drafts:
        """Returns the tokens to try after the sequence of each of a step's m groups, none where they are not worth it.

        Args:
            rows, sizes: [m] a request of each group, and how many there are.
            room: [m] maximum tokens to draft for each.
            predicted: [m] the first token after each sequence, as a layer predicts it; `NO_TOKEN` where it does not.
        """
        self._index(rows)
        chances = self._guess(rows, room, sizes, predicted)
        depths, gain = worthwhile(chances, sizes, self.costs, max_rows)
        size = int(sizes.sum()).bit_length()
        self.gains[size] += (gain - self.gains[size]) / GAIN_MEMORY
        sequences = self._sequences
        # A guess of a sequence without drafts is kept, to learn from it.
        sequences.guess_counts[rows] = np.minimum(np.maximum(depths, 1), sequences.guess_counts[rows])
        is_drafted = np.arange(MAX_DEPTH) < depths[:, None]
        return Drafts(sequences.guessed[rows][is_drafted].astype(np.int64), depths)

    def take_predicted(self) -> tuple[int, int]:
        """Returns how many tokens that a layer predicted were checked since the last call, and how many were right."""
        checked, right = self._predicted.tolist()
        self._predicted[:] = 0
        return checked, right

    def _index(self, rows: np.ndarray | Sequence[int]):
        self._learn(*self._sequences.take_ended())
        self._sequences.index_all(rows, self.index)

    def _learn(self, evidence: np.ndarray, is_right: np.ndarray):
        if not len(evidence):
            return
        guesses = np.bincount(evidence, minlength=PREDICTED + 1)
        right = np.bincount(evidence, is_right, PREDICTED + 1)
        self._checked = np.maximum(np.minimum(self._checked + guesses, RATE_MEMORY), guesses)
        self.rates += (right - guesses * self.rates) / self._checked
        self._predicted += guesses[PREDICTED], int(right[PREDICTED])

    def _guess(self, rows: np.ndarray, room: np.ndarray, sizes: np.ndarray, predicted: np.ndarray | None) -> np.ndarray:
        """Sets the sequences' guesses; returns [m, `MAX_DEPTH`] the chance of each that it and all before it are right,
        0 for those that may not be tried."""
        sequences, n = self._sequences, len(rows)
        chances = np.zeros((n, MAX_DEPTH))
        chance, at = np.ones(n), np.arange(n)  # of the sequences that still go on
        known = np.empty((n, MAX_CONTEXT + MAX_DEPTH), np.int64)  # the last tokens of the sequences, and then guesses
        known[:, :MAX_CONTEXT], keys = sequences.contexts(rows, sequences.lengths[rows]), sequences.prompt_keys[rows]
        # A row with a smaller chance is never worth its time.
        floor = np.minimum(sizes.sum() * self.costs.drafted_row / self.costs.plain(sizes.sum()) / sizes, 1)
        for depth in range(MAX_DEPTH):
            contexts = known[at, depth : depth + MAX_CONTEXT]
            guesses = self.index.guess(keys[at], contexts, self.rates, SUFFICIENT_RATE)
            if predicted is not None and not depth:
                guesses = self._better(guesses, predicted)
            known[at, depth + MAX_CONTEXT] = guesses.tokens
            chance = chance * guesses.rates
            # What follows an end token is dropped, so it is guessed only to learn from it.
            is_end = (guesses.tokens[:, None] == self._end_ids).any(1)
            goes_on = (chance >= floor[at]) & (depth < room[at]) & ~is_end
            is_guess = goes_on if depth else guesses.rates >= 0
            guessed = rows[at[is_guess]]
            sequences.guessed[guessed, depth] = guesses.tokens[is_guess]
            sequences.evidence[guessed, depth] = guesses.evidence[is_guess]
            sequences.guess_counts[guessed] = depth + 1
            at, chance = at[goes_on], chance[goes_on]
            if not len(at):
                break
            chances[at, depth] = chance
        return chances

    def _better(self, guesses: Guesses, predicted: np.ndarray) -> Guesses:
        """The guesses of the index, or the tokens that a layer predicts where these are right more often."""
        is_better = (predicted != NO_TOKEN) & (self.rates[PREDICTED] >= guesses.rates)
        own = (predicted, np.full(len(predicted), PREDICTED), np.full(len(predicted), self.rates[PREDICTED]))
        return Guesses(*(np.where(is_better, one, other) for one, other in zip(own, guesses, strict=True)))


def worthwhile(chances: np.ndarray, sizes: np.ndarray, costs: StepCosts, max_rows: int) -> tuple[np.ndarray, float]:
    """([m] guesses of each group to try, so that a step of at most `max_rows` generates the most tokens for its time;
    share of a plain step's time that they save for as many tokens). It is best to take rows in the order of the tokens
    that they may give, as long as a row gives more of them for its time than the step without it.
    `chances`: [m, D] of the guesses of each group, descending; `sizes`: [m] requests of each group."""
    m, n = len(chances), int(sizes.sum())
    plain, gains = costs.plain(n), (chances * sizes[:, None]).ravel()
    candidates = np.flatnonzero(gains > 0)
    order = candidates[np.argsort(-gains[candidates], kind="stable")][: max(max_rows - m, 0)]
    tokens = n + np.cumsum(gains[order], dtype=np.float64)
    times = costs.plain(m) + costs.drafting + costs.drafted_row * np.arange(1, len(order) + 1)
    undrafted = costs.without_drafts(m, n)
    best = int((times / tokens).argmin()) if len(order) else -1
    if best < 0 or times[best] / tokens[best] >= undrafted / n:
        return np.zeros(m, np.int64), 0.0
    depths = np.bincount(order[: best + 1] // chances.shape[1], minlength=m)
    return depths, (undrafted / n - times[best] / tokens[best]) * n / plain
