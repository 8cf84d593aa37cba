"""Group baselines by position: one for each turn of an episode, or for each token position of a response.

By turns, the advantage of turn k of episode i is G_ik − mean of G_jk over the *other* episodes j of the group, where
G_ik is the sum of the rewards of turn k and all later ones, and 0 for an episode that has ended before turn k. The
others do not depend on the actions of episode i, so the baseline leaves the expected policy gradient as it is
(Reinforcement Learning: An Introduction, 2nd ed., §13.4). Statistics over the episodes that reached turn k, and a
division by the deviation at each turn, do not.

By token positions, the baseline is the group's mean return, weighted by what varies the gradient (OTB).
"""

from collections.abc import Callable

from megarl.algorithms.advantages import discounted_to_go
from megarl.algorithms.group_advantages import rloo
from megarl.algorithms.packed import (
    broadcast_to_tokens,
    require_same_shape,
    response_tokens,
    sums_by_sequence,
    token_sequences,
    turn_numbers,
)
from megarl.deferred import Tensor, no_grad, torch


@no_grad
def turn_sums(rewards: Tensor, response_mask: Tensor, cu_seqlens: Tensor, max_turns: int) -> Tensor:
    """[N, K] float64: sum of the token rewards [T] of each turn; K = `max_turns`, 0 for turns that did not happen.

    Values outside the mask are ignored. ValueError if a sequence has more turns.
    """
    require_same_shape(rewards=rewards, response_mask=response_mask)
    numbers = turn_numbers(response_mask, cu_seqlens)
    if numbers.numel() and int(numbers.max()) >= max_turns:
        raise ValueError(f"a sequence has {int(numbers.max()) + 1} turns; max_turns is {max_turns}")
    cells = (token_sequences(response_mask, cu_seqlens) * max_turns + numbers)[response_mask]
    sums = rewards.new_zeros((len(cu_seqlens) - 1) * max_turns, dtype=torch.float64)
    return sums.index_add_(0, cells, rewards[response_mask].double()).view(-1, max_turns)


def returns_to_go(sums: Tensor) -> Tensor:
    """[…, K] -> […, K]: Σ_{k' ≥ k} of the sums of turns, added from the last turn to the first."""
    to_go = sums.clone()
    for turn in reversed(range(sums.shape[-1] - 1)):
        to_go[..., turn] += to_go[..., turn + 1]
    return to_go


def turn_rloo(to_go: Tensor, groups: Tensor, raw_to_go: Tensor) -> Tensor:
    """[S, K] advantages of turns, `group_advantages.rloo` for each turn, with its exact zeros for equal returns.

    `to_go`: [S, K] returns-to-go of the responses of the step; `raw_to_go`: without the KL penalty.
    """
    columns = zip(to_go.unbind(1), raw_to_go.unbind(1), strict=True)
    return torch.stack([rloo(column, groups, raw_scores=raw) for column, raw in columns], dim=1)


def on_turns(values: Tensor, response_mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """[N, K] -> [T]: each turn's value on its tokens, 0 outside the mask."""
    numbers = turn_numbers(response_mask, cu_seqlens)
    rows = values[token_sequences(response_mask, cu_seqlens)]
    return rows.gather(1, numbers.clamp(min=0).unsqueeze(1)).squeeze(1).masked_fill(~response_mask, 0)


@no_grad
def token_baseline_advantages(
    rewards: Tensor,
    logprobs: Tensor,
    squares: Tensor,
    groups: Tensor,
    shape: tuple[int, int],
    mask: Tensor,
    cu_seqlens: Tensor,
    total: Callable[[Tensor], Tensor],
) -> Tensor:
    """G_t − B_t with B_t = Σ_i G_it·W_it / Σ_i W_it over the group's responses that reach their t-th token.

    OTB (arXiv 2602.07078): G is the return-to-go, W_t = Σ_{j≤t} (1 − 2π_j + Σπ_j²) the expected squared norm of the
    score of the tokens so far. Where a response is longer than all others of its group, B is 0, as in verl. Observation
    tokens have no place.

    Args:
        rewards: [T] of the tokens.
        logprobs, squares: [T] log π_old of the tokens, and Σπ_old² over the vocabulary before them.
        groups: [N] int64 group of each of this rank's sequences, from 0; the same numbers on all ranks. −1: the
            sequence's advantages are 0, and it is in no baseline.
        shape: number of groups, and response tokens of the longest response, of all ranks.
        total: sums over the ranks. It gets a float64 table [3, *shape].

    Returns:
        [T] float64, 0 outside the mask.
    """
    returns = discounted_to_go(rewards.double(), mask, cu_seqlens, 1.0)
    energy = torch.where(mask, 1 - 2 * logprobs.double().exp() + squares.double(), 0.0)
    # Not a running sum over the batch, whose rounding would depend on the sequences before.
    rest = discounted_to_go(energy, mask, cu_seqlens, 1.0) - energy
    weights = broadcast_to_tokens(sums_by_sequence(energy, mask, cu_seqlens), mask, cu_seqlens) - rest
    response, table = response_tokens(mask, cu_seqlens), energy.new_zeros(3, shape[0] * shape[1])
    of_tokens, at = groups[response.sequences], response.positions
    is_counted, cells = of_tokens >= 0, of_tokens.clamp(min=0) * shape[1] + response.ranks
    rows = torch.stack([torch.ones_like(weights[at]), weights[at], weights[at] * returns[at]]) * is_counted
    number, weight, weighted = total(table.index_add_(1, cells, rows))[:, cells]
    baselines = torch.where((number > 1) & (weight > 0), weighted / torch.where(weight > 0, weight, 1.0), 0.0)
    advantages = torch.zeros_like(returns)
    advantages[at] = torch.where(is_counted, returns[at] - baselines, 0.0)
    return advantages
