"""Group-relative advantages: each response against the other responses to the same prompt, without a critic.

Every function takes `scores` [S] and `groups` [S] (int64, 0 … G−1 in any order, groups of any size, numbers may be
missing) and returns [S], one advantage per response, in the dtype of `scores`, without gradient; those at the end have
a baseline by position, of a turn or a token. ValueError if shapes differ. In all of them:

* a group of one has advantage exactly 0;
* a group of equal scores has advantages of exactly 0: a rounded mean would leave a remainder, which the division by a
  tiny standard deviation would blow up.

`scores` may contain a penalty, such as the KL to the reference. Then `raw_scores` [S], without it, say which groups are
equal: of responses that are equally good, the standard deviation of `scores` is that of the penalty's noise.

Results do not depend, to the last bit, on the order of the responses or on the numbers of the groups.
"""

from collections.abc import Callable

from megarl.algorithms.advantages import discounted_to_go
from megarl.algorithms.packed import (
    broadcast_to_tokens,
    require_same_shape,
    response_tokens,
    sums_by_sequence,
    token_sequences,
    turn_numbers,
)
from megarl.deferred import Tensor, no_grad, torch

EPSILON = 1e-6  # added to a group's standard deviation, as in verl and slime


@no_grad
def centred(scores: Tensor, groups: Tensor, raw_scores: Tensor | None = None) -> Tensor:
    """R_i − mean_G: Dr. GRPO (arXiv 2503.20783, §3.2), the first step of REINFORCE++-baseline (arXiv 2501.03262)."""
    sizes = group_sizes(scores, groups)
    means = (_sums(scores, groups, sizes) / sizes.clamp(min=1))[groups]
    return _with_exact_zeros(scores - means, scores if raw_scores is None else raw_scores, groups, sizes)


@no_grad
def grpo(scores: Tensor, groups: Tensor, std: bool = True, raw_scores: Tensor | None = None) -> Tensor:
    """(R_i − mean_G) / (std_G + ε): GRPO (DeepSeekMath, arXiv 2402.03300, §4.1.2); without `std` the numerator alone.

    The variance is unbiased: the squares are divided by |G| − 1. Without the division: Dr. GRPO (arXiv 2503.20783).
    """
    deviations = centred(scores, groups, raw_scores)
    if not std:
        return deviations
    return deviations / (_deviations(scores, groups, group_sizes(scores, groups), raw_scores) + EPSILON)


@no_grad
def rloo(scores: Tensor, groups: Tensor, raw_scores: Tensor | None = None) -> Tensor:
    """R_i − mean of the others' R: REINFORCE leave-one-out (Back to Basics, arXiv 2402.14740).

    Computed as |G|/(|G| − 1) · (R_i − mean_G), which is equal.
    """
    sizes = group_sizes(scores, groups).to(scores.dtype)
    factors = torch.where(sizes > 1, sizes / (sizes - 1).clamp(min=1), 1.0)[groups]
    return factors * centred(scores, groups, raw_scores)


@no_grad
def opo(scores: Tensor, groups: Tensor, response_lengths: Tensor, raw_scores: Tensor | None = None) -> Tensor:
    """R_i − Σ|o|R / Σ|o| over the group: the length-weighted baseline of OPO (arXiv 2505.23585).

    Args:
        response_lengths: [S] |o|, response tokens. A group whose responses are all empty gets 0.
    """
    if response_lengths.shape != scores.shape:
        raise ValueError(f"response_lengths must be {list(scores.shape)}, got {list(response_lengths.shape)}")
    sizes = group_sizes(scores, groups)
    lengths = response_lengths.to(scores.dtype)
    total = _sums(lengths, groups, sizes)
    baselines = (_sums(lengths * scores, groups, sizes) / total.clamp(min=1))[groups]
    advantages = torch.where(total[groups] > 0, scores - baselines, 0.0)
    return _with_exact_zeros(advantages, scores if raw_scores is None else raw_scores, groups, sizes)


@no_grad
def maxrl(scores: Tensor, groups: Tensor, raw_scores: Tensor | None = None) -> Tensor:
    """(R_i − mean_G) / mean_G: MaxRL (arXiv 2602.02710), for rewards of 0 or more; the rarer success is, the more it
    counts. A group whose mean is 0 or less has advantages of 0.
    """
    sizes = group_sizes(scores, groups)
    means = (_sums(scores, groups, sizes) / sizes.clamp(min=1))[groups]
    own = centred(scores, groups, raw_scores)
    return torch.where(means > 0, own / torch.where(means > 0, means, 1.0), 0.0)


