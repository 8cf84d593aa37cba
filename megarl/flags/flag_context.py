"""A run as its flags describe it, and a rule about a combination of them."""

from typing import NamedTuple

from megarl.algorithms.estimators import Estimator
from megarl.algorithms.policy_loss import PolicyLoss
from megarl.flags.settings import Settings
from megarl.rewards.expression import Term


class FlagContext(NamedTuple):
    """A run as its flags describe it, before any model is built."""

    program: str
    settings: Settings
    roles: tuple[str, ...]
    estimator: Estimator
    policy_loss: PolicyLoss
    terms: tuple[Term, ...]  # of --reward

    @property
    def rewards(self) -> set[str]:
        """Names of the terms of `--reward`."""
        return {term.name for term in self.terms}


class FlagRule(NamedTuple):
    """A flag, whether its combination with others is valid, and the reason if it is not."""

    flag: str
    holds: bool
    reason: str

    def problem(self, settings: Settings) -> str:
        """The error of a broken rule: the flag with its value, and the reason."""
        return f"{self.flag} {getattr(settings, self.flag[2:].replace('-', '_'))}: {self.reason}"
