"""The optimal token baseline: for each token position the group's mean return, weighted by what varies the gradient."""

from collections.abc import Callable

from megarl.algorithms.packed import broadcast_to_tokens, response_tokens, sums_by_sequence
from megarl.algorithms.returns import discounted_to_go
from megarl.deferred import Tensor, no_grad, torch


@no_grad
def token_baseline_advantages(
    rewards: Tensor, logprobs: Tensor, squares: Tensor, groups: Tensor, is_counted: Tensor,
    shape: tuple[int, int], response_mask: Tensor, cu_seqlens: Tensor, total: Callable[[Tensor], Tensor],
) -> Tensor:  # fmt: skip
    """G_t − B_t with B_t = Σ_i G_it·W_it / Σ_i W_it over the group's responses that reach their t-th token.

    OTB (arXiv 2602.07078): G is the return-to-go, W_t = Σ_{j≤t} (1 − 2π_j + Σπ_j²) the expected squared norm of the
    score of the tokens so far. Where a response is longer than all others of its group, B is 0, as in verl. Observation
    tokens have no place.

    Args:
        rewards: [T] of the tokens.
        logprobs, squares: [T] log π_old of the tokens, and Σπ_old² over the vocabulary before them.
        groups: [N] int64 group of each of this rank's sequences, from 0; the same numbers on all ranks.
        is_counted: [N] bool; False: the sequence's advantages are 0, and it is in no baseline.
        shape: number of groups, and response tokens of the longest response, of all ranks.
        response_mask: [T] bool.
        cu_seqlens: [N+1].
        total: sums over the ranks. It gets a float64 table [3, *shape].

    Returns:
        [T] float64, 0 outside the mask.
    """
    where = response_mask, cu_seqlens
    returns = discounted_to_go(rewards.double(), *where, 1.0)
    energy = torch.where(response_mask, 1 - 2 * logprobs.double().exp() + squares.double(), 0.0)
    # Not a running sum over the batch, whose rounding would depend on the sequences before.
    rest = discounted_to_go(energy, *where, 1.0) - energy
    weights = broadcast_to_tokens(sums_by_sequence(energy, *where), *where) - rest
    response, table = response_tokens(*where), energy.new_zeros(3, shape[0] * shape[1])
    cells, at = groups[response.sequences] * shape[1] + response.ranks, response.positions
    is_counted = is_counted[response.sequences]
    rows = torch.stack([torch.ones_like(weights[at]), weights[at], weights[at] * returns[at]]) * is_counted
    number, weight, weighted = total(table.index_add_(1, cells, rows))[:, cells]
    baselines = torch.where((number > 1) & (weight > 0), weighted / torch.where(weight > 0, weight, 1.0), 0.0)
    advantages = torch.zeros_like(returns)
    advantages[at] = torch.where(is_counted, returns[at] - baselines, 0.0)
    return advantages
