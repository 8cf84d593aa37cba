"""Matrix products of linear layers and heads, and a CPU implementation of Megatron's parallel linear layers.

In fp32 on a CPU, products with weights use megarl's compiled kernel, else oneDNN's inner product: with few rows both
take half the time of BLAS, and a row's result does not depend on the number of rows. With `--exact-rollout` on CUDA
forward passes multiply by tiles of fixed size (`kernels.cuda.exact_rows`). Other cases use torch's products.
"""

import contextlib
import functools
import itertools
import types
from collections.abc import Callable

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import layers
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    linear_with_grad_accumulation_and_async_allreduce,
)
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor

from megarl.mcore import device
from megarl.mcore.kernels import native, with_gradient
from megarl.mcore.kernels.batch_invariance import MIN_ROWS, is_exact

HAS_INNER_PRODUCT = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
_inner_product = torch.ops.mkldnn._linear_pointwise.default if HAS_INNER_PRODUCT else None
_of_torch = torch.nn.functional.linear  # passes of models of transformers replace it
HAS_WIDER_SUM = hasattr(torch.ops.aten.addmm, "dtype_out")
HALF = torch.bfloat16, torch.float16
SMALL_PRODUCT = 16**3  # multiplications up to which torch does not use oneDNN in 16 bits, but sums in another order
_prepacked: dict[int, Tensor] = {}  # id of a weight -> its copy in the kernel's layout, inside `prepacked_weights`
PREPACK_ROWS = 64  # rows that the layout is chosen for; results are the same for any number of rows
_uses_onednn = HAS_INNER_PRODUCT


def use_onednn(is_used: bool):
    """Whether products that the compiled kernels do not compute use oneDNN, if this torch has it, or BLAS."""
    global _uses_onednn
    _uses_onednn = is_used and HAS_INNER_PRODUCT


def onednn_product(weight: Tensor) -> Callable[[Tensor], Tensor]:
    """x -> x · weightᵀ by oneDNN, in fp32 on a CPU, with the weight [N, K] in its layout."""
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, PREPACK_ROWS)
    return lambda x: _inner_product(x, packed, None, "none", [], "")


def _has_onednn_kernel(x: Tensor, weight: Tensor) -> bool:
    return _uses_onednn and x.dtype is torch.float32 is weight.dtype and weight.device.type == "cpu"


def _pack(weight: Tensor) -> Tensor | None:
    """The weight [N, K] in the layout of the kernel that multiplies by it; None: as it is."""
    if type(weight) is not Tensor or weight.dim() != 2:
        return None
    if native.supports(weight):
        return native.ops.pack_weight(weight)
    return torch.ops.mkldnn._reorder_linear_weight(weight, PREPACK_ROWS) if _has_onednn_kernel(weight, weight) else None


@contextlib.contextmanager
def prepacked_weights(model, prediction=None):
    """Uses prepacked copies of a model's weights inside: equal to the last bit, and faster with few rows.

    A decode step multiplies every weight by few rows, so reordering the weight each time would cost as much as the
    product. Weights must not change inside; the copies are freed on exit. Sharded weights are not copied.
    `prediction`: the model's layer of multi-token prediction, if it has one.
    """
    kinds = ColumnParallelLinear, RowParallelLinear, ReplicatedLinear
    modules = (model,) if prediction is None else (model, prediction)
    single, merged = [layer.weight for module in modules for layer in module.modules() if isinstance(layer, kinds)], ()
    if model.config.attention_slots is not None:  # of transformers
        single, merged = model.products()
    is_tied = model.post_process and model.share_embeddings_and_output_weights
    tied = model.shared_embedding_or_output_weight() if is_tied else None
    weights = [w for w in (tied, *single) if w is not None]
    packed = {}
    try:
        with torch.no_grad():
            pairs = itertools.chain(((w, w.data) for w in weights), merged)
            packed |= {id(owner): copy for owner, w in pairs if (copy := _pack(w)) is not None}
            _prepacked.update(packed)
        yield
    finally:
        for number in packed:
            _prepacked.pop(number, None)


def prepacked(weight) -> Tensor | None:
    """The copy of a weight, or of what has a merged one, inside `prepacked_weights`; None if it has none."""
    return _prepacked.get(id(weight))


Product = Callable[..., Tensor]  # (x […, K], weight [N, K], bias [N] or None) -> […, N]


def forward_product(config) -> Product:
    """The product of forward passes of a model with this config; backward's is `matmul`."""
    return exact_product() if is_exact(config) else matmul


def exact_product() -> Product:
    """The product of exact rollouts on CUDA."""
    from megarl.mcore.kernels.cuda import exact_rows  # needs Triton

    return exact_rows.product


