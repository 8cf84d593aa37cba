"""Which ranks generate ahead: with `--generation-lag S` they are S iterations ahead of the ranks that train.

The rollout leads, and so do the frozen roles on ranks without a trained role, but for a reference that is refreshed.
Nothing that a leading rank waits for within an iteration comes from a rank that trains, but for the weights of S steps
before.
"""

from megarl.arguments import RoleSettings, Settings
from megarl.errors import UsageError
from megarl.flags.distillation import SIBLING

_TRAINED = ("actor", "critic")
_FROZEN = ("reward", "reference", "teacher")


def _with_training(s: Settings) -> tuple[str, ...]:
    """Roles that keep pace with training: a refreshed reference needs a step's weights in the next."""
    return (*_TRAINED, "reference") if s.reference_update_interval else _TRAINED


def leading_ranks(s: Settings, roles: dict[str, RoleSettings]) -> set[int]:
    """The ranks of the rollout and of frozen roles without a rank of a role that keeps pace with training."""
    trained = {rank for name in _with_training(s) if name in roles for rank in roles[name].ranks}
    frozen = [set(roles[name].ranks) for name in _FROZEN if name in roles]
    return set(roles["rollout"].ranks).union(*(ranks for ranks in frozen if not ranks & trained))


def check(s: Settings, roles: dict[str, RoleSettings]):
    """UsageError if the ranks of some role cannot all have the same lead."""
    if not s.generation_lag or s.debug_train_only:
        return
    lag, leading = s.generation_lag, leading_ranks(s, roles)
    for name in _with_training(s):
        if name in roles and not leading.isdisjoint(roles[name].ranks):
            why = f" (--reference-update-interval {s.reference_update_interval})" if name == "reference" else ""
            raise UsageError(
                f"--generation-lag {lag}: needs a rollout in --role-map on other ranks than the {name}{why}"
            )
    for name in _FROZEN:
        ranks = set(roles[name].ranks) if name in roles else set()
        if ranks & leading and ranks - leading:
            raise UsageError(
                f"--generation-lag {lag}: the {name} shares ranks with the rollout and with a role that is trained; "
                "allowed in --role-map is one of the two"
            )
    needs_scores = {"--group-filter": s.group_filter != "none", "--pool-bounds": s.pool_bounds is not None,
                    "--greedy-baseline": s.greedy_baseline,
                    "--teacher-context": s.teacher_context == SIBLING}  # fmt: skip
    if any(needs_scores.values()) and not leading.issuperset(roles["reward"].ranks):
        names = " and ".join(name for name, is_set in needs_scores.items() if is_set)
        raise UsageError(
            f"--generation-lag {lag}: {names} needs the scores of a batch before it is trained on; put the reward in "
            "--role-map on other ranks than actor and critic"
        )
