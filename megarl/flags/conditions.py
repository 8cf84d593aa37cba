"""When flags go together: conditions under which a flag has an effect or is allowed, and rules that a run may break.

A field of the settings names its condition (`when=SAVED`: without it the flag has no effect, is dropped, and a warning
says so; `needs=SAVED`: without it the flag is refused). Everything else is in the `rules` of the topic. The conditions
here are those of several topics; the others are in the topic's file.
"""

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from megarl.rewards.expression import JUDGE, MODEL, Term

if TYPE_CHECKING:
    from megarl.algorithms.estimators import Estimator
    from megarl.algorithms.policy_loss import PolicyLoss

Broken = tuple[str, ...]  # a flag that breaks a rule, the reason, and the value to show if it is not the flag's


class FlagContext(NamedTuple):
    """A run as its flags describe it, before any model is built."""

    program: str
    settings: Any  # `Settings`, which are made of the topics' fields
    roles: tuple[str, ...]
    estimator: "Estimator"
    policy_loss: "PolicyLoss"
    terms: tuple[Term, ...]  # of --reward

    @property
    def rewards(self) -> set[str]:
        """Names of the terms of `--reward`."""
        return {term.name for term in self.terms}


@dataclasses.dataclass(frozen=True)
class Condition:
    """A condition on a run, and the reason why it does not hold."""

    holds: Callable[[FlagContext], bool]
    reason: str  # with {fields} of `Settings`
    first: "Condition | None" = None  # a condition that must hold, too, and whose reason comes first

    def why_not(self, run: FlagContext) -> str | None:
        """Why it does not hold; None if it does."""
        why = self.first.why_not(run) if self.first else None
        if why is None and not self.holds(run):
            why = self.reason.format_map(vars(run.settings))
        return why


def on(holds: Callable[[Any], object], reason: str) -> Condition:
    """A condition on megarl's own flags."""
    return Condition(lambda run: bool(holds(run.settings)), reason)


def _serves(run: FlagContext) -> bool:
    return run.program == "serve" or run.settings.serve_policy


def _thinks(run: FlagContext) -> bool:
    return _serves(run) or run.settings.thinking_budget is not None


SAVED = on(lambda s: s.save is not None, "needs --save")
ENGINE = on(lambda s: not s.debug_train_only, "--debug-train-only has no rollout engine")
TRAINED = on(lambda s: not s.debug_rollout_only, "--debug-rollout-only trains nothing")
EVALUATES = on(
    lambda s: not s.debug_train_only and not s.debug_rollout_only,
    "--debug-train-only and --debug-rollout-only evaluate nothing",
)
EVALUATION = Condition(lambda run: run.program == "evaluate" or run.settings.evaluates, "needs --eval-prompts")
ENVIRONMENT = on(lambda s: s.environment is not None, "needs --environment")
SERVES = Condition(_serves, "needs --serve-policy")
THINKS = Condition(_thinks, "needs --thinking-budget or --serve-policy")
TOOL_CALLS = Condition(
    lambda run: _thinks(run) or run.settings.environment is not None,
    "needs --environment, --serve-policy or --thinking-budget",
)

# Of the roles that a run may lack.
CRITIC = Condition(lambda run: "critic" in run.roles, "--advantage {advantage} needs no critic", first=TRAINED)
REFERENCE = Condition(
    lambda run: "reference" in run.roles, "--kl-coefficient is 0 and --role-map has no reference", first=TRAINED
)
TEACHER = Condition(lambda run: "teacher" in run.roles, "--distill is none", first=TRAINED)
REWARD_MODEL = Condition(lambda run: run.program == "reward" or MODEL in run.rewards, "--reward {reward} has no model")
SCORING_MODEL = Condition(
    lambda run: run.program == "reward" or bool(run.rewards & {MODEL, JUDGE}),
    "--reward {reward} has neither model nor judge",
)
OF_ROLES = {"critic": CRITIC, "reference": REFERENCE, "teacher": TEACHER, "reward": SCORING_MODEL}
