"""The scalar head of critics and reward models."""

import torch
from torch import Tensor

from megarl.mcore import device


class ValueHead(torch.nn.Linear):
    """Maps a hidden state to one value, computed in fp32; zero-initialised, replicated over tensor-parallel ranks.

    It replaces the vocabulary's output layer and is saved under that name. Its weights have the model's precision:
    Megatron's 16-bit optimizer, which keeps fp32 copies, cannot save a model of mixed precisions.

    A loss of differences between scores sets `trains_bias` to False. The gradient of its bias is 0 but for rounding,
    which Adam would scale to a step of full size.
    """

    def __init__(self, config, group, bias: bool = True):
        super().__init__(config.hidden_size, 1, bias, dtype=config.params_dtype, device=device.device())
        self.group, self.trains_bias = group, True
        for parameter in self.parameters():
            torch.nn.init.zeros_(parameter)
            parameter.sequence_parallel = config.sequence_parallel  # ranks see only their tokens: sum grads

    def forward(self, hidden: Tensor) -> Tensor:
        """[T, H] -> [T] fp32.

        Not a matrix product with one column: its summation order depends on the number of rows.
        """
        values = (hidden.float() * self.weight.float()).sum(-1)
        if self.bias is None:
            return values
        bias = self.bias.float()
        return values + (bias if self.trains_bias else bias.detach() + 0 * bias)  # a gradient of exactly 0


def value_head_of(chunk) -> ValueHead | None:
    """The scalar head that a model's chunk ends with; None: it has none."""
    head = getattr(chunk, "output_layer", None)
    return head if isinstance(head, ValueHead) else None


def has_value_head(chunk) -> bool:
    """Whether a model's chunk ends with a scalar head."""
    return value_head_of(chunk) is not None
