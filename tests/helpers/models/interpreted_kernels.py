"""Triton's interpreter, made to compute what a CUDA device does where it differs."""

import importlib
import sys
import types
from collections.abc import Callable

import numpy as np
import triton
from triton.runtime.autotuner import Autotuner
from triton.runtime.interpreter import InterpreterBuilder, ReduceOps, TensorHandle


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


class _Number(int):
    """A number of a loop, with the method that a device's has."""

    def to(self, _kind) -> "_Number":
        return self


def interpret_package(replace: Callable[[object, str, object], None], name: str):
    """Makes the kernels of flash-linear-attention, the package with this name, run here: the first of a kernel's
    variants, which a device would choose by times; loops over numbers that are loaded or converted; arithmetic of bf16.

    `replace`: sets an attribute, as `setattr` does.
    """
    run = Autotuner.run

    def run_first(self, *args, **kwargs):
        replace(self, "configs", self.configs[:1])
        return run(self, *args, **kwargs)

    def numbers(*limits):
        whole = (limit if isinstance(limit, int) else int(limit.handle.data.item()) for limit in limits)
        return map(_Number, range(*whole))

    for module in ("ops.gated_delta_rule", "modules.causal_conv1d"):
        importlib.import_module(f"{name}.{module}")
    replace(Autotuner, "run", run_first)
    for module in [module for key, module in sys.modules.items() if key.startswith(f"{name}.")]:
        replace(module, "range", numbers)
    _compute_bf16(replace)


def _compute_bf16(replace):
    """Arithmetic of bf16 in fp32, and rounded. The interpreter takes such numbers for whole ones, and cuts them off
    where it converts fp32."""
    binary, unary, total = InterpreterBuilder.binary_op, InterpreterBuilder.unary_op, ReduceOps.sum
    cast = InterpreterBuilder.cast_impl

    def binary_op(self, left, right, op):
        if not _is_bf16(left) or not _is_bf16(right):
            return binary(self, left, right, op)
        found = op(_values(left), _values(right))
        is_number = found.dtype == np.float32  # else a comparison
        return TensorHandle(_bits(found) if is_number else found, left.dtype.scalar)

    def unary_op(self, x, op):
        return TensorHandle(_bits(op(_values(x))), x.dtype.scalar) if _is_bf16(x) else unary(self, x, op)

    def product(self, a, b, d, *_):
        return TensorHandle(np.matmul(_values(a), _values(b), dtype=d.data.dtype) + d.data, d.dtype.scalar)

    def sum_of(self, input):
        if not _is_bf16(input.handle):
            return total(self, input)
        return self.to_tensor(_bits(_values(input.handle).sum(axis=self.axis, keepdims=self.keep_dims)), input.dtype)

    def cast_impl(self, source, kind):
        if source.dtype.scalar == triton.language.float32 and kind.scalar == triton.language.bfloat16:
            return TensorHandle(_bits(source.data), kind.scalar)
        return cast(self, source, kind)

    replace(InterpreterBuilder, "binary_op", binary_op)
    replace(InterpreterBuilder, "unary_op", unary_op)
    replace(InterpreterBuilder, "create_dot", product)
    replace(InterpreterBuilder, "cast_impl", cast_impl)
    replace(ReduceOps, "sum", sum_of)


def _is_bf16(handle) -> bool:
    return handle.dtype.scalar == triton.language.bfloat16


def _values(handle) -> np.ndarray:
    """The numbers of a handle; those of bf16 in fp32."""
    return (handle.data.astype(np.uint32) << 16).view(np.float32) if _is_bf16(handle) else handle.data


def _bits(values) -> np.ndarray:
    """Numbers rounded to bf16, to even; infinities and NaN stay such."""
    bits = np.asarray(values, dtype=np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isfinite(values), rounded, bits >> 16).astype(np.uint16)
