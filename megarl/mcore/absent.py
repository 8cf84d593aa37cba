"""Imports without packages that Megatron would load and megarl does not use: seconds of a program's start."""

import contextlib
import sys
from collections.abc import Iterator

TRACKERS = ("torch.utils.tensorboard", "wandb")


@contextlib.contextmanager
def absent(*names: str) -> Iterator[None]:
    """Context in which importing these modules raises ImportError, as if they were not installed. Modules that have
    been imported already stay."""
    hidden = [name for name in names if sys.modules.setdefault(name, None) is None]
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]
