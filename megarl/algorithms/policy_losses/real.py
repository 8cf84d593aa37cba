"""REAL: verdicts are labels, and the responses of a group are classified by how far the policy has moved on them."""

import dataclasses

from megarl.algorithms.packed import broadcast_to_tokens, response_counts, sums_by_sequence
from megarl.algorithms.policy_loss import (
    MinibatchResponses,
    NoOptions,
    PolicyLoss,
    PolicyTerms,
    PolicyTokens,
    positive,
)
from megarl.algorithms.policy_losses.reinforce import reinforce
from megarl.deferred import Tensor, torch

_EXPONENT_LIMIT = 500.0  # of s/τ: sums of any number of responses stay finite in float64


@dataclasses.dataclass(frozen=True)
class RealOptions:
    """How sharp the classification is."""

    tau: float = positive(0.5, "temperature τ of a response's mean log-ratio (2602.05630 and its code)")


def real(tokens: PolicyTokens, options: RealOptions) -> PolicyTerms:
    """−A·log π_θ with the advantages of `compare`: under `seq-mean-token-mean` the gradient is REAL's."""
    return reinforce(tokens, NoOptions())


def compare(responses: MinibatchResponses, options: RealOptions) -> Tensor:
    """[T] A = ±(G/τ)·e^{∓s/τ} / (1 + Σ e^{∓s/τ}), + for good responses, − for bad ones, Σ over those of the same kind.

    The gradient of the mean over groups of log(1 + Σ₊ e^{−s/τ}) + log(1 + Σ₋ e^{s/τ}), s the mean of log π_θ/π_old
    over a response: REAL (arXiv 2602.05630). Good and bad are the signs of the estimator's advantages, so of verdicts
    the labels are those of the paper; G is the number of the group's responses with tokens. As in the paper's code, a
    group without both kinds has no gradient, but counts in the mean.
    """
    where = responses.mask, responses.cu_seqlens
    counts = response_counts(*where)
    means = [sums_by_sequence(x.double(), *where) / counts.clamp(min=1) for x in responses[:2]]
    scores, signs = means[0] / options.tau, means[1].sign()
    weights = (-signs * scores).clamp(-_EXPONENT_LIMIT, _EXPONENT_LIMIT).exp()
    kinds = torch.stack([signs > 0, signs < 0, counts > 0]).double()
    columns = torch.cat([kinds, kinds[:2] * weights])
    table = columns.new_zeros(len(columns), responses.group_count).index_add_(1, responses.groups, columns)
    good, bad, size, sum_of_good, sum_of_bad = responses.total(table)[:, responses.groups]
    sums = torch.where(signs > 0, sum_of_good, sum_of_bad)
    factors = torch.where((good > 0) & (bad > 0), size / options.tau * weights / (1 + sums), 0.0)
    return broadcast_to_tokens(signs * factors, *where).to(responses.advantages.dtype)


LOSSES = (PolicyLoss("real", real, RealOptions(), compare=compare),)
