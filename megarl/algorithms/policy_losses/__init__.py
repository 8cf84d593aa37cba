"""The policy losses by name. Every file in this folder is discovered and imported.

A file has the losses of one kind and `LOSSES`, a tuple of one or more `PolicyLoss`. Their options become flags
(`PolicyLoss.flags`).
"""

import dataclasses
import importlib
import pkgutil
import types
import typing
from collections.abc import Callable

from megarl.algorithms.policy_loss import ClipOptions, PolicyLoss, PolicyTerms, PolicyTokens

KINDS = (int, float, bool, str)  # types of an option; each may also be None


def discover() -> dict[str, PolicyLoss]:
    """The losses of all files in this folder, by name, in alphabetical order.

    Raises:
        ValueError: a file without `LOSSES`, or a duplicate name.
    """
    losses = {}
    for entry in pkgutil.iter_modules(__path__):
        module = importlib.import_module(f"{__name__}.{entry.name}")
        if not hasattr(module, "LOSSES"):
            raise ValueError(f"{module.__file__}: defines no LOSSES, a tuple of PolicyLoss")
        for loss in module.LOSSES:
            if loss.name in losses:
                raise ValueError(f"{module.__file__}: a policy loss called {loss.name} already exists")
            option_kinds(loss)
            losses[loss.name] = loss
    return dict(sorted(losses.items()))


def option_kinds(loss: PolicyLoss) -> dict[str, type]:
    """The type of each flag's values. ValueError for a type that a flag cannot have."""
    hints, types_by_flag = typing.get_type_hints(type(loss.options)), {}
    for flag, field in loss.flags().items():
        hint = hints[field.name]
        kinds = typing.get_args(hint) if typing.get_origin(hint) in (types.UnionType, typing.Union) else (hint,)
        kinds = [kind for kind in kinds if kind is not types.NoneType]
        if len(kinds) != 1 or kinds[0] not in KINDS:
            raise ValueError(f"option {field.name} of {loss.name} is {hint}; allowed: int, float, bool, str, or | None")
        types_by_flag[flag] = kinds[0]
    return types_by_flag


def policy_loss_of(name: str, function: Callable[[PolicyTokens, object], PolicyTerms]) -> PolicyLoss:
    """Wrap a plug-in policy loss.

    Its attribute `options`, a dataclass whose fields all have defaults, defines its options; the default is
    `ClipOptions`. An attribute `reads_rollout` says that its ratio is to the rollout's policy.

    Raises:
        ValueError: an invalid `options`.
    """
    kind = getattr(function, "options", ClipOptions)
    if not (isinstance(kind, type) and dataclasses.is_dataclass(kind)):
        raise ValueError(f"options of {name} must be a dataclass, not {kind!r}")
    fields, missing = dataclasses.fields(kind), dataclasses.MISSING
    without = [field.name for field in fields if field.default is missing and field.default_factory is missing]
    if without:
        raise ValueError(f"options of {name} need defaults: {', '.join(without)}")
    loss = PolicyLoss(name, function, kind(), bool(getattr(function, "reads_rollout", False)))
    option_kinds(loss)
    return loss


POLICY_LOSSES: dict[str, PolicyLoss] = discover()
