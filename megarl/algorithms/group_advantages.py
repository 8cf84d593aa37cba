"""Advantages of responses from the other responses to the same prompt: one number a response, no critic.

Every function takes `scores` [S] and `groups` [S] (int64, 0 … G−1 in any order, groups of any size, numbers may be
missing) and gives [S] in the dtype of `scores`, without gradient. Two rules hold for all of them:

* a group of one has nothing to compare with: its advantage is exactly 0;
* a group of equal scores has nothing to learn from: exactly 0, where a rounded mean would leave a remainder that a
  division by a tiny standard deviation blows up.

Bits do not depend on the order of the responses, nor on which number a group has. `lone_scores` gives a group of one
its score instead, as if it stood against a baseline of 0: what verl 0.9.1 does.
"""

import torch
from torch import Tensor


@torch.no_grad()
def centred(scores: Tensor, groups: Tensor, lone_scores: bool = False) -> Tensor:
    """R_i − mean_G: Dr. GRPO (arXiv 2503.20783, §3.2), and the first step of REINFORCE++-baseline (arXiv 2501.03262).

    Raises:
        ValueError: shapes differ.
    """
    sizes = _sizes(scores, groups)
    means = (_sums(scores, groups, sizes) / sizes.clamp(min=1))[groups]
    return _checked(scores - means, scores, groups, sizes, lone_scores)


@torch.no_grad()
def grpo(
    scores: Tensor,
    groups: Tensor,
    std: bool = True,
    ddof: int = 1,
    epsilon: float = 1e-6,
    lone_scores: bool = False,
) -> Tensor:
    """(R_i − mean_G) / (std_G + ε): GRPO (DeepSeekMath, arXiv 2402.03300, §4.1.2); without `std` the numerator alone.

    Args:
        std: False leaves the division out: Dr. GRPO (arXiv 2503.20783).
        ddof: 1 divides the squares by |G| − 1, 0 by |G|.
        epsilon: ε ≥ 0, outside the root.
        lone_scores: see above; a group of one then gets R/(1 + ε).

    Conventions of others: verl and slime have ddof 1 and ε 1e-6 (the defaults), TRL ddof 1 and 1e-4, Megatron-LM
    ddof 0 and 1e-4.

    Raises:
        ValueError: shapes differ, ddof is neither 0 nor 1, or ε is negative.
    """
    if ddof not in (0, 1) or not epsilon >= 0:
        raise ValueError(f"ddof must be 0 or 1 and epsilon >= 0, got {ddof} and {epsilon}")
    deviations = centred(scores, groups, lone_scores)
    if not std:
        return deviations
    sizes = _sizes(scores, groups)
    deviation = (_sums(deviations.square(), groups, sizes) / (sizes - ddof).clamp(min=1)).sqrt()
    deviation = torch.where(sizes == 1, 1.0, deviation)[groups]
    # Where all scores are equal and ε is 0 this is 0/0; the rule says 0.
    return torch.where(deviations == 0, 0.0, deviations / (deviation + epsilon))


@torch.no_grad()
def rloo(scores: Tensor, groups: Tensor, lone_scores: bool = False) -> Tensor:
    """R_i − mean of the others' R: REINFORCE leave-one-out (Back to Basics, arXiv 2402.14740).

    Equal to |G|/(|G| − 1) · (R_i − mean_G), which is how it is computed.

    Raises:
        ValueError: shapes differ.
    """
    sizes = _sizes(scores, groups).to(scores.dtype)
    factors = torch.where(sizes > 1, sizes / (sizes - 1).clamp(min=1), 1.0)[groups]
    return factors * centred(scores, groups, lone_scores)


@torch.no_grad()
def opo(scores: Tensor, groups: Tensor, response_lengths: Tensor, lone_scores: bool = False) -> Tensor:
    """R_i − Σ|o|R / Σ|o| over the group: the length-weighted baseline of OPO (arXiv 2505.23585).

    Args:
        response_lengths: [S] |o|, tokens that the policy wrote. A group whose responses are all empty gets 0.

    Raises:
        ValueError: shapes differ.
    """
    if response_lengths.shape != scores.shape:
        raise ValueError(f"response_lengths must be {list(scores.shape)}, got {list(response_lengths.shape)}")
    sizes = _sizes(scores, groups)
    lengths = response_lengths.to(scores.dtype)
    total = _sums(lengths, groups, sizes)
    baselines = (_sums(lengths * scores, groups, sizes) / total.clamp(min=1))[groups]
    advantages = torch.where(total[groups] > 0, scores - baselines, 0.0)
    return _checked(advantages, scores, groups, sizes, lone_scores)


def _sizes(scores: Tensor, groups: Tensor) -> Tensor:
    """[G] int64 responses of each group; 0 for a number that is not used."""
    if scores.dim() != 1 or scores.shape != groups.shape:
        raise ValueError(f"scores and groups must both be [S], got {list(scores.shape)} and {list(groups.shape)}")
    number = int(groups.max()) + 1 if groups.numel() else 0
    return torch.zeros(number, dtype=torch.int64, device=groups.device).index_add_(0, groups, torch.ones_like(groups))


def _sums(values: Tensor, groups: Tensor, sizes: Tensor) -> Tensor:
    """[G] sum of `values` [S] over each group, the same bits for every order of the responses.

    Each group becomes a row, its values sorted, and the rows are summed: an atomic index_add would add in the order
    in which threads arrive, and two ranks could disagree about one mean. Takes G · largest group numbers.
    """
    order = values.argsort()
    order = order[groups[order].argsort(stable=True)]
    rows_of = groups[order]
    first = sizes.cumsum(0) - sizes
    places = torch.arange(order.numel(), device=order.device) - first[rows_of]
    rows = values.new_zeros(sizes.numel(), int(sizes.max()) if sizes.numel() else 0)
    rows[rows_of, places] = values[order]
    return rows.sum(1)


def _checked(advantages: Tensor, scores: Tensor, groups: Tensor, sizes: Tensor, lone_scores: bool) -> Tensor:
    """`advantages` with exact zeros in groups of equal scores, those of one included unless `lone_scores`."""
    lowest = scores.new_full(sizes.shape, torch.inf).scatter_reduce(0, groups, scores, "amin")
    highest = scores.new_full(sizes.shape, -torch.inf).scatter_reduce(0, groups, scores, "amax")
    advantages = torch.where((lowest == highest)[groups], 0.0, advantages)
    return torch.where((sizes == 1)[groups], scores, advantages) if lone_scores else advantages
