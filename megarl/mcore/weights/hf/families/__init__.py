"""Model families, one module each: a family is a new module in this folder that defines FAMILY."""

import functools
import importlib
import pkgutil

from megarl.mcore.weights.hf.family import Family


@functools.cache
def families() -> dict[str, Family]:
    """All families by `model_type`."""
    names = sorted(module.name for module in pkgutil.iter_modules(__path__))
    found = (importlib.import_module(f"{__name__}.{name}").FAMILY for name in names)
    return {family.model_type: family for family in found}
