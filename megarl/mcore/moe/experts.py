"""The experts of an MoE layer: Megatron's, with numbers of a token that do not depend on the other tokens."""

import torch
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from torch import Tensor

from megarl.mcore import device
from megarl.mcore.kernels.batch_invariance import MIN_ROWS


class Experts(SequentialMLP):
    """On a CPU an expert with fewer than `LEAST_ROWS` tokens gets its last one more often: matrix products of few rows
    take another kernel, and a token's numbers would depend on how many others its expert works for."""

    def forward(self, hidden: Tensor, tokens_per_expert: Tensor, gates: Tensor):
        """Tokens [T, H] in the order of their experts, and their gates [T] -> ([T, H], no bias)."""
        counts = tokens_per_expert.to(hidden.device, torch.int64)
        missing = torch.where(counts > 0, (MIN_ROWS - counts).clamp(min=0), 0)
        if device.has_cuda() or not missing.any():
            return super().forward(hidden, tokens_per_expert, gates)
        padded = counts + missing
        expert = torch.repeat_interleave(torch.arange(len(counts), device=hidden.device), padded)
        place = torch.arange(len(expert), device=hidden.device) - (padded.cumsum(0) - padded)[expert]
        rows = (counts.cumsum(0) - counts)[expert] + place.minimum(counts[expert] - 1)
        output, bias = super().forward(hidden[rows], padded, gates[rows])
        return output[place < counts[expert]], bias


class SharedExperts(SharedExpertMLP):
    """The experts that work for every token. Their gate is one column: a matrix product of so few has a kernel of its
    own on a CPU, whose sums depend on the number of tokens, so the column stands there several times."""

    def forward(self, hidden: Tensor) -> Tensor:
        """Tokens [T, 1, H] -> [T, 1, H]."""
        output, _ = MLP.forward(self, hidden)
        if not self.use_shared_expert_gate:
            return output
        columns = 1 if device.has_cuda() else MIN_ROWS
        gate = torch.nn.functional.linear(hidden, self.gate_weight.expand(columns, -1))[..., :1]
        return output * torch.sigmoid(gate)
