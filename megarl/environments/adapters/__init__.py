"""Adapters to environments of other packages, each imported only where its environment is used."""

import importlib
from types import ModuleType

from megarl.errors import UsageError


def optional(module: str, package: str, what: str) -> ModuleType:
    """A module of an optional package. UsageError that says how to install it; `what` needs it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        reason = " ".join(str(error).split())
        raise UsageError(f"{what} needs the package {package} ({reason}): pip install '{package}'") from None
