"""The policy losses by name. Each file of this folder is one; it is found by being there.

A file defines `LOSSES`, a tuple of `PolicyLoss`: most have one. Its options become flags (`PolicyLoss.flags`).
"""

import dataclasses
import importlib
import pkgutil
import types
import typing
from collections.abc import Callable

from megarl.algorithms.policy_loss import ClipOptions, PolicyLoss, PolicyTerms, PolicyTokens

KINDS = (int, float, bool, str)  # of an option, or these with None


def discover() -> dict[str, PolicyLoss]:
    """The losses of all files in this folder, by name. ValueError for a file without `LOSSES`, and for equal names."""
    found = {}
    for entry in sorted(pkgutil.iter_modules(__path__), key=lambda entry: entry.name):
        module = importlib.import_module(f"{__name__}.{entry.name}")
        if not hasattr(module, "LOSSES"):
            raise ValueError(f"{module.__file__}: defines no LOSSES, a tuple of PolicyLoss")
        for loss in module.LOSSES:
            if loss.name in found:
                raise ValueError(f"{module.__file__}: there is a policy loss called {loss.name} already")
            option_kinds(loss)
            found[loss.name] = loss
    return found


def option_kinds(loss: PolicyLoss) -> dict[str, type]:
    """Flag -> type of its values. ValueError for a type that a flag cannot have."""
    hints, found = typing.get_type_hints(type(loss.options)), {}
    for flag, field in loss.flags().items():
        hint = hints[field.name]
        kinds = typing.get_args(hint) if typing.get_origin(hint) in (types.UnionType, typing.Union) else (hint,)
        kinds = [kind for kind in kinds if kind is not types.NoneType]
        if len(kinds) != 1 or kinds[0] not in KINDS:
            raise ValueError(f"option {field.name} of {loss.name} is {hint}; allowed: int, float, bool, str, or | None")
        found[flag] = kinds[0]
    return found


def policy_loss_of(name: str, function: Callable[[PolicyTokens, object], PolicyTerms]) -> PolicyLoss:
    """Wrap a policy loss from outside.

    Its attribute `options`, a dataclass whose fields all have defaults, says which options it has; without one it takes
    `ClipOptions`. ValueError for other options.
    """
    kind = getattr(function, "options", ClipOptions)
    if not (isinstance(kind, type) and dataclasses.is_dataclass(kind)):
        raise ValueError(f"options of {name} must be a dataclass, not {kind!r}")
    without = [field.name for field in dataclasses.fields(kind)
               if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING]  # fmt: skip
    if without:
        raise ValueError(f"options of {name} need defaults: {', '.join(without)}")
    loss = PolicyLoss(name, function, kind())
    option_kinds(loss)
    return loss


POLICY_LOSSES: dict[str, PolicyLoss] = discover()
