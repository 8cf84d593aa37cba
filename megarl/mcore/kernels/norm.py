"""Norms for the layer spec that work with and without sequence parallelism, on CPU and CUDA.

megatron-core's wrapper of torch's norms does not support sequence parallelism. Under it a norm sees a slice of the
tokens, so its weight gradients must be summed over the tensor-parallel ranks. `finalize_model_grads` does this for
every parameter with `sequence_parallel = True`.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megarl.mcore.kernels import native
from megarl.mcore.kernels.batch_invariance import is_exact


class _RMSNorm(torch.autograd.Function):
    """x [T, H] and weight [H] -> x · r · weight with r = (mean x² + ε)^−½ (1910.07467 eq. 4)."""

    @staticmethod
    def forward(ctx, x, weight, eps):
        out, scale = _normed(x, weight, eps)
        ctx.save_for_backward(x, weight, scale)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        """∂x = r · (grad · weight − x · r² · mean(grad · weight · x)), ∂weight = Σ grad · x · r over tokens."""
        x, weight, scale = ctx.saved_tensors
        product = grad * x
        correction = product.mv(weight).unsqueeze(1).mul_(scale**3).div_(-x.shape[1])
        grad_x = (grad * weight).mul_(scale).addcmul_(x, correction)
        return grad_x, product.t().mv(scale.squeeze(1)), None


def _normed(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """[…, H] -> the normed [..., H], and the reciprocal root mean square […, 1]."""
    if native.supports(x, weight):
        return native.ops.rms_norm(x.contiguous(), weight, eps)
    scale = x.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    return (x * scale).mul_(weight), scale


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """[…, H] -> […, H], equal to the last bit with and without gradients."""
    if torch.is_grad_enabled():
        return _RMSNorm.apply(x.flatten(0, -2), weight, eps).view_as(x)
    return _normed(x, weight, eps)[0]


class RMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm, with fewer passes over the activations in fp32 on a CPU."""

    def forward(self, x: Tensor) -> Tensor:
        """[…, H] -> […, H], equal to the last bit with and without gradients."""
        weight = self.own_weight()
        if x.device.type != "cpu" or x.dtype is not torch.float32 or weight.dtype is not torch.float32:
            return torch.nn.functional.rms_norm(x, self.normalized_shape, weight, self.eps)
        return rms_norm(x, weight, self.eps)

    def own_weight(self) -> Tensor:
        """The weights [H] as this rank uses them."""
        return self.weight


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
        from megarl.mcore.kernels.cuda.row_norm import row_norm  # needs Triton

        weight, bias = self.weight.float(), getattr(self, "bias", None)
        weight = 1 + weight if isinstance(self, (ZeroCentredRMSNorm, ZeroCentredLayerNorm)) else weight
        return row_norm(x, weight, bias if bias is None else bias.float(), self.eps)


BY_ROWS = {kind: type(f"{kind.__name__}ByRows", (_ByRows, kind), {}) for kind in KINDS.values()}


class Norm:
    """Builds the norm of `config.normalization` and `config.layernorm_zero_centered_gamma`; marks its weights for
    sequence parallelism."""

    def __new__(cls, config, hidden_size: int, eps: float = 1e-5, **_):
        kind = KINDS[config.normalization, config.layernorm_zero_centered_gamma]
        kind = BY_ROWS[kind] if is_exact(config) else kind
        norm = kind(hidden_size, eps=eps, dtype=config.params_dtype)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm
