"""Model families: each is a `Family` in a module of this folder, beside its relatives."""

import functools
import importlib
import pkgutil

from megarl.mcore.weights.hf.family import Family


@functools.cache
def families() -> dict[str, Family]:
    """All families by `model_type`, in its order."""
    modules = (importlib.import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__))
    found = [value for module in modules for value in vars(module).values() if isinstance(value, Family)]
    return {family.model_type: family for family in sorted(found, key=lambda family: family.model_type)}
