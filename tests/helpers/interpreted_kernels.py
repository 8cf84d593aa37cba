"""Triton's interpreter, made to compute what a CUDA device does where it differs."""

import types

import numpy as np
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle


def multiply_rows_alone(monkeypatch):
    """Makes a row's product independent of its place, as on a device: BLAS's, which the interpreter calls, is not."""

    def product(self, a, b, d, *_):
        exact = np.matmul(a.data.astype(np.float64), b.data.astype(np.float64))
        return TensorHandle(exact.astype(d.data.dtype) + d.data, d.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", product)


def use_one_unit(monkeypatch):
    """Makes Megatron's products run as one program: there is no device whose multiprocessors they could count."""
    from megatron.core.transformer.custom_layers import batch_invariant_kernels

    monkeypatch.setattr(batch_invariant_kernels, "get_compute_units", lambda: 1)


def exact_config() -> types.SimpleNamespace:
    """What kernels read of the config of a model of an exact rollout."""
    return types.SimpleNamespace(exact_rollout=True)
