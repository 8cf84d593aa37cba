"""Discounted sums over the rest of a response: returns-to-go, and GAE's sum of temporal differences."""

from megarl.algorithms.packed import require_same_shape, response_tokens, token_sequences
from megarl.deferred import Tensor, no_grad, torch


@no_grad
def discounted_to_go(terms: Tensor, response_mask: Tensor, cu_seqlens: Tensor, factor: float | Tensor) -> Tensor:
    """G_t = x_t + factor·G_{t+1} over the response tokens of each sequence, G = 0 after the last one.

    t + 1 is the *next response token*: observation tokens between two turns are skipped; they neither reset nor
    discount. With rewards and factor γ this is the return-to-go (Reinforcement Learning: An Introduction, 2nd ed.,
    eq. 3.9); with temporal differences and γλ it is GAE (arXiv 1506.02438, eq. 16).

    Args:
        terms: [T] x, read at response tokens only.
        response_mask: [T] bool.
        cu_seqlens: [N+1].
        factor: in [0, 1]; or [N], one of each sequence, which is not checked.

    Returns:
        [T] in the dtype of `terms`, 0 outside the mask, no gradient. A sequence's results do not depend on the other
        sequences of the batch, to the last bit.

    Raises:
        ValueError: shapes do not fit together, or the factor is outside [0, 1].
    """
    require_same_shape(terms=terms, response_mask=response_mask)
    if not isinstance(factor, torch.Tensor) and not 0 <= factor <= 1:
        raise ValueError(f"factor must be in [0, 1], got {factor}")
    response = response_tokens(response_mask, cu_seqlens)
    number_of_sequences = response.counts.numel()
    longest = int(response.counts.max()) if number_of_sequences else 0

    # Time is the first dimension, so that each step reads whole rows. Padding comes after the response, where G = 0.
    rows = terms.new_zeros(longest + 1, number_of_sequences)
    rows[response.ranks, response.sequences] = terms[response.positions]
    for step in reversed(range(longest)):
        # A plain product and sum, no fused multiply-add, so that rounding is the same at every position and backend.
        rows[step] += factor * rows[step + 1]

    to_go = torch.zeros_like(terms)
    to_go[response.positions] = rows[response.ranks, response.sequences]
    return to_go


@no_grad
def discounted_sums(terms: Tensor, response_mask: Tensor, cu_seqlens: Tensor, factor: float) -> Tensor:
    """`discounted_to_go` for losses: in log₂ T rounds and without waiting for the device, up to rounding.

    A round lets each token take in what twice as many tokens after it sum up to. A sequence's results do not depend on
    the other sequences of the batch, to the last bit.
    """
    require_same_shape(terms=terms, response_mask=response_mask)
    total, sums = len(terms), terms.masked_fill(~response_mask, 0.0)
    sequences, factors = token_sequences(response_mask, cu_seqlens), torch.ones_like(sums)
    factors = torch.where(response_mask, factor, factors)  # of an observation: 1
    if total:
        is_last = sequences != torch.cat([sequences[1:], sequences.new_full((1,), -1)])
        factors = factors.masked_fill(is_last, 0.0)
    reach = 1
    while reach < total:
        nothing = sums.new_zeros(reach)
        sums = sums + factors * torch.cat([sums[reach:], nothing])
        factors = factors * torch.cat([factors[reach:], nothing])
        reach *= 2
    return sums.masked_fill(~response_mask, 0.0)
