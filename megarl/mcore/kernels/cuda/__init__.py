"""Kernels for CUDA devices, written in Triton. Imported only where one of them runs: a CPU needs no Triton."""

from collections.abc import Callable

import torch


def operator(name: str, fake: Callable, mutates: tuple[str, ...] = ()) -> Callable:
    """Makes a function the operator `megarl::NAME`; `fake`: its results, without values; `mutates`: what it changes."""

    def register(function: Callable) -> Callable:
        found = torch.library.custom_op(f"megarl::{name}", function, mutates_args=mutates)
        found.register_fake(fake)
        return found

    return register
