"""The scalar head of critics and reward models."""

import torch
from torch import Tensor

from megarl.mcore import device


class ValueHead(torch.nn.Linear):
    """Maps a hidden state to one value, computed in fp32; zero-initialised, replicated over tensor-parallel ranks.

    It replaces the vocabulary's output layer and is saved under that name. Its weights have the model's precision:
    Megatron's 16-bit optimizer, which keeps fp32 copies, cannot save a model of mixed precisions.
    """

    def __init__(self, config, group, bias: bool = True):
        super().__init__(config.hidden_size, 1, bias, dtype=config.params_dtype, device=device.device())
        self.group = group
        for parameter in self.parameters():
            torch.nn.init.zeros_(parameter)
            parameter.sequence_parallel = config.sequence_parallel  # ranks see only their tokens: sum grads

    def forward(self, hidden: Tensor) -> Tensor:
        """[T, H] -> [T] fp32.

        Not a matrix product with one column: its summation order depends on the number of rows.
        """
        values = (hidden.float() * self.weight.float()).sum(-1)
        return values if self.bias is None else values + self.bias.float()


def has_value_head(chunk) -> bool:
    """Whether a model's chunk ends with a scalar head."""
    return isinstance(getattr(chunk, "output_layer", None), ValueHead)
