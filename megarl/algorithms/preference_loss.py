"""Inputs and outputs of preference losses, and Bradley and Terry's model, which reward models and policies share.

The losses of a policy are in `preference_losses.py`. Log-probs of responses are sums in float64, so that a long
response loses no digits of a difference.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

from megarl.algorithms.packed import require_same_shape
from megarl.deferred import Tensor, torch


def bradley_terry(chosen: Tensor, rejected: Tensor, margin: Tensor, centring: float = 0.0) -> Tensor:
    """−log σ(c − r − m) + κ·(c + r)² of each pair: Bradley and Terry's model of preferences (2203.02155 eq. 1).

    The margin m requires a larger difference where the preference is strong (2307.09288 eq. 2). Only differences of
    scores enter the first term; κ pulls their mean to 0 (2312.09244 eq. 2).

    Args:
        chosen: [P] scores c of the preferred responses.
        rejected: [P] scores r of the others.
        margin: [P] m ≥ 0; a constant.
        centring: κ ≥ 0.

    Returns:
        [P] terms, differentiable in the scores; log 2 where both scores are equal and m and κ are 0.

    Raises:
        ValueError: shapes differ.
    """
    require_same_shape(chosen=chosen, rejected=rejected, margin=margin)
    terms = -torch.nn.functional.logsigmoid(chosen - rejected - margin.detach())
    return terms + centring * (chosen + rejected).square() if centring else terms


@dataclasses.dataclass(frozen=True)
class PairLogprobs:
    """A preference loss's input: P pairs, all fields [P]. ValueError when shapes differ."""

    chosen: Tensor  # float64 Σ log π over the tokens of the preferred response; differentiable
    rejected: Tensor  # of the other; differentiable
    chosen_tokens: Tensor  # tokens of the preferred response, at least 1
    rejected_tokens: Tensor
    reference_chosen: Tensor  # float64 Σ log π_ref; 0 for losses that need no reference
    reference_rejected: Tensor
    margin: Tensor  # m ≥ 0 by which the preferred response should be better

    def __post_init__(self):
        require_same_shape(**vars(self))


class PreferenceOptions(NamedTuple):
    """The options of preference losses; each loss reads its own."""

    beta: float = 0.1  # β > 0, scale of the implicit rewards
    label_smoothing: float = 0.0  # ε in [0, ½): probability that a label is wrong
    gamma: float = 1.0  # γ ≥ 0: difference that SimPO asks for
    coefficient: float = 1.0  # ≥ 0: weight of the second term of ORPO and RPO
    desirable_weight: float = 1.0  # > 0: λ_D of KTO
    undesirable_weight: float = 1.0  # > 0: λ_U of KTO


class PreferenceTerms(NamedTuple):
    """Terms of a preference loss, and the rewards that a policy gives implicitly; all [P]."""

    loss: Tensor  # differentiable in the log-probs
    chosen_reward: Tensor  # no gradient
    rejected_reward: Tensor  # no gradient


class PreferenceLoss(NamedTuple):
    """A preference loss, its name in `--preference-loss`, and what it reads."""

    name: str
    function: Callable[..., Any]  # of `PairLogprobs` and `PreferenceOptions` to `PreferenceTerms`, if it reads pairs
    options: frozenset[str]  # fields of `PreferenceOptions`
    needs_reference: bool = True
    reads_pairs: bool = True
    reads_margin: bool = False
    defaults: PreferenceOptions = PreferenceOptions()


# What is measured of pairs, in the order of `pair_metrics`.
PAIR_METRICS = (
    "loss", "accuracy", "margin", "chosen_reward", "rejected_reward", "chosen_logprob", "rejected_logprob"
)  # fmt: skip


def pair_metrics(pairs: PairLogprobs, terms: PreferenceTerms) -> list[Tensor]:
    """[P] float64 each of `PAIR_METRICS`, without gradient."""
    won, lost = terms.chosen_reward, terms.rejected_reward
    return [
        terms.loss.detach(), (won > lost).double(), won - lost, won, lost, pairs.chosen.detach(),
        pairs.rejected.detach(),
    ]  # fmt: skip
