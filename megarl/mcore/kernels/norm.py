"""Norms for the layer spec that work with and without sequence parallelism, on CPU and CUDA.

megatron-core's wrapper of torch's norms does not support sequence parallelism. Under it a norm sees a slice of the
tokens, so its weight gradients must be summed over the tensor-parallel ranks. `finalize_model_grads` does this for
every parameter with `sequence_parallel = True`.
"""

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
from torch import Tensor
from torch.distributed.tensor import DTensor

from megarl.mcore import device
from megarl.mcore.kernels import native, with_gradient
from megarl.mcore.kernels.batch_invariance import is_exact
from megarl.mcore.kernels.linear import HALF, adds_to_main_grad, stand_in
from megarl.mcore.parallel.process_groups import split_state_dict


def _rms_norm_gradient(ctx, grad):
    """∂x = r · (grad · weight − x · r² · mean(grad · weight · x)), ∂weight = Σ grad · x · r over tokens."""
    x, weight, scale = ctx.saved_tensors
    product = grad * x
    correction = product.mv(weight).unsqueeze(1).mul_(scale**3).div_(-x.shape[1])
    grad_x = (grad * weight).mul_(scale).addcmul_(x, correction)
    return grad_x, product.t().mv(scale.squeeze(1)), None


@with_gradient(_rms_norm_gradient)
def _rms_norm(ctx, x, weight, eps):
    """x [T, H] and weight [H] -> x · r · weight with r = (mean x² + ε)^−½ (1910.07467 eq. 4)."""
    out, scale = _normed(x, weight, eps)
    ctx.save_for_backward(x, weight, scale)
    return out


