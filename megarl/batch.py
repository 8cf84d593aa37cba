"""The one typed batch that flows between roles: packed, never padded.

N sequences of T tokens in all stand behind each other in ascending `sequence_ids`. Every per-token field is aligned
to the token it speaks about: `logprobs[t]` is log π(tokens[t] | earlier tokens of its sequence), `values[t]` the
value of the state before tokens[t]. A sequence's first token has neither: 0 there, and `response_mask` is False.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megarl.algorithms.packed import response_counts


def _field(kind: str, dtype: torch.dtype):
    return dataclasses.field(default=None, metadata={"kind": kind, "dtype": dtype})


def _token(dtype):
    return _field("token", dtype)


def _sequence(dtype):
    return _field("sequence", dtype)


@dataclass
class Batch:
    """Sequences of one lane. Fields not yet computed are None."""

    sequence_ids: Tensor = _sequence(torch.int64)  # [N] place in the step's whole batch, ascending
    prompt_ids: Tensor = _sequence(torch.int64)  # [N] line of the prompt set
    prompt_lengths: Tensor = _sequence(torch.int64)  # [N] tokens of the prompt
    scores: Tensor = _sequence(torch.float32)  # [N] reward of the whole response
    baseline_scores: Tensor = _sequence(torch.float32)  # [N] reward of the greedy response to the same prompt
    correct: Tensor = _sequence(torch.bool)  # [N] the verifier's yes or no
    finished: Tensor = _sequence(torch.bool)  # [N] ended by the end token, not by the length limit
    lengths: Tensor = _sequence(torch.int64)  # [N] tokens of each sequence, sum T
    tokens: Tensor = _token(torch.int64)  # [T]
    rollout_logprobs: Tensor = _token(torch.float32)  # [T] μ, as the engine sampled
    logprobs: Tensor = _token(torch.float32)  # [T] π_old, recomputed by the training forward
    entropy: Tensor = _token(torch.float32)  # [T] of π_old over the vocabulary
    reference_logprobs: Tensor = _token(torch.float32)  # [T]
    values: Tensor = _token(torch.float32)  # [T] V_old
    advantages: Tensor = _token(torch.float32)  # [T]
    returns: Tensor = _token(torch.float32)  # [T]
    response_mask: Tensor = _token(torch.bool)  # [T] True where the policy wrote the token
    versions: Tensor = _token(torch.int32)  # [T] batches learnt before, by the policy that wrote the token
    routes: Tensor = _token(torch.int16)  # [T], [L, k] each: experts in the MoE layers of the rank that wrote, or −1

    routing = None  # what routers do with the tokens: an attribute of micro-batches alone, no field
    host_metadata = None  # `HostMetadata` of a micro-batch, likewise

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def cu_seqlens(self) -> Tensor:
        """[N + 1] int64 offsets of the sequences, from 0 to T."""
        return torch.cat([self.lengths.new_zeros(1), self.lengths.cumsum(0)])

    @property
    def response_lengths(self) -> Tensor:
        """[N] int64 tokens that the policy wrote of each sequence; observations between its turns do not count."""
        return response_counts(self.response_mask, self.cu_seqlens)

    def present(self) -> list[str]:
        """Names of the fields that hold data."""
        return [name for name in FIELDS if getattr(self, name) is not None]

    def select(self, index: Tensor) -> "Batch":
        """The sequences at these places, in the order given."""
        return self.take(index, self.token_places(index))

    def take(self, index: Tensor, rows: Tensor) -> "Batch":
        """`select` where the places of the sequences' tokens (`token_places`) are known already."""
        values = {name: getattr(self, name) for name in self.present()}
        return Batch(**{n: v[rows] if FIELDS[n].kind == "token" else v[index] for n, v in values.items()})

    def token_places(self, index: Tensor) -> Tensor:
        """[T'] int64 places in the batch of the tokens of the sequences at these places, in the order given."""
        return expand_ranges(self.cu_seqlens[:-1][index], self.lengths[index])

    def sorted(self) -> "Batch":
        """The same sequences in ascending `sequence_ids`."""
        return self.select(self.sequence_ids.argsort())

    def update(self, other: "Batch", names: list[str]):
        """Takes these fields from a batch of the same sequences; ValueError when they are others."""
        if not torch.equal(self.sequence_ids, other.sequence_ids) or not torch.equal(self.lengths, other.lengths):
            raise ValueError("fields came back for other sequences than were sent")
        for name in names:
            setattr(self, name, getattr(other, name))

    def to(self, device) -> "Batch":
        """The batch on another device."""
        return Batch(**{name: getattr(self, name).to(device) for name in self.present()})


@dataclass(frozen=True)
class SharedPrefix:
    """Sequences that begin with tokens which another one of them holds. Both int64 [N], on the host."""

    holders: Tensor  # who holds each one's beginning: itself, or a sequence that shares nothing of another's
    tokens: Tensor  # of the beginning: fewer than the sequence has, and than its owner has; 0 for owners


@dataclass(frozen=True)
class HostMetadata:
    """What the shapes of a micro-batch's pass follow from, on the host: no pass waits for the device to tell."""

    lengths: Tensor  # [N] int64
    response_mask: Tensor | None  # [T] bool; None where the batch has none
    shared: SharedPrefix | None = None  # None: nothing is


@dataclass(frozen=True)
class FieldSpec:
    """Kind ('token' or 'sequence') and dtype of a field."""

    kind: str
    dtype: torch.dtype


RESPONSE_FIELDS = [
    "tokens",
    "response_mask",
    "prompt_ids",
    "prompt_lengths",
    "finished",
]  # what every role gets of a rollout
ACTOR_FIELDS = [*RESPONSE_FIELDS, "rollout_logprobs"]  # what the actor gets
GENERATED_FIELDS = ["sequence_ids", "lengths", *ACTOR_FIELDS]  # all that a batch holds when it was written
FIELDS = {f.name: FieldSpec(f.metadata["kind"], f.metadata["dtype"]) for f in dataclasses.fields(Batch)}


def expand_ranges(starts: Tensor, counts: Tensor) -> Tensor:
    """[Σ counts] int64: from each start on, so many places one after another."""
    shift = torch.repeat_interleave(starts - (counts.cumsum(0) - counts), counts)
    return shift + torch.arange(len(shift), device=shift.device)


def common_prefix_lengths(rows: Sequence[Sequence[int]], ids: Tensor) -> Tensor:
    """[N] int64: how many tokens all rows with the number `ids` [N] of a row begin with."""
    groups = {}
    for row, number in zip(rows, ids.tolist(), strict=True):
        groups.setdefault(number, []).append(row)
    alike = {
        number: _common_prefix_length(min(group), max(group)) for number, group in groups.items()
    }  # others lie between these
    return torch.tensor([alike[number] for number in ids.tolist()], dtype=torch.int64)


def _common_prefix_length(one: Sequence[int], other: Sequence[int]) -> int:
    shorter = min(len(one), len(other))
    return next((place for place in range(shorter) if one[place] != other[place]), shorter)


def concatenate(batches: list[Batch]) -> Batch:
    """One batch of several that hold the same fields, in ascending `sequence_ids`."""
    names = batches[0].present()
    return Batch(**{name: torch.cat([getattr(b, name) for b in batches]) for name in names}).sorted()


def empty_batch(names: list[str], device) -> Batch:
    """A batch of no sequences with these fields."""
    return Batch(**{name: torch.zeros(0, dtype=FIELDS[name].dtype, device=device) for name in names})


def round_robin(sequence_ids: Tensor, replicas: int, samples_per_prompt: int) -> Tensor:
    """The lane that owns each sequence: prompts dealt in turn, all samples of a prompt together."""
    return (sequence_ids // samples_per_prompt) % replicas
