"""Index arithmetic of packed (THD) batches: the sequence of each token, and its rank among the response tokens.

Packed sequences are concatenated without padding. In all of `algorithms`, T is the tokens of a batch and N its
sequences; `response_mask` [T], or `mask`, is bool and True at response tokens, `cu_seqlens` [N+1] are the boundaries of
whole sequences; functions raise ValueError where shapes do not fit together.
"""

from typing import NamedTuple

from megarl.deferred import Tensor, torch


class ResponseTokens(NamedTuple):
    """Indices of the response tokens of a packed batch: R tokens, N sequences."""

    positions: Tensor  # [R] int64, index into the packed [T] fields, rising
    sequences: Tensor  # [R] int64, the sequence each one belongs to
    ranks: Tensor  # [R] int64, 0 for the first response token of its sequence, then 1, 2, ...
    counts: Tensor  # [N] int64, response tokens of each sequence; 0 for an empty response


def require_same_shape(**fields: Tensor) -> None:
    """ValueError for fields of different shapes, which torch would broadcast to a plausible wrong result."""
    if len({field.shape for field in fields.values()}) > 1:
        shapes = ", ".join(f"{name} {list(field.shape)}" for name, field in fields.items())
        raise ValueError(f"per-token fields must have one shape, got {shapes}")


def _require_packed(response_mask: Tensor, cu_seqlens: Tensor) -> None:
    """ValueError for wrong shapes or dtypes; reads no values, so the host does not wait for the device."""
    if response_mask.dtype != torch.bool or response_mask.dim() != 1:
        raise ValueError(f"response_mask must be bool [T], got {response_mask.dtype} {list(response_mask.shape)}")
    if cu_seqlens.dim() != 1 or cu_seqlens.numel() == 0:
        raise ValueError(f"cu_seqlens must be [N+1], got shape {list(cu_seqlens.shape)}")


def token_sequences(response_mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """[T] int64: the sequence of each token. Losses call it in every micro-batch: it must not wait for the device."""
    _require_packed(response_mask, cu_seqlens)
    tokens = torch.arange(response_mask.numel(), device=cu_seqlens.device)
    return torch.searchsorted(cu_seqlens[1:].long(), tokens, right=True)  # an empty sequence ends where it begins


def response_counts(response_mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """[N] int64 response tokens of each sequence."""
    return sums_by_sequence(response_mask.long(), response_mask, cu_seqlens)


def response_tokens(response_mask: Tensor, cu_seqlens: Tensor) -> ResponseTokens:
    """Find the response tokens of every sequence; masked tokens between them (observations) are skipped.

    ValueError also for `cu_seqlens` that do not rise from 0 to T.
    """
    _require_packed(response_mask, cu_seqlens)
    total = response_mask.numel()
    cu_seqlens = cu_seqlens.long()  # attention kernels need int32; index arithmetic uses int64
    lengths = cu_seqlens[1:] - cu_seqlens[:-1]
    is_valid = (cu_seqlens[0] == 0) & (cu_seqlens[-1] == total) & (lengths >= 0).all()
    if not is_valid:
        raise ValueError(f"cu_seqlens must rise from 0 to T={total}, got {cu_seqlens.tolist()}")

    positions = response_mask.nonzero().squeeze(1)
    sequences = token_sequences(response_mask, cu_seqlens)[positions]
    counts = torch.zeros_like(lengths).index_add_(0, sequences, torch.ones_like(sequences))
    first = counts.cumsum(0) - counts
    ranks = torch.arange(positions.numel(), device=positions.device) - first[sequences]
    return ResponseTokens(positions=positions, sequences=sequences, ranks=ranks, counts=counts)


def broadcast_to_tokens(values: Tensor, response_mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """[N] -> [T]: each sequence's value on each of its response tokens, 0 outside the mask. Differentiable."""
    number = cu_seqlens.numel() - 1
    sequences = token_sequences(response_mask, cu_seqlens)
    if values.shape != (number,):
        raise ValueError(f"values must be [{number}], one a sequence, got {list(values.shape)}")
    return values.index_select(0, sequences).masked_fill(~response_mask, 0)


def sums_by_sequence(field: Tensor, response_mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """[T] -> [N]: sum of a field over the response tokens of each sequence, in its dtype. Differentiable.

    Values outside the mask are ignored, even inf or NaN. An empty response gives 0.
    """
    require_same_shape(field=field, response_mask=response_mask)
    sequences = token_sequences(response_mask, cu_seqlens)
    return field.new_zeros(cu_seqlens.numel() - 1).index_add(0, sequences, field.masked_fill(~response_mask, 0))


def turn_numbers(response_mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """[T] int64: the turn of its sequence, from 0, that each response token belongs to; −1 outside the mask.

    A turn is a run of response tokens: between two turns there is at least one token of the environment.
    """
    sequences = token_sequences(response_mask, cu_seqlens)
    starts = cu_seqlens.long()[sequences]
    follows = response_mask.roll(1) & (torch.arange(response_mask.numel(), device=starts.device) != starts)
    begun = torch.cat([starts.new_zeros(1), (response_mask & ~follows).cumsum(0)])  # turns before each token
    return torch.where(response_mask, begun[1:] - begun[starts] - 1, -1)
