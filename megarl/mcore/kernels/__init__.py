"""Compute kernels: linear layers, norms, SwiGLU, and vocabulary-parallel log-probabilities."""

from collections.abc import Callable

import torch
from torch.autograd.function import once_differentiable


def with_gradient(gradient: Callable) -> Callable:
    """Makes a function `(ctx, …) -> results` one that is called without ctx and is differentiable once.

    `gradient`: (ctx, gradients of the results) -> those of the arguments. Both are as the `forward` and `backward` of a
    `torch.autograd.Function`.
    """

    def make(function: Callable) -> Callable:
        methods = {"forward": staticmethod(function), "backward": staticmethod(once_differentiable(gradient))}
        kind: type[torch.autograd.Function] = type(function.__name__, (torch.autograd.Function,), methods)
        return kind.apply

    return make
