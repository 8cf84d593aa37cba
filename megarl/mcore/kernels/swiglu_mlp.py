"""The feed-forward block of a dense layer: Megatron's, with a gated unit of fewer passes over the activations."""

import torch
from megatron.core.transformer.mlp import MLP
from torch import Tensor
from torch.autograd.function import once_differentiable

from megarl.mcore.kernels.linear import apply_linear
from megarl.mcore.kernels.silu import silu


class _SwiGLU(torch.autograd.Function):
    """x […, 2F] -> […, F] = silu(first half) · second half (arXiv 2002.05202 eq. 5); keeps x alone for backward."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return swiglu(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        (gate, up), to_x = x.chunk(2, dim=-1), torch.empty_like(x)
        to_gate, to_up = to_x.chunk(2, dim=-1)
        torch.mul(grad, torch.nn.functional.silu(gate), out=to_up)
        torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=to_gate)
        return to_x


def swiglu(x: Tensor) -> Tensor:
    """[…, 2F] -> […, F]; differentiable only by way of `SwiGLUMLP`."""
    gate, up = x.chunk(2, dim=-1)
    return silu(gate).mul_(up)


class SwiGLUMLP(MLP):
    """Megatron's MLP, which adds an offset of zero to the linear half and keeps four tensors for backward."""

    def __init__(self, config, *args, **kwargs):
        super().__init__(config, *args, **kwargs)
        c = self.config
        self._is_plain_swiglu = (
            c.gated_linear_unit and c.activation_func is silu and not c.add_bias_linear and not c.glu_linear_offset
            and c.activation_func_clamp_value is None and not c.bias_activation_fusion and not c.use_te_activation_func
        )  # fmt: skip

    def forward(self, hidden: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor | None]:
        """[T, 1, H], under sequence parallelism this rank's, -> the same, and a bias that is still to be added."""
        if not self._is_plain_swiglu or args or kwargs:
            return super().forward(hidden, *args, **kwargs)
        both, _ = apply_linear(self.linear_fc1, hidden)
        return apply_linear(self.linear_fc2, _SwiGLU.apply(both) if torch.is_grad_enabled() else swiglu(both))
