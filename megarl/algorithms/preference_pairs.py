"""Online preference learning: the best and the worst response of each group are a pair, as in online DPO (2402.04792).

A preference loss depends on the policy by the log-probs of whole responses, so its gradient is Σ_i c_i · ∇ log π(y_i)
with c_i = ∂L/∂ log π(y_i). The plain policy gradient with the advantages −c_i is therefore the gradient of the loss,
at the policy whose log-probs the c_i are computed from: exact for the first update after them.
"""

from typing import NamedTuple

from megarl.algorithms.group_advantages import group_sizes
from megarl.algorithms.preference_losses import (
    PAIR_METRICS,
    PairLogprobs,
    PreferenceLoss,
    PreferenceOptions,
    pair_metrics,
)
from megarl.deferred import Tensor, torch


class GroupPairs(NamedTuple):
    """Pairs of responses by their index in the step."""

    chosen: Tensor  # [P] int64, the best response of a group
    rejected: Tensor  # [P] int64, the worst one
    ties: int  # groups of several responses whose scores are all equal: they have no pair


def best_and_worst(scores: Tensor, groups: Tensor) -> GroupPairs:
    """The pair of each group, from scores [S] and groups [S] as of `group_advantages`; the first response counts where
    several are the best or the worst."""
    sizes, positions = group_sizes(scores, groups), torch.arange(len(scores), device=scores.device)
    extremes, firsts = [], []
    for kind, start in (("amax", -torch.inf), ("amin", torch.inf)):
        extreme = scores.new_full(sizes.shape, start).scatter_reduce(0, groups, scores, kind)
        candidates = torch.where(scores == extreme[groups], positions, len(scores))
        firsts.append(positions.new_full(sizes.shape, len(scores)).scatter_reduce(0, groups, candidates, "amin"))
        extremes.append(extreme)
    differ = extremes[0] > extremes[1]
    return GroupPairs(firsts[0][differ], firsts[1][differ], int(((sizes > 1) & ~differ).sum()))


def pair_gradient(
    pairs: GroupPairs,
    logprobs: Tensor,
    reference: Tensor,
    tokens: Tensor,
    loss: PreferenceLoss,
    options: PreferenceOptions,
) -> tuple[Tensor, Tensor, dict[str, float]]:
    """The gradient [P] float64 of a preference loss, as a mean over the pairs, by the Σ log π of the chosen and of the
    rejected response; means of `PAIR_METRICS`, without pairs none, and the number of pairs and ties.

    Args:
        logprobs: [S] float64 Σ log π over the tokens of each response.
        reference: [S] float64 Σ log π_ref; not read by losses without a reference.
        tokens: [S] int64 tokens of each response; at least 1 in a pair.
    """
    count = len(pairs.chosen)
    found = {"pairs": float(count), "ties": float(pairs.ties)}
    with torch.enable_grad():
        chosen, rejected = (logprobs[at].detach().requires_grad_() for at in (pairs.chosen, pairs.rejected))
        of_pairs = PairLogprobs(
            chosen=chosen,
            rejected=rejected,
            chosen_tokens=tokens[pairs.chosen].double(),
            rejected_tokens=tokens[pairs.rejected].double(),
            reference_chosen=reference[pairs.chosen],
            reference_rejected=reference[pairs.rejected],
            margin=torch.zeros_like(chosen),
        )
        terms = loss.function(of_pairs, options)
        by_chosen, by_rejected = torch.autograd.grad(terms.loss.sum() / max(count, 1), (chosen, rejected))
    if count:
        means = torch.stack(pair_metrics(of_pairs, terms)).mean(1).tolist()
        found |= dict(zip(PAIR_METRICS, means, strict=True))
    return by_chosen, by_rejected, found
