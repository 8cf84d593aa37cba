"""The typed batch that all roles exchange: packed sequences, no padding.

N sequences with T tokens in total are concatenated in ascending order of `sequence_ids`. A per-token field is aligned
with the token it describes: `logprobs[t]` is log π(tokens[t] | earlier tokens of its sequence), `values[t]` the value
of the state before tokens[t]. A sequence's first token has neither: both are 0, and `response_mask` is False.

An episode of an agent whose program asks with several histories has a row of tokens for each. They are one sequence,
one after another: it has one score, one place in its group and one weight. Models read each row by itself.
"""

import dataclasses
import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from megarl.algorithms.packed import response_counts

ACTOR, REWARD, REFERENCE, TEACHER, CRITIC = READERS = ("actor", "reward", "reference", "teacher", "critic")
# Who fills a field on the rollout's ranks, in the order of time: the engine and the environments; the scores of a
# round; the batch of a step, once it is full.
GENERATED, SCORED, FORMED = ON_ROLLOUT = ("generated", "scored", "formed")


class Sent(NamedTuple):
    """A transfer of a field: who fills it, a role or one of `ON_ROLLOUT`; who gets it; in runs of which settings."""

    source: str
    readers: tuple[str, ...]
    when: Callable[[Any], object] = lambda s: True

    def where(self, also: Callable[[Any], object]) -> "Sent":
        """The transfer in runs where `also` holds, too."""
        return self._replace(when=lambda s: self.when(s) and also(s))


def _field(kind: str, dtype: torch.dtype, transfers: Sequence[Sent] = ()):
    return dataclasses.field(default=None, metadata={"kind": kind, "dtype": dtype, "transfers": transfers})


_token, _sequence = functools.partial(_field, "token"), functools.partial(_field, "sequence")
_response, _of_actor = [Sent(GENERATED, READERS)], [Sent(GENERATED, (ACTOR,))]
_episode = [Sent(GENERATED, READERS, lambda s: s.environment)]
_budget = [Sent(GENERATED, READERS, lambda s: s.environment and s.thinking_budget)]
# What the reward role says; before the batch is full if a filter or a pool asks.
_verdict = [
    Sent(SCORED, READERS, lambda s: s.scores_rounds),
    Sent(REWARD, (ACTOR,)),
    Sent(REWARD, (TEACHER,), lambda s: s.reads_siblings and not s.scores_rounds),
]
_part = [each.where(lambda s: s.part_weights) for each in _verdict]
_lost = [each.where(lambda s: s.reward_failure == "drop") for each in _verdict[1:]]
_seen = [Sent(ACTOR, (CRITIC,), lambda s: s.can_lose_responses)]  # by the critic, if it may have changed
_taught = Sent(TEACHER, (ACTOR,), lambda s: s.distill != "none")


