"""The policy losses by name, and how a loss of one's own joins them."""

from collections.abc import Callable
from typing import NamedTuple

from megarl.algorithms.policy_loss import ClipOptions, PolicyTerms, PolicyTokens, cispo, ppo_clip, reinforce, sapo
from megarl.algorithms.sequence_loss import gmpo, gspo, gspo_token


class PolicyLoss(NamedTuple):
    """A policy loss and the fields of `ClipOptions` that it reads; flags behind the others have no effect on it."""

    function: Callable[[PolicyTokens, ClipOptions], PolicyTerms]
    options: frozenset[str]


_RANGE = frozenset({"low", "high"})

POLICY_LOSSES: dict[str, PolicyLoss] = {
    "ppo-clip": PolicyLoss(ppo_clip, _RANGE | {"dual"}),
    "gspo": PolicyLoss(gspo, _RANGE),
    "gspo-token": PolicyLoss(gspo_token, _RANGE),
    "cispo": PolicyLoss(cispo, _RANGE),
    "gmpo": PolicyLoss(gmpo, _RANGE),
    "reinforce": PolicyLoss(reinforce, frozenset()),
    "sapo": PolicyLoss(sapo, frozenset()),
}


def policy_loss_of(function: Callable[[PolicyTokens, ClipOptions], PolicyTerms]) -> PolicyLoss:
    """Wrap a policy loss from outside; it may read every option."""
    return PolicyLoss(function, _RANGE | {"dual"})
