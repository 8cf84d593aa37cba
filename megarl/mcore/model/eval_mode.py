"""Evaluation mode of models that are trained in between."""

import contextlib
from collections.abc import Iterator

from torch.nn import Module


@contextlib.contextmanager
def eval_mode(model: Module) -> Iterator[None]:
    """Context with the model in evaluation mode, and in its own mode afterwards.

    Changing the mode visits every module, so a model that is in evaluation mode, such as a frozen one, is left alone.
    """
    if not model.training:
        yield
        return
    model.eval()
    try:
        yield
    finally:
        model.train()