@dataclass
class Batch:
    """The sequences of one data-parallel replica. Fields that are not computed yet are None; the types say it of those
    that not every batch of responses has."""

    sequence_ids: Tensor = _sequence(torch.int64)  # [N] index in the whole batch of the step, ascending
    prompt_ids: Tensor = _sequence(torch.int64, _response)  # [N] line in the prompt set
    prompt_lengths: Tensor = _sequence(torch.int64, _response)  # [N] tokens in the prompt
    scores: Tensor | None = _sequence(torch.float32, _verdict)  # [N] reward of the whole response
    # [N] reward of the greedy response to the same prompt
    baseline_scores: Tensor | None = _sequence(torch.float32, [Sent(SCORED, READERS, lambda s: s.greedy_baseline)])
    # [N], each [K]: its K parts of several, before their weights
    reward_parts: Tensor | None = _sequence(torch.float32, _part)
    correct: Tensor | None = _sequence(torch.bool, _verdict)  # [N] verdict of the verifier
    solved: Tensor | None = _sequence(torch.bool, _episode)  # [N] verdict of the environment
    finished: Tensor = _sequence(torch.bool, _response)  # [N] ended with the end token, not at the length limit
    # [N] which of several teachers' it is, by the order of their names
    teacher_ids: Tensor | None = _sequence(torch.int64, [_taught.where(lambda s: s.teachers)])
    lengths: Tensor = _sequence(torch.int64)  # [N] tokens in each sequence; their sum is T
    tokens: Tensor = _token(torch.int64, _response)  # [T]
    rollout_logprobs: Tensor | None = _token(
        torch.float32, _of_actor
    )  # [T] log μ, from the engine's sampling distribution
    logprobs: Tensor | None = _token(torch.float32)  # [T] log π_old, recomputed by the training forward
    entropy: Tensor | None = _token(torch.float32)  # [T] of π_old over the vocabulary
    squares: Tensor | None = _token(torch.float32)  # [T] Σπ_old² over the vocabulary, before the token
    reference_logprobs: Tensor | None = _token(torch.float32, [Sent(REFERENCE, (ACTOR,))])  # [T]
    teacher_logprobs: Tensor | None = _token(torch.float32, [_taught.where(lambda s: s.distill == "reward")])  # [T]
    # [T], each [B] bytes: its teacher's hidden state before the token
    teacher_states: Tensor | None = _token(torch.uint8, [_taught.where(lambda s: s.distill == "loss")])
    values: Tensor | None = _token(torch.float32, [Sent(CRITIC, (ACTOR,))])  # [T] V_old
    advantages: Tensor | None = _token(torch.float32)  # [T]
    returns: Tensor | None = _token(torch.float32, [Sent(ACTOR, (CRITIC,))])  # [T]
    # [T] True where the policy generated the token
    response_mask: Tensor = _token(torch.bool, _response + _lost + _seen)
    kept: Tensor | None = _token(torch.bool)  # [T] True where a rejection leaves the token in the actor's loss
    selected: Tensor | None = _token(
        torch.bool
    )  # [T] True where the policy loss treats a token of the mini-batch apart
    versions: Tensor | None = _token(torch.int32)  # [T] policy version (updates so far) that generated the token
    # [T] updates between that policy and the one that is trained on the token
    staleness: Tensor | None = _token(torch.int32, [Sent(FORMED, (ACTOR,), lambda s: s.has_stale_tokens)])
    # [T] the environment's reward of a turn, at its last token; else 0
    turn_rewards: Tensor | None = _token(torch.float32, _episode)
    # [T] True where a thinking budget has put the token into an episode's turn
    forced: Tensor | None = _token(torch.bool, _budget)
    # [T] True where another row of an episode begins, not at its first token
    row_starts: Tensor | None = _token(torch.bool, _episode)
    routes: Tensor | None = _token(torch.int16)  # [T], each [L, k]: experts in this rank's L MoE layers; −1: unknown

    # Set on micro-batches only; these are not fields and are never exchanged.
    routing = cast(Any, None)  # `Routing`: how the routers treat the tokens
    host_metadata = cast(Any, None)  # `HostMetadata`

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def cu_seqlens(self) -> Tensor:
        """[N + 1] int64 start offsets of the sequences, and T."""
        return torch.cat([self.lengths.new_zeros(1), self.lengths.cumsum(0)])

    @property
    def response_lengths(self) -> Tensor:
        """[N] int64 generated tokens of each sequence; observations between the policy's turns do not count."""
        return response_counts(self.response_mask, self.cu_seqlens)

    def need(self, name: str) -> Tensor:
        """A field that must be there. RuntimeError, in one line with who fills it, if it is not computed yet."""
        if (field := getattr(self, name)) is None:
            sources = dict.fromkeys(each.source for each in _TRANSFERS[name])
            filled = f"filled by: {', '.join(sources)}" if sources else "filled where it is read"
            raise RuntimeError(f"the batch has no {name} yet ({filled})")
        return field

    def present(self) -> list[str]:
        """Names of the fields that hold data."""
        return [name for name in FIELDS if getattr(self, name) is not None]

    def select(self, index: Tensor) -> "Batch":
        """The sequences at these positions, in the order given."""
        return self.take(index, self.token_positions(index))

    def only(self, *names: str) -> "Batch":
        """The same sequences with these fields alone, besides those that identify them; not a copy."""
        return Batch(**{name: getattr(self, name) for name in ("sequence_ids", "lengths", *names)})

    def take(self, index: Tensor, rows: Tensor) -> "Batch":
        """Like `select`, with the positions of the tokens (`token_positions`) already known."""
        values = {name: getattr(self, name) for name in self.present()}
        return Batch(**{n: v[rows] if FIELDS[n]["kind"] == "token" else v[index] for n, v in values.items()})

    def token_positions(self, index: Tensor) -> Tensor:
        """[T'] int64 positions in the batch of the tokens of the sequences at `index`, in the order given."""
        return expand_ranges(self.cu_seqlens[:-1][index], self.lengths[index])

    def renumbered(self, is_kept: Tensor) -> "Batch":
        """The sequences whose ids are True in `is_kept` (bool, one for each id), numbered from 0 in the same order."""
        is_kept = is_kept.to(self.sequence_ids.device)
        kept = self.select(is_kept[self.sequence_ids].nonzero().flatten())
        kept.sequence_ids = is_kept.cumsum(0)[kept.sequence_ids] - 1
        return kept

    def sorted(self) -> "Batch":
        """The same sequences in ascending `sequence_ids`."""
        return self.select(self.sequence_ids.argsort())

    def update(self, other: "Batch", names: list[str]):
        """Copies these fields from a batch with the same sequences; ValueError if the sequences differ."""
        if not torch.equal(self.sequence_ids, other.sequence_ids) or not torch.equal(self.lengths, other.lengths):
            raise ValueError("the received fields belong to other sequences than this batch holds")
        for name in names:
            setattr(self, name, getattr(other, name))

    def to(self, device) -> "Batch":
        """A copy of the batch on a device."""
        return Batch(**{name: getattr(self, name).to(device) for name in self.present()})


