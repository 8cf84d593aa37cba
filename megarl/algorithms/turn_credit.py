"""Credit by turns: each turn of an episode against what the other episodes of its group earned from that turn on.

The advantage of turn k of episode i is G_ik − mean of G_jk over the *other* episodes j of the group, where G_ik is the
sum of the rewards of turn k and all later ones, and 0 for an episode that has ended before turn k. The others do not
depend on the actions of episode i, so the baseline leaves the expected policy gradient as it is (Reinforcement
Learning: An Introduction, 2nd ed., §13.4). Statistics over the episodes that reached turn k, and a division by the
deviation at each turn, do not.
"""

from megarl.algorithms.group_advantages import rloo
from megarl.algorithms.packed import require_same_shape, token_sequences, turn_numbers
from megarl.deferred import Tensor, no_grad, torch


@no_grad
def turn_sums(rewards: Tensor, response_mask: Tensor, cu_seqlens: Tensor, max_turns: int) -> Tensor:
    """[N, K] float64: sum of the token rewards [T] of each turn; K = `max_turns`, 0 for turns that did not happen.

    Values outside the mask are ignored.

    Raises:
        ValueError: shapes do not fit together, or a sequence has more turns.
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

    Args:
        to_go: [S, K] returns-to-go of the responses of the step, KL penalty included.
        groups: [S] int64.
        raw_to_go: [S, K] the same without the penalty; says which are equal.
    """
    columns = zip(to_go.unbind(1), raw_to_go.unbind(1), strict=True)
    return torch.stack([rloo(column, groups, raw_scores=raw) for column, raw in columns], dim=1)


def on_turns(values: Tensor, response_mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """[N, K] -> [T]: each turn's value on its tokens, 0 outside the mask."""
    numbers = turn_numbers(response_mask, cu_seqlens)
    rows = values[token_sequences(response_mask, cu_seqlens)]
    return rows.gather(1, numbers.clamp(min=0).unsqueeze(1)).squeeze(1).masked_fill(~response_mask, 0)