@no_grad
def best_of_group(scores: Tensor, groups: Tensor, std: bool = True, raw_scores: Tensor | None = None) -> Tensor:
    """max(0, R_i − max of the others' R): what the response adds to the best of its group.

    The leave-one-out baseline of the best of k responses, k the size of the group (arXiv 2503.19595, §3.2): only a
    single best response has an advantage. With `std` it is divided by the group's deviation, as in `grpo`.
    """
    sizes = group_sizes(scores, groups)

    def largest(values: Tensor) -> Tensor:
        return values.new_full(sizes.shape, -torch.inf).scatter_reduce(0, groups, values, "amax")[groups]

    best = largest(scores)
    is_best = scores == best
    number = torch.zeros_like(sizes).index_add_(0, groups, is_best.long())[groups]
    margin = best - largest(scores.masked_fill(is_best, -torch.inf))
    advantages = torch.where(is_best & (number == 1) & margin.isfinite(), margin, 0.0)
    if std:
        advantages = advantages / (_deviations(scores, groups, sizes, raw_scores) + EPSILON)
    return _with_exact_zeros(advantages, scores if raw_scores is None else raw_scores, groups, sizes)


def _deviations(scores: Tensor, groups: Tensor, sizes: Tensor, raw_scores: Tensor | None) -> Tensor:
    """[S] the unbiased standard deviation of each response's group."""
    squares = _sums(centred(scores, groups, raw_scores).square(), groups, sizes)
    return (squares / (sizes - 1).clamp(min=1)).sqrt()[groups]


def unequal_groups(raw_scores: Tensor, groups: Tensor) -> Tensor:
    """[S] bool: whether the response is in a group with different scores."""
    sizes = group_sizes(raw_scores, groups)
    return _with_exact_zeros(torch.ones_like(raw_scores), raw_scores, groups, sizes) > 0


def group_sizes(scores: Tensor, groups: Tensor) -> Tensor:
    """[G] int64 responses of each group; 0 for an unused number."""
    if scores.dim() != 1 or scores.shape != groups.shape:
        raise ValueError(f"scores and groups must both be [S], got {list(scores.shape)} and {list(groups.shape)}")
    number = int(groups.max()) + 1 if groups.numel() else 0
    return torch.zeros(number, dtype=torch.int64, device=groups.device).index_add_(0, groups, torch.ones_like(groups))


def _sums(values: Tensor, groups: Tensor, sizes: Tensor) -> Tensor:
    """[G] sum of `values` [S] over each group, bitwise the same for every order of the responses.

    Each group becomes a row of sorted values, and the rows are summed: an atomic index_add has no fixed order, so two
    ranks could get different means. Allocates G · (largest group) elements.
    """
    order = values.argsort()
    order = order[groups[order].argsort(stable=True)]
    row_index = groups[order]
    first = sizes.cumsum(0) - sizes
    column_index = torch.arange(order.numel(), device=order.device) - first[row_index]
    rows = values.new_zeros(sizes.numel(), int(sizes.max()) if sizes.numel() else 0)
    rows[row_index, column_index] = values[order]
    return rows.sum(1)


def _with_exact_zeros(advantages: Tensor, scores: Tensor, groups: Tensor, sizes: Tensor) -> Tensor:
    """`advantages` with exact zeros in groups of equal scores."""
    lowest = scores.new_full(sizes.shape, torch.inf).scatter_reduce(0, groups, scores, "amin")
    highest = scores.new_full(sizes.shape, -torch.inf).scatter_reduce(0, groups, scores, "amax")
    return torch.where((lowest == highest)[groups], 0.0, advantages)


# -- baselines by position -----------------------------------------------------------------------------------------
# One for each turn of an episode, or for each token position of a response.
#
# By turns, the advantage of turn k of episode i is G_ik − mean of G_jk over the *other* episodes j of the group, where
# G_ik is the sum of the rewards of turn k and all later ones, and 0 for an episode that has ended before turn k. The
# others do not depend on the actions of episode i, so the baseline leaves the expected policy gradient as it is
# (Reinforcement Learning: An Introduction, 2nd ed., §13.4). Statistics over the episodes that reached turn k, and a
# division by the deviation at each turn, do not.
#
# By token positions, the baseline is the group's mean return, weighted by what varies the gradient (OTB).


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
    """[S, K] advantages of turns, `rloo` for each turn, with its exact zeros for equal returns.

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
