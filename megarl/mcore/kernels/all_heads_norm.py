"""RMSNorm over the channels of all heads together, which tensor-parallel ranks share (OLMo 2, 2501.00656 §3.2)."""

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor
from torch.autograd.function import once_differentiable

from megarl.mcore import device
from megarl.mcore.kernels.batch_invariance import is_exact


def _mean(x: Tensor, group) -> Tensor:
    """[T, C] of this rank -> [T, 1] mean over the channels of all ranks."""
    mean = x.mean(-1, keepdim=True)
    if group.size() > 1:
        dist.all_reduce(mean, group=group)
        mean.div_(group.size())
    return mean


class _SplitRMSNorm(torch.autograd.Function):
    """x [T, C] and weight [C] of this rank -> x · r · weight with r = (mean x² + ε)^−½ over all ranks."""

    @staticmethod
    def forward(ctx, x, weight, eps, group):
        scale = _mean(x.square(), group).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        ctx.group = group
        return (x * scale).mul_(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        """∂x = r · (grad · weight − x · r² · mean(grad · weight · x)), ∂weight = Σ grad · x · r over tokens."""
        x, weight, scale = ctx.saved_tensors
        scaled = grad * weight
        correction = _mean(scaled * x, ctx.group).mul_(scale.square())
        return scaled.sub_(x * correction).mul_(scale), (grad * x * scale).sum(0), None, None


class AllHeadsRMSNorm(torch.nn.Module):
    """Norms [T, 1, heads, D] over heads and channels, in fp32; its weights are split with the heads.

    Where ranks share a head, each has the whole weights, and backward sums their gradients. The means are those over
    all heads, because all have equally many ranks.
    """

    def __init__(self, config, heads: int, channels: int, group, shared=None):
        """`heads`: of this rank; `group`: the tensor-parallel group; `shared`: the `SharedGroup` whose head it is."""
        super().__init__()
        self.eps, self.group, width = config.layernorm_epsilon, group, heads * channels
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
            from megarl.mcore.kernels.cuda.row_norm import row_norm  # needs Triton

            return row_norm(x.flatten(1), self.weight.float(), None, self.eps).view_as(x)
        wide = x.flatten(1).to(torch.promote_types(x.dtype, torch.float32))
        weight = self.weight.to(wide.dtype)
        if self._here is not None:
            weight = copy_to_tensor_model_parallel_region(weight, group=self.group)[self._here]
        return _SplitRMSNorm.apply(wide, weight, self.eps, self.group).to(x.dtype).view_as(x)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets=(), metadata=None) -> dict:
        """Describes the weights to checkpoints, split over tensor-parallel ranks unless each has the whole."""
        state, replicas = self.state_dict(prefix="", keep_vars=True), metadata["dp_cp_group"]
        axes = {"weight": 0} if self._here is None else {}
        return make_sharded_tensors_for_checkpoint(
            state, prefix, axes, sharded_offsets, tp_group=self.group, dp_cp_group=replicas
        )