@dataclass(frozen=True)
class SharedPrefix:
    """Prefixes that several sequences of a micro-batch share and that are computed once. int64 [N], on the host."""

    # Position of the sequence that computes the prefix: itself, or one with no shared prefix of its own.
    holders: Tensor
    tokens: Tensor  # length of the shared prefix, less than both sequences' lengths; 0 for holders


@dataclass(frozen=True)
class HostMetadata:
    """Host copies that determine the tensor shapes of a pass, so that no pass synchronizes with the device.

    Each row of a sequence that has several is one of its N sequences.
    """

    lengths: Tensor  # [N] int64
    response_mask: Tensor | None  # [T] bool; None if the batch has none
    shared: SharedPrefix | None = None  # None: no prefix is shared
    teacher_ids: Tensor | None = None  # [N] int64; None if the batch has none


HEADER = ["sequence_ids", "lengths"]  # always sent: they identify the sequences of the other fields
# Of each field its `kind` (token or sequence) and its `dtype`; an item may be a row of that dtype.
FIELDS = {f.name: f.metadata for f in dataclasses.fields(Batch)}
_TRANSFERS = {f.name: f.metadata["transfers"] for f in dataclasses.fields(Batch)}


def fields_sent(settings, sources: Sequence[str], reader: str | None = None) -> list[str]:
    """Names of the fields that some of these sources fill for a role (None: for any), in the order of `Batch`."""
    return [
        name
        for name, transfers in _TRANSFERS.items()
        if any(
            each.source in sources and (reader is None or reader in each.readers) and each.when(settings)
            for each in transfers
        )
    ]


def generated_fields(settings) -> list[str]:
    """Names of the fields of a batch that was just generated."""
    return HEADER + fields_sent(settings, [GENERATED])


def expand_ranges(starts: Tensor, counts: Tensor) -> Tensor:
    """[Σ counts] int64: the concatenated ranges start, start + 1, … of `counts` elements each."""
    shift = torch.repeat_interleave(starts - (counts.cumsum(0) - counts), counts)
    return shift + torch.arange(len(shift), device=shift.device)


def expand_counts(counts: Tensor) -> tuple[Tensor, Tensor]:
    """Returns (owner, place) [Σ counts]: for each of counts[i] items of list i, i and the item's number in the list."""
    owner = torch.repeat_interleave(torch.arange(len(counts)), counts)
    return owner, torch.arange(len(owner)) - (counts.cumsum(0) - counts)[owner]


def expand_array_counts(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Same as `expand_counts`, for arrays. No operation of torch, so a mode that watches torch sees none."""
    owner = np.repeat(np.arange(len(counts)), counts)
    return owner, np.arange(len(owner)) - (counts.cumsum() - counts)[owner]


def common_prefix_lengths(rows: Sequence[Sequence[int]], ids: Tensor) -> Tensor:
    """[N] int64: length of the prefix that each row has in common with all rows of the same id in `ids` [N]."""
    groups = {}
    for row, row_id in zip(rows, ids.tolist(), strict=True):
        groups.setdefault(row_id, []).append(row)
    prefixes = {row_id: len(os.path.commonprefix(group)) for row_id, group in groups.items()}  # noqa: RUF071
    return torch.tensor([prefixes[row_id] for row_id in ids.tolist()], dtype=torch.int64)


def concatenate(batches: list[Batch]) -> Batch:
    """Joins batches that hold the same fields, in ascending order of `sequence_ids`."""
    names = batches[0].present()
    return Batch(**{name: torch.cat([getattr(b, name) for b in batches]) for name in names}).sorted()


def empty_batch(names: list[str], device) -> Batch:
    """A batch with these fields and no sequences."""
    return Batch(**{name: torch.zeros(0, dtype=FIELDS[name]["dtype"], device=device) for name in names})
