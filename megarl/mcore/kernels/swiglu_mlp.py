"""Megatron's MLP of a dense layer, with a SwiGLU that makes fewer passes over the activations."""

import torch
from megatron.core.transformer.mlp import MLP
from torch import Tensor
from torch.autograd.function import once_differentiable

from megarl.mcore.kernels import native
from megarl.mcore.kernels.linear import apply_linear
from megarl.mcore.kernels.silu import silu


class _SwiGLU(torch.autograd.Function):
    """x […, 2F] -> […, F] = silu(first half) · second half (arXiv 2002.05202 eq. 5); saves only x for backward."""

    @staticmethod
    def forward(ctx, x):
        x = x.contiguous()
        ctx.save_for_backward(x)
        return swiglu(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        """[…, F] -> […, 2F], in one pass where a kernel computes it."""
        (x,) = ctx.saved_tensors
        if native.supports(x, grad):
            return native.ops.swiglu_backward(grad.contiguous(), x)
        if x.is_cuda:
            from megarl.mcore.kernels.cuda.swiglu_rows import swiglu_rows_backward  # needs Triton

            return swiglu_rows_backward(grad.reshape(-1, grad.shape[-1]).contiguous(), x.flatten(0, -2)).view(x.shape)
        (gate, up), grad_x = x.chunk(2, dim=-1), torch.empty_like(x)
        grad_gate, grad_up = grad_x.chunk(2, dim=-1)
        torch.mul(grad, torch.nn.functional.silu(gate), out=grad_up)
        torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=grad_gate)
        return grad_x


def swiglu(x: Tensor) -> Tensor:
    """[…, 2F] -> […, F]; differentiable only through `SwiGLUMLP`."""
    if native.supports(x):
        return native.ops.swiglu(x.contiguous())
    if x.is_cuda:
        from megarl.mcore.kernels.cuda.swiglu_rows import swiglu_rows  # needs Triton

        return swiglu_rows(x.reshape(-1, x.shape[-1]).contiguous()).view(*x.shape[:-1], x.shape[-1] // 2)
    gate, up = x.chunk(2, dim=-1)
    return silu(gate).mul_(up)


def is_plain_swiglu(config) -> bool:
    """Whether MLPs or experts with this config are two products with `swiglu` between them."""
    c = config
    return (
        c.gated_linear_unit and c.activation_func is silu and not c.add_bias_linear and not c.glu_linear_offset
        and c.activation_func_clamp_value is None and not c.bias_activation_fusion and not c.use_te_activation_func
    )  # fmt: skip


class SwiGLUMLP(MLP):
    """MLP without the zero offset that Megatron adds to the linear half; saves one tensor for backward, not four."""

    def __init__(self, config, *args, **kwargs):
        super().__init__(config, *args, **kwargs)
        self.is_plain_swiglu = is_plain_swiglu(self.config)

    def forward(self, hidden: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor | None]:
        """[T, 1, H] (under sequence parallelism, this rank's tokens) -> output of that shape, and a bias to add."""
        is_called_plainly = all(x is None for x in (*args, *kwargs.values()))  # Megatron's layer passes empty options
        if not self.is_plain_swiglu or not is_called_plainly:
            return super().forward(hidden, *args, **kwargs)
        both, _ = apply_linear(self.linear_fc1, hidden)
        return apply_linear(self.linear_fc2, _SwiGLU.apply(both) if torch.is_grad_enabled() else swiglu(both))
