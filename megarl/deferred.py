"""torch for modules that the parsing of flags imports: it is loaded at its first use, since a wrong flag needs none.

    from megarl.deferred import Tensor, no_grad, torch

Loading torch takes seconds, reading the names of losses and estimators milliseconds. `Tensor` is for annotations alone.
"""

import functools
import importlib
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    Tensor = Any

    class _Torch:
        """Loads torch when one of its attributes is read."""

        def __getattr__(self, name):
            return getattr(importlib.import_module("torch"), name)

    torch = _Torch()


def no_grad(function: F) -> F:
    """`torch.no_grad()` as a decorator."""

    @functools.wraps(function)
    def without_gradient(*args, **kwargs):
        with torch.no_grad():
            return function(*args, **kwargs)

    return without_gradient  # type: ignore[return-value]


def has_met() -> bool:
    """Whether this process has joined a process group. Loads nothing."""
    return "torch" in sys.modules and torch.distributed.is_initialized()
