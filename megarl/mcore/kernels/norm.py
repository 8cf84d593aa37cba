"""Norms for the layer spec that work with and without sequence parallelism, on CPU and CUDA.

megatron-core's wrapper of torch's norms does not support sequence parallelism. Under it a norm sees a slice of the
tokens, so its weight gradients must be summed over the tensor-parallel ranks. `finalize_model_grads` does this for
every parameter with `sequence_parallel = True`.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class _RMSNorm(torch.autograd.Function):
    """x [T, H] and weight [H] -> x · r · weight with r = (mean x² + ε)^−½ (1910.07467 eq. 4)."""

    @staticmethod
    def forward(ctx, x, weight, eps):
        scale = _scale(x, eps)
        ctx.save_for_backward(x, weight, scale)
        return (x * scale).mul_(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        """∂x = r · (grad · weight − x · r² · mean(grad · weight · x)), ∂weight = Σ grad · x · r over tokens."""
        x, weight, scale = ctx.saved_tensors
        product = grad * x
        correction = product.mv(weight).unsqueeze(1).mul_(scale**3).div_(-x.shape[1])
        grad_x = (grad * weight).mul_(scale).addcmul_(x, correction)
        return grad_x, product.t().mv(scale.squeeze(1)), None


def _scale(x: Tensor, eps: float) -> Tensor:
    """[…, H] -> […, 1] reciprocal root mean square."""
    return x.square().mean(-1, keepdim=True).add_(eps).rsqrt_()


class RMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm, with fewer passes over the activations in fp32 on a CPU."""

    def forward(self, x: Tensor) -> Tensor:
        """[…, H] -> […, H], equal to the last bit with and without gradients."""
        if x.device.type != "cpu" or x.dtype is not torch.float32 or self.weight.dtype is not torch.float32:
            return super().forward(x)
        if torch.is_grad_enabled():
            return _RMSNorm.apply(x.flatten(0, -2), self.weight, self.eps).view_as(x)
        return (x * _scale(x, self.eps)).mul_(self.weight)


class Norm:
    """Builds the RMSNorm or LayerNorm of `config.normalization`; marks its weights for sequence parallelism."""

    def __new__(cls, config, hidden_size: int, eps: float = 1e-5, **_):
        kinds = {"RMSNorm": RMSNorm, "LayerNorm": torch.nn.LayerNorm}
        norm = kinds[config.normalization](hidden_size, eps=eps, dtype=config.params_dtype)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm
