"""Megatron's experts, made batch-invariant: a token's output does not depend on the other tokens.

Experts may read and write latents instead of hidden states (Nemotron 3, `--moe-latent-size`). A projection of the
hidden states goes to the experts, and one of the sum of their results comes back; the router and the shared expert read
hidden states. Tokens travel to experts on other ranks as latents.
"""

import contextlib
import functools
from collections.abc import Iterator

import torch
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe import moe_layer
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from torch import Tensor

from megarl.batch import expand_counts
from megarl.mcore import device
from megarl.mcore.kernels.batch_invariance import MIN_ROWS, is_exact
from megarl.mcore.kernels.linear import ReplicatedLinear, at_least_rows, forward_product, linear


class Experts(SequentialMLP):
    """Repeats the last token of an expert with fewer than `MIN_ROWS` tokens on a CPU: matrix products of fewer rows use
    another kernel, so a token's output would depend on how many tokens its expert has."""

    def __init__(self, num_local_experts: int, config, *args, **kwargs):
        super().__init__(num_local_experts, config, *args, **kwargs)
        if not config.add_bias_linear:
            return
        for expert in self.local_experts:
            # Megatron adds the bias in place, which autograd forbids for a view, and marks its gradient to be summed
            # over tensor-parallel ranks, which have other experts or other tokens of all ranks.
            expert.linear_fc2.register_forward_hook(lambda module, inputs, result: (result[0].clone(), result[1]))
            expert.linear_fc2.bias.sequence_parallel = False

    def forward(self, hidden: Tensor, tokens_per_expert: Tensor, gates: Tensor):
        """Tokens [T, H], grouped by expert, and their gates [T] -> ([T, H], no bias)."""
        counts = tokens_per_expert.to(hidden.device, torch.int64)
        missing = torch.where(counts > 0, (MIN_ROWS - counts).clamp(min=0), 0)
        if device.has_cuda() or not missing.any():
            return super().forward(hidden, tokens_per_expert, gates)
        padded = counts + missing
        expert, offset = expand_counts(padded)
        rows = (counts.cumsum(0) - counts)[expert] + offset.minimum(counts[expert] - 1)
        output, bias = super().forward(hidden[rows], padded, gates[rows])
        return output[offset < counts[expert]], bias


class SharedExperts(SharedExpertMLP):
    """Shared experts, which every token uses. Their gate has one column; on a CPU BLAS has kernels for so few columns
    whose sums depend on the number of tokens, so the column is repeated, and fp32 uses the product of linear layers."""

    def forward(self, hidden: Tensor) -> Tensor:
        """Tokens [T, 1, H] -> [T, 1, H]."""
        output, _ = MLP.forward(self, hidden)
        if not self.use_shared_expert_gate:
            return output
        if is_exact(self.config):
            gate = linear(hidden, self.gate_weight, None, forward_product(self.config))
        elif device.has_cuda():
            gate = torch.nn.functional.linear(hidden, self.gate_weight)
        else:
            gate = at_least_rows(linear, hidden, self.gate_weight.expand(MIN_ROWS, -1))[..., :1]
        return output * torch.sigmoid(gate)


class LatentProjection(ReplicatedLinear):
    """One of the two projections of latents; whole on every tensor-parallel rank."""

    def __init__(self, columns: int, rows: int, *, config, group, **_):
        """`group`: tensor-parallel ranks; the others are arguments of Transformer Engine's layer."""
        super().__init__(columns, rows, config, group)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """[T, 1, K] -> [T, 1, N], and no bias."""
        return super().forward(x), None


@contextlib.contextmanager
def own_projections(group) -> Iterator[None]:
    """Context in which Megatron's MoE layer is built with these projections: its own need Transformer Engine.

    `group`: tensor-parallel ranks.
    """
    of_megatron = moe_layer.HAVE_TE, moe_layer.TELinear
    moe_layer.HAVE_TE, moe_layer.TELinear = True, functools.partial(LatentProjection, group=group)
    try:
        yield
    finally:
        moe_layer.HAVE_TE, moe_layer.TELinear = of_megatron