def _normed(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """[…, H] -> the normed [..., H], and the reciprocal root mean square […, 1]."""
    if native.supports(x, weight):
        return native.ops.rms_norm(x.contiguous(), weight, eps)
    scale = x.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    return (x * scale).mul_(weight), scale


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """[…, H] -> […, H], equal to the last bit with and without gradients."""
    if torch.is_grad_enabled():
        return _rms_norm(x.flatten(0, -2), weight, eps).view_as(x)
    return _normed(x, weight, eps)[0]


class RMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm, with fewer passes over the activations in fp32 on a CPU."""

    group = None  # ranks with other rows each, which share the gradient of the weights; None: this rank alone

    def forward(self, x: Tensor) -> Tensor:
        """[…, H] -> […, H], equal to the last bit with and without gradients."""
        norm, normed = vars(x).get("normed", (None, x))  # see `add_normed`
        if norm is self and normed.requires_grad == x.requires_grad:  # else made by a layer that is computed again
            return normed
        weight = self.weight
        if self.group is not None:
            weight = copy_to_tensor_model_parallel_region(weight, self.group)
        if x.device.type != "cpu" or x.dtype is not torch.float32 or weight.dtype is not torch.float32:
            return torch.nn.functional.rms_norm(x, self.normalized_shape, weight, self.eps)
        return rms_norm(x, weight, self.eps)


def _sum_norm_gradient(ctx, grad_total, grad):
    """A norm that nobody has read gives its weight no gradient: another path gives all of it, and may add it
    elsewhere."""
    from megarl.mcore.kernels.cuda.exact_rows import sum_norm_backward  # needs Triton

    if grad is None:
        return grad_total, grad_total, None, None
    total, weight, scales = ctx.saved_tensors
    grad_total = torch.zeros_like(total) if grad_total is None else grad_total.contiguous()
    adds = ctx.needs_input_grad[2] and adds_to_main_grad(weight)
    grad_weight = weight.main_grad if adds else torch.zeros_like(weight, dtype=torch.float32)
    grad_x = torch.empty_like(total)
    sum_norm_backward(grad_x, grad_weight, grad_total, grad.contiguous(), total, weight, scales)
    return grad_x, grad_x, stand_in(weight) if adds else grad_weight.to(weight.dtype), None


@with_gradient(_sum_norm_gradient)
def _sum_norm(ctx, x, added, weight, eps):
    """(x + added, its norm), both […, H]."""
    from megarl.mcore.kernels.cuda.exact_rows import sum_norm  # needs Triton

    total, normed, scales = sum_norm(x, added, weight, eps)
    ctx.save_for_backward(total, weight, scales)
    ctx.set_materialize_grads(False)
    return total, normed


def add_normed(residual: Tensor, output: Tensor, norm) -> Tensor:
    """residual + output, both […, H], of which `norm`, a module or None, is the next reader. Without gradients `output`
    may be overwritten.

    On CUDA in 16 bits one kernel also computes an RMSNorm of the sum, which `norm` then returns when it is called.
    """
    if type(norm) is not RMSNorm or not _has_sum_kernel(residual, output, norm):
        return residual + output if torch.is_grad_enabled() else output.add_(residual)
    total, normed = _sum_norm(residual, output, norm.weight, norm.eps)
    total.normed = norm, normed
    return total


def _has_sum_kernel(residual: Tensor, output: Tensor, norm: RMSNorm) -> bool:
    if not residual.is_cuda or residual.dtype not in HALF or norm.group is not None:
        return False
    from megarl.mcore.kernels.cuda.exact_rows import MAX_COLUMNS  # needs Triton

    is_plain = residual.dtype == output.dtype == norm.weight.dtype
    is_plain = is_plain and not isinstance(norm.weight, DTensor)  # a shard that its own layer gathers
    return is_plain and residual.shape[-1] <= MAX_COLUMNS and residual.is_contiguous() and output.is_contiguous()


class ZeroCentredRMSNorm(torch.nn.RMSNorm):
    """RMSNorm that multiplies by 1 + weight, as in Gemma. The weights start at 0.

    It computes in fp32 and rounds once, at the end. Weights in which the 1 is folded would lose most of their bits.
    """

    def reset_parameters(self):
        torch.nn.init.zeros_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """[…, H] -> […, H], equal to the last bit with and without gradients."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return rms_norm(wide, 1 + self.weight.to(wide.dtype), self.eps).to(x.dtype)


class ZeroCentredLayerNorm(torch.nn.LayerNorm):
    """LayerNorm that multiplies by 1 + weight; otherwise like `ZeroCentredRMSNorm`."""

    def reset_parameters(self):
        torch.nn.init.zeros_(self.weight)
        torch.nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """[…, H] -> […, H]."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        weight, bias = 1 + self.weight.to(wide.dtype), self.bias.to(wide.dtype)
        return torch.nn.functional.layer_norm(wide, self.normalized_shape, weight, bias, self.eps).to(x.dtype)


KINDS = {  # normalization, whether 1 is added to the weights
    ("RMSNorm", False): RMSNorm,
    ("RMSNorm", True): ZeroCentredRMSNorm,
    ("LayerNorm", False): torch.nn.LayerNorm,
    ("LayerNorm", True): ZeroCentredLayerNorm,
}


class _ByRows:
    """A norm of `--exact-rollout` on CUDA: one program per row, in rollout and training."""

    def forward(self, x: Tensor) -> Tensor:
        """[…, H] -> […, H]."""
        from megarl.mcore.kernels.cuda.exact_rows import row_norm  # needs Triton

        weight, bias = self.weight.float(), getattr(self, "bias", None)
        weight = 1 + weight if isinstance(self, (ZeroCentredRMSNorm, ZeroCentredLayerNorm)) else weight
        return row_norm(x, weight, bias if bias is None else bias.float(), self.eps)


BY_ROWS = {kind: type(f"{kind.__name__}ByRows", (_ByRows, kind), {}) for kind in KINDS.values()}


def build_norm(config, hidden_size: int, eps: float = 1e-5, **_) -> torch.nn.Module:
    """The norm of `config.normalization` and `config.layernorm_zero_centered_gamma`, its weights marked for sequence
    parallelism."""
    kind = KINDS[config.normalization, config.layernorm_zero_centered_gamma]
    kind = BY_ROWS[kind] if is_exact(config) else kind
    norm = kind(hidden_size, eps=eps, dtype=config.params_dtype)
    for parameter in norm.parameters():
        parameter.sequence_parallel = config.sequence_parallel
    return norm


# -- over all heads ------------------------------------------------------------------------------------------------


def _mean(x: Tensor, group) -> Tensor:
    """[T, C] of this rank -> [T, 1] mean over the channels of all ranks."""
    mean = x.mean(-1, keepdim=True)
    if group.size() > 1:
        dist.all_reduce(mean, group=group)
        mean.div_(group.size())
    return mean


def _split_rms_norm_gradient(ctx, grad):
    """∂x = r · (grad · weight − x · r² · mean(grad · weight · x)), ∂weight = Σ grad · x · r over tokens."""
    x, weight, scale = ctx.saved_tensors
    scaled = grad * weight
    correction = _mean(scaled * x, ctx.group).mul_(scale.square())
    return scaled.sub_(x * correction).mul_(scale), (grad * x * scale).sum(0), None, None


@with_gradient(_split_rms_norm_gradient)
def _split_rms_norm(ctx, x, weight, eps, group):
    """x [T, C] and weight [C] of this rank -> x · r · weight with r = (mean x² + ε)^−½ over all ranks."""
    scale = _mean(x.square(), group).add_(eps).rsqrt_()
    ctx.save_for_backward(x, weight, scale)
    ctx.group = group
    return (x * scale).mul_(weight)


class AllHeadsRMSNorm(torch.nn.Module):
    """RMSNorm of [T, 1, heads, D] over the channels of all heads together (OLMo 2, 2501.00656 §3.2), in fp32.

    Tensor-parallel ranks share it; its weights are split with the heads.
    Where ranks share a head, each has the whole weights, and backward sums their gradients. The means are those over
    all heads, because all have equally many ranks.
    """

    def __init__(self, config, heads: int, channels: int, group, shared=None):
        """`heads`: of this rank; `group`: the tensor-parallel group; `shared`: the `SharedGroup` whose head it is."""
        super().__init__()
        self.eps, self.tp_group, width = config.layernorm_epsilon, group, heads * channels
        self._is_by_rows, self._here = is_exact(config), None  # this rank's part of whole weights
        if shared is not None:
            self._here = slice(shared.number * width, (shared.number + 1) * width)
            width *= group.size() // shared.ranks
        ones = torch.ones(width, dtype=config.params_dtype, device=device.device())
        self.weight = torch.nn.Parameter(ones)
        if shared is None:
            set_tensor_model_parallel_attributes(self.weight, True, 0, 1)

    def forward(self, x: Tensor) -> Tensor:
        """[T, 1, heads, D] -> the same shape."""
        if self._is_by_rows:
            from megarl.mcore.kernels.cuda.exact_rows import row_norm  # needs Triton

            return row_norm(x.flatten(1), self.weight.float(), None, self.eps).view_as(x)
        wide = x.flatten(1).to(torch.promote_types(x.dtype, torch.float32))
        weight = self.weight.to(wide.dtype)
        if self._here is not None:
            weight = copy_to_tensor_model_parallel_region(weight, group=self.tp_group)[self._here]
        return _split_rms_norm(wide, weight, self.eps, self.tp_group).to(x.dtype).view_as(x)

    sharded_state_dict = split_state_dict
