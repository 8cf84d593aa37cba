"""Matrix products of linear layers and heads, and what Megatron's parallel linear layers compute with them on a CPU.

In fp32 on a CPU products with weights go through oneDNN's inner product where this torch has it: with few rows, as in
a decode step, it takes half the time of the BLAS library's, and a row's numbers do not depend on how many rows there
are, from two on. Rollout and training use the same one, so that they agree to the last bit. Elsewhere these are
torch's own.
"""

import contextlib

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    linear_with_grad_accumulation_and_async_allreduce,
)
from torch import Tensor
from torch.autograd.function import once_differentiable

from megarl.mcore import device

HAS_INNER_PRODUCT = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
_inner_product = torch.ops.mkldnn._linear_pointwise.default if HAS_INNER_PRODUCT else None
_prepacked: dict[int, Tensor] = {}  # id of a weight -> the same in oneDNN's layout, while `packed`
PREPACK_ROWS = 64  # rows for which the layout is chosen; any number of them gives the same bits


def _has_onednn_kernel(x: Tensor, weight: Tensor) -> bool:
    return HAS_INNER_PRODUCT and x.dtype is torch.float32 is weight.dtype and weight.device.type == "cpu"


@contextlib.contextmanager
def prepacked_weights(model):
    """Inside, products with a model's weights read copies in blocks, the same bits in less time with few rows.

    A decode step reads every weight for a few rows: bringing it into blocks each time would cost as much as the
    product. The weights must not change inside; the copies go when it ends. Weights that oneDNN does not serve, and
    sharded ones, stay as they are.
    """
    layers = [layer for layer in model.modules() if isinstance(layer, (ColumnParallelLinear, RowParallelLinear))]
    tied = model.shared_embedding_or_output_weight() if model.post_process else None
    weights = [w for w in (tied, *(layer.weight for layer in layers)) if w is not None]
    whole = [w for w in weights if _has_onednn_kernel(w, w) and type(w.data) is Tensor and w.dim() == 2]
    try:
        with torch.no_grad():
            _prepacked.update((id(w), torch.ops.mkldnn._reorder_linear_weight(w.data, PREPACK_ROWS)) for w in whole)
        yield
    finally:
        for weight in whole:
            _prepacked.pop(id(weight), None)


def matmul(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """[…, K] and weight [N, K] -> […, N] = x · weightᵀ + bias [N]. Not differentiable: see `linear`."""
    if _has_onednn_kernel(x, weight):
        return _inner_product(x, _prepacked.get(id(weight), weight), bias, "none", [], "")
    return torch.nn.functional.linear(x, weight, bias)


def input_gradient(grad: Tensor, weight: Tensor) -> Tensor:
    """Gradient […, N] of a product's result -> […, K] = grad · weight, of its input."""
    return matmul(grad, weight.t())


def weight_gradient(grad: Tensor, x: Tensor) -> Tensor:
    """Gradient […, N] of a product's result and its input […, K] -> [N, K] = gradᵀ · x, of its weight."""
    return grad.flatten(0, -2).t() @ x.flatten(0, -2)  # the BLAS library's is the faster one here


def _gathered(x: Tensor, group) -> Tensor:
    """[T/t, …] of this rank -> [T, …] of the group's t ranks."""
    whole = x.new_empty(len(x) * dist.get_world_size(group), *x.shape[1:])
    dist.all_gather_into_tensor(whole, x.contiguous(), group=group)
    return whole


class _Linear(torch.autograd.Function):
    """A linear layer; with a group one whose weight is split over tensor-parallel ranks (1909.08053 §3, 2205.05198)."""

    @staticmethod
    def forward(ctx, x, weight, bias, group, sums_input_gradient, sequence_parallel):
        """Under sequence parallelism x is this rank's [T/t, …] and gathered, here and, not to be kept, in backward."""
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        ctx.group, ctx.sums_input_gradient, ctx.sequence_parallel = group, sums_input_gradient, sequence_parallel
        return matmul(_gathered(x, group) if sequence_parallel else x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        """The collective of the input's gradient runs while the weight's is computed."""
        x, weight = ctx.saved_tensors
        to_x, to_weight, to_bias, handle = None, None, None, None
        if ctx.needs_input_grad[0]:
            to_x = whole = input_gradient(grad, weight)
            if ctx.sequence_parallel:
                to_x = whole.new_empty(len(whole) // dist.get_world_size(ctx.group), *whole.shape[1:])
                handle = dist.reduce_scatter_tensor(to_x, whole, group=ctx.group, async_op=True)
            elif ctx.sums_input_gradient:
                handle = dist.all_reduce(to_x, group=ctx.group, async_op=True)
        if ctx.needs_input_grad[1]:
            to_weight = weight_gradient(grad, _gathered(x, ctx.group) if ctx.sequence_parallel else x)
        if ctx.needs_input_grad[2]:
            to_bias = grad.flatten(0, -2).sum(0)
        if handle is not None:
            handle.wait()
        return to_x, to_weight, to_bias, None, None, None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`product` that is differentiable, once."""
    return _Linear.apply(x, weight, bias, None, False, False)


def parallel_linear(
    layer, input, weight, bias, gradient_accumulation_fusion, allreduce_dgrad, sequence_parallel, tp_group,
    grad_output_buffer=None, wgrad_deferral_limit=None, gtp_remat_size=1,
):  # fmt: skip
    """`_forward_impl` of Megatron's column- and row-parallel linear layers on a CPU, trained, frozen, or in rollout.

    input […, K], under `sequence_parallel` this rank's [T/t, …, K]; weight [N, K] -> […, N]. `allreduce_dgrad`: the
    gradient of the input is summed over the group. What needs CUDA kernels stays Megatron's.
    """
    if gradient_accumulation_fusion or grad_output_buffer is not None or gtp_remat_size > 1:
        return linear_with_grad_accumulation_and_async_allreduce(
            input, weight, bias, gradient_accumulation_fusion, allreduce_dgrad, sequence_parallel, grad_output_buffer,
            wgrad_deferral_limit, tp_group, gtp_remat_size,
        )  # fmt: skip
    if torch.is_grad_enabled():
        return _Linear.apply(input, weight, bias, tp_group, allreduce_dgrad, sequence_parallel)
    return matmul(_gathered(input, tp_group) if sequence_parallel else input, weight, bias)


def apply_linear(layer, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """A column- or row-parallel linear layer of […, K]: its result, and a bias that is still to be added.

    In rollout on a CPU, where one rank holds the layer whole, without Megatron's way to the product: in a decode step
    it takes as long as a small product.
    """
    if torch.is_grad_enabled() or x.device.type != "cpu" or layer.tp_group.size() > 1:
        return layer(x)
    now, later = (None, layer.bias) if layer.skip_bias_add else (layer.bias, None)
    return matmul(x, layer.weight, now), later


def install():
    """Makes Megatron's parallel linear layers use `parallel_linear` on a CPU; with CUDA present it changes nothing."""
    if not device.has_cuda():
        ColumnParallelLinear._forward_impl = RowParallelLinear._forward_impl = parallel_linear
