"""Triton's kernels on the emulated device: by references in PyTorch, or by Triton's interpreter; graphs repeat both."""

import functools

import operators  # type: ignore[import-not-found]
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from triton.runtime.interpreter import GridExecutor

_library = torch.library.Library("megarl", "IMPL")


def install(interprets: bool):
    """`interprets`: all kernels, else those that have no reference here."""
    from megarl.mcore.recurrence import fused_chunks
    from tests.helpers.models import interpreted_kernels

    GridExecutor.__call__ = _interpreted(GridExecutor.__call__)
    if fused_chunks.version() is not None:
        interpreted_kernels.interpret_package(setattr, "fla")
    if not interprets:
        _install_references()


def _interpreted(launch):
    @functools.wraps(launch)
    def call(self, *args, **kwargs):
        _check([*args, *kwargs.values()])
        # Nothing says what a kernel writes: all that it gets.
        written = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        args, kwargs = [_on_host(x) for x in args], {name: _on_host(x) for name, x in kwargs.items()}
        _launched(f"triton {self.fn.__name__}", [], written, lambda: launch(self, *args, **kwargs))

    return call


def _launched(name: str, read: list[Tensor], written: list[Tensor], run):
    """Runs a kernel, but not while a graph captures it: what it changes in place would change twice."""
    operators.launched(name, read, written, run)
    if not torch.cuda.is_current_stream_capturing():
        run()


def _check(values: list):
    if any(isinstance(value, Tensor) and not value.is_cuda for value in tree_leaves(values)):
        raise ValueError("Pointer argument cannot be accessed from Triton (cpu tensor?)")


def _on_host(value):
    return tree_map(lambda x: operators.on_host(x) if isinstance(x, Tensor) else x, value)


def _install_references():
    from megarl.mcore.kernels.cuda import (  # noqa: F401
        exact_rows,
        head_rows,
        key_choice,
        mlp_rows,
        recurrent_chunks,
        recurrent_rows,
        rotate_heads,
        segment_attention,
    )
    from tests.helpers.models import reference_kernels

    for name in (
        "paged_decode",
        "sample_rows",
        "uniform_rows",
        "rotate_heads",
        "split_heads",
        "join_heads",
        "expert_pairs",
        "route",
        "route_backward",
        "sum_norm",
        "sum_pairs",
        "swiglu_gated",
        "swiglu_gated_backward",
        "convolve_runs",
        "convolve_runs_backward",
        "choose_key_bits",
        "list_key_rows",
        "attend_rows",
    ):
        _library.impl(name, _computing(name, getattr(reference_kernels, name)), "CUDA")
    for name in (
        "rotate_and_store",
        "begin_rows",
        "head_sums",
        "head_gradient",
        "convolve_rows",
        "delta_rows",
        "space_rows",
        "sum_norm_backward",
        "walk_chunks",
    ):
        _library.impl(name, _writing(name, getattr(reference_kernels, name)), "CUDA")
    _library.impl("swiglu_rows", _computing("swiglu_rows", _swiglu), "CUDA")
    _library.impl("swiglu_rows_backward", _computing("swiglu_rows_backward", _swiglu_backward), "CUDA")


def _swiglu(x: Tensor) -> Tensor:
    gate, up = x.float().chunk(2, -1)
    return (torch.nn.functional.silu(gate) * up).to(x.dtype)


def _swiglu_backward(grad: Tensor, x: Tensor) -> Tensor:
    gate, up = x.float().chunk(2, -1)
    sigmoid, grad = gate.sigmoid(), grad.float()
    return torch.cat([grad * up * sigmoid * (1 + gate * (1 - sigmoid)), grad * gate * sigmoid], -1).to(x.dtype)


def _writing(name: str, reference):
    """An operator that writes into its arguments."""
    writes = [argument.is_write for argument in getattr(torch.ops.megarl, name).default._schema.arguments]

    def call(*args, **kwargs):
        _check([*args, *kwargs.values()])
        host = [_on_host(x) for x in args]
        read, written = (
            [
                x
                for argument, is_written in zip(args, writes, strict=False)
                for x in tree_leaves(argument)
                if isinstance(x, Tensor) and is_written == wanted
            ]
            for wanted in (False, True)
        )
        _launched(f"triton {name}", read, written, lambda: reference(*host, **kwargs))

    return call


def _computing(name: str, reference):
    """An operator that returns a tensor, or several."""

    def call(*args, **kwargs):
        _check([*args, *kwargs.values()])
        host = [_on_host(x) for x in args]

        def compute() -> list[Tensor]:
            found = reference(*host, **kwargs)
            return [x.contiguous() for x in (found if isinstance(found, list | tuple) else [found])]

        outs = [operators.on_device(x) for x in compute()]
        places = [operators.on_host(x) for x in outs]

        def repeat():
            for place, value in zip(places, compute(), strict=True):
                place.copy_(value)

        operators.launched(f"triton {name}", [x for x in args if isinstance(x, Tensor)], outs, repeat)
        return outs if len(outs) > 1 else outs[0]

    return call