def matmul(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """[…, K] and weight [N, K] -> […, N] = x · weightᵀ + bias [N]. Not differentiable; see `linear`."""
    if native.supports(x, weight):
        return native.ops.linear(x.contiguous(), weight, _prepacked.get(id(weight)), bias)
    if _has_onednn_kernel(x, weight):
        return _inner_product(x, _prepacked.get(id(weight), weight), bias, "none", [], "")
    if x.dtype in HALF and x.device.type == "cpu" and x.numel():
        rows, least = x.reshape(-1, x.shape[-1]), SMALL_PRODUCT // weight.numel() + 1
        return at_least_rows(_of_torch, rows, weight, bias, least=least).view(*x.shape[:-1], len(weight))
    return _of_torch(x, weight, bias)


def logits_with(weight: Tensor, is_exact: bool = False) -> Callable[[Tensor], Tensor]:
    """`matmul`, or `exact_product`, with a head's weight [N, K] as a function of x; the weight is packed once.

    In 16 bits on CUDA logits are fp32, where torch has such a product: rounded to bf16, one between 16 and 32 is off by
    up to 0.06, in rollout and training by different amounts.
    """
    if is_exact:
        return functools.partial(exact_product(), weight=weight)
    if _has_wide_product(weight):
        return lambda x: torch.mm(x, weight.t(), out_dtype=torch.float32)
    if not native.supports(weight):
        return functools.partial(matmul, weight=weight)
    packed = _prepacked.get(id(weight))
    own = native.ops.pack_weight(weight) if packed is None else packed
    return lambda x: native.ops.linear(x.contiguous(), weight, own, None) if native.supports(x) else matmul(x, weight)


def logits_dtype(config) -> torch.dtype:
    """The dtype of a model's logits in a rollout, on ranks without its head, too."""
    is_wide = HAS_WIDER_SUM and device.has_cuda() and config.params_dtype in HALF and not is_exact(config)
    return torch.float32 if is_wide else config.params_dtype


def _has_wide_product(x: Tensor) -> bool:
    """Whether torch has a product of such matrices with a result of 32 bits: on CUDA, in 16 bits."""
    return HAS_WIDER_SUM and x.is_cuda and x.dtype in HALF


def input_gradient(grad: Tensor, weight: Tensor) -> Tensor:
    """Output gradient […, N] -> input gradient […, K] = grad · weight."""
    return matmul(grad, weight.t())


def weight_gradient(grad: Tensor, x: Tensor) -> Tensor:
    """Output gradient […, N] and input […, K] -> weight gradient [N, K] = gradᵀ · x."""
    grad, x = grad.flatten(0, -2), x.flatten(0, -2)
    if not native.supports(grad, x):
        return grad.t() @ x  # BLAS is faster than oneDNN here
    total = x.new_zeros(grad.shape[1], x.shape[1])
    native.ops.add_weight_gradient(total, grad, x)
    return total


def add_weight_gradient(total: Tensor, grad: Tensor, x: Tensor):
    """Adds gradᵀ · x of grad [T, N] and x [T, K] to `total` [N, K], which may have a wider dtype."""
    if native.supports(total, grad, x):
        native.ops.add_weight_gradient(total, grad, x)
    elif total.dtype == grad.dtype:
        total.addmm_(grad.t(), x)  # avoids a second buffer of the weight's size
    elif total.dtype is torch.float32 and _has_wide_product(grad) and x.dtype == grad.dtype:
        torch.ops.aten.addmm.dtype_out(total, grad.t(), x, total.dtype, out=total)  # here, too
    else:
        total.add_(grad.t() @ x)


def adds_to_main_grad(weight: Tensor) -> bool:
    """Whether the product for this weight's gradient adds to Megatron's fp32 gradient buffer: on CUDA, in 16 bits.

    Then all gradients of the weight must do so, except for that of an embedding, which Megatron's hook adds
    (`stand_in`). A head that shares its weight with another pipeline stage keeps to Megatron's way.
    """
    is_owned = hasattr(weight, "grad_added_to_main_grad") and not getattr(weight, "shared_embedding", False)
    is_wide = getattr(getattr(weight, "main_grad", None), "dtype", None) is torch.float32
    return is_wide and is_owned and _has_wide_product(weight)


def stand_in(weight: Tensor) -> Tensor:
    """A tensor for autograd, which calls Megatron's hooks, in place of a gradient that was added already.

    Zeros for the table of embeddings that is the head, too, whose other gradient the hook adds; else without values.
    """
    weight.grad_added_to_main_grad = True
    return torch.zeros_like(weight) if getattr(weight, "zero_out_wgrad", False) else torch.empty_like(weight)


def gather_tokens(x: Tensor, group) -> Tensor:
    """[T/t, …] of this rank -> [T, …] of the group's t ranks."""
    gathered = x.new_empty(len(x) * dist.get_world_size(group), *x.shape[1:])
    dist.all_gather_into_tensor(gathered, x.contiguous(), group=group)
    return gathered


def start_reduction(
    full: Tensor, group, sequence_parallel: bool, sums_input_gradient: bool
) -> tuple[Tensor, dist.Work | None]:
    """(gradient of this rank's input, the collective to wait for) from that of the rank's own product [T, …]."""
    if sequence_parallel:
        own = full.new_empty(len(full) // dist.get_world_size(group), *full.shape[1:])
        return own, dist.reduce_scatter_tensor(own, full, group=group, async_op=True)
    return full, dist.all_reduce(full, group=group, async_op=True) if sums_input_gradient else None


def to_all_ranks(x: Tensor, group, sequence_parallel: bool) -> Tensor:
    """[T/t, …] of this rank under sequence parallelism, else [T, …] -> [T, …], of which each rank of the group uses all
    for its own results; backward sums the gradients of all ranks."""
    if sequence_parallel:
        return gather_from_sequence_parallel_region(x, group=group)
    return copy_to_tensor_model_parallel_region(x, group=group)


def of_all_tokens(layer):
    """A column-parallel layer whose input is what `to_all_ranks` returned: it reduces no gradient a second time."""
    layer.sequence_parallel = layer.allreduce_dgrad = False
    layer.disable_grad_reduce = True
    return layer


def _linear_gradient(ctx, grad):
    """Overlaps the collective of the input gradient with the weight gradient."""
    x, weight = ctx.saved_tensors
    grad_x = grad_weight = grad_bias = handle = None
    if ctx.needs_input_grad[0]:
        full = input_gradient(grad, weight)
        grad_x, handle = start_reduction(full, ctx.group, ctx.sequence_parallel, ctx.sums_input_gradient)
    if ctx.needs_input_grad[1]:
        x = gather_tokens(x, ctx.group) if ctx.sequence_parallel else x
        if adds_to_main_grad(weight):
            add_weight_gradient(weight.main_grad, grad.flatten(0, -2), x.flatten(0, -2))
            grad_weight = stand_in(weight)
        else:
            grad_weight = weight_gradient(grad, x)
    if ctx.needs_input_grad[2]:
        grad_bias = grad.flatten(0, -2).sum(0)
    if handle is not None:
        handle.wait()
    return grad_x, grad_weight, grad_bias, None, None, None, None


@with_gradient(_linear_gradient)
def _linear(ctx, x, weight, bias, group, sums_input_gradient, sequence_parallel, product):
    """A linear layer; with a group, its weight is split over tensor-parallel ranks (1909.08053 §3, 2205.05198).

    Under sequence parallelism x is this rank's [T/t, …]; its gradient gathers it again instead of saving it.
    """
    ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
    ctx.group = group
    ctx.sums_input_gradient, ctx.sequence_parallel = sums_input_gradient, sequence_parallel
    return product(gather_tokens(x, group) if sequence_parallel else x, weight, bias)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, product: Product = matmul) -> Tensor:
    """Same as `product`, but differentiable once."""
    if not torch.is_grad_enabled():
        return product(x, weight, bias)
    return _linear(x, weight, bias, None, False, False, product)


def _wide_linear_gradient(ctx, grad):
    x, weight = ctx.saved_tensors
    grad_x, wide, grad_weight = (grad @ weight.float()).to(x.dtype), x.float(), None
    if ctx.needs_input_grad[1] and adds_to_main_grad(weight):
        weight.main_grad.addmm_(grad.t(), wide)
        grad_weight = stand_in(weight)
    elif ctx.needs_input_grad[1]:
        grad_weight = (grad.t() @ wide).to(weight.dtype)
    return grad_x, grad_weight


@with_gradient(_wide_linear_gradient)
def _wide_linear(ctx, x, weight):
    ctx.save_for_backward(x, weight)
    return torch.mm(x, weight.t(), out_dtype=torch.float32)


def wide_linear(x: Tensor, weight: Tensor) -> Tensor | None:
    """Rows […, K] and weight [N, K] in 16 bits on CUDA -> […, N] fp32 without copies in fp32 of either; their gradients
    are products in fp32. None where torch has no such product."""
    if not _has_wide_product(x) or x.dtype != weight.dtype:
        return None
    return _wide_linear(x.flatten(0, -2), weight).unflatten(0, x.shape[:-1])


def at_least_rows(product, x: Tensor, *args, least: int = MIN_ROWS) -> Tensor:
    """`product(x, *args)` of [n, …, K] with at least so many rows: the last one is repeated."""
    rows = torch.cat([x, x[-1:].expand(least - len(x), *x.shape[1:])]) if 0 < len(x) < least else x
    return product(rows, *args)[: len(x)]


def parallel_linear(
    layer, input, weight, bias, gradient_accumulation_fusion, allreduce_dgrad, sequence_parallel, tp_group, **others
):
    """Replaces `_forward_impl` of Megatron's column- and row-parallel linear layers on a CPU, and on CUDA with
    `--exact-rollout`.

    input […, K], under `sequence_parallel` this rank's [T/t, …, K]; weight [N, K] -> […, N]. `allreduce_dgrad`: sums
    the input gradient over the group. Options that need CUDA kernels, among them `others`, use Megatron's
    implementation.
    """
    needs_megatron = others.get("grad_output_buffer") is not None or others.get("gtp_remat_size", 1) > 1
    if gradient_accumulation_fusion or needs_megatron:
        fused = gradient_accumulation_fusion, allreduce_dgrad, sequence_parallel
        return linear_with_grad_accumulation_and_async_allreduce(
            input, weight, bias, *fused, tp_group=tp_group, **others
        )
    product = forward_product(layer.config)
    if torch.is_grad_enabled():
        return _linear(input, weight, bias, tp_group, allreduce_dgrad, sequence_parallel, product)
    return product(gather_tokens(input, tp_group) if sequence_parallel else input, weight, bias)


def apply_linear(layer, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """Applies a column- or row-parallel linear layer to […, K]; returns its output, and a bias to add.

    On a CPU without tensor parallelism it bypasses Megatron's layer, whose overhead in a decode step equals a small
    product.
    """
    # Low-rank factors are trained, and in 16 bits also applied, by a product of their own.
    has_other_product = "adds_product" in vars(layer) and (layer.adds_product or torch.is_grad_enabled())
    if x.device.type != "cpu" or layer.tp_group.size() > 1 or has_other_product:
        return layer(x)
    added, skipped = (None, layer.bias) if layer.skip_bias_add else (layer.bias, None)
    return linear(x, layer.weight, added, forward_product(layer.config)), skipped


class ReplicatedLinear(torch.nn.Module):
    """A linear layer without bias, of which every tensor-parallel rank has the whole weight [N, K].

    Under sequence parallelism a rank's tokens give a part of the weight's gradient; the mark makes Megatron sum them.
    """

    def __init__(self, columns: int, rows: int, config, group):
        """`group`: tensor-parallel ranks."""
        super().__init__()
        weight = torch.empty(rows, columns, dtype=config.params_dtype, device=device.device())
        self.weight = torch.nn.Parameter(weight)
        self.weight.sequence_parallel = config.sequence_parallel
        self.config, self.tp_group = config, group

    def forward(self, x: Tensor) -> Tensor:
        """[T, 1, K] -> [T, 1, N]. Fewer rows than `MIN_ROWS`, a share of a step's tokens, are filled up."""
        return at_least_rows(self._forward_impl, x, self.weight, None, False, False)

    def _forward_impl(self, input, weight, bias, allreduce_dgrad, sequence_parallel) -> Tensor:
        """As that of Megatron's layers; low-rank factors replace it."""
        return linear(input, weight, None, forward_product(self.config))


def install():
    """Makes Megatron's parallel linear layers use `parallel_linear` on a CPU; see `_on_cuda`."""
    for kind in (ColumnParallelLinear, RowParallelLinear):
        kind._forward_impl = _on_cuda(kind._forward_impl) if device.has_cuda() else parallel_linear
    # In place of Apex's kernel, which multiplies in the same way, for Megatron's fusion of the sum.
    layers.fused_weight_gradient_mlp_cuda = types.SimpleNamespace(
        wgrad_gemm_accum_fp32=lambda x, grad, total: add_weight_gradient(total, grad, x)
    )


def _on_cuda(of_megatron: Callable) -> Callable:
    """`_forward_impl` of Megatron's layer, or `parallel_linear` in a model of an exact rollout; a rollout's logits are
    those of `logits_with`."""

    def forward_impl(layer, input, weight, bias, gradient_accumulation_fusion, **kwargs):
        if is_exact(layer.config):
            return parallel_linear(layer, input, weight, bias, gradient_accumulation_fusion, **kwargs)
        if getattr(layer, "gives_logits", False) and not torch.is_grad_enabled() and _has_wide_product(weight):
            rows = gather_tokens(input, kwargs["tp_group"]) if kwargs["sequence_parallel"] else input
            return logits_with(weight)(rows.flatten(0, -2)).unflatten(0, rows.shape[:-1])
        fuses = adds_to_main_grad(weight)
        return of_megatron(layer, input, weight, bias=bias, gradient_accumulation_fusion=fuses, **kwargs)

    return forward_impl
