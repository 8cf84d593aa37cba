"""Adam with FusedAdam's interface, in plain PyTorch: with moments of fp32, or of 16 bits."""

from collections.abc import Iterator
from itertools import chain

import torch
from megatron.core.utils import to_local_if_dtensor
from torch import Tensor
from torch.optim.adamw import adamw

PIECE = 2**24  # elements whose 16-bit moments have fp32 copies at a time


class Adam(torch.optim.Optimizer):
    """Adam (1412.6980) or AdamW (1711.05101) with FusedAdam's interface: the step counter is in the param group.

    torch's AdamW keeps a step in every parameter's state, which a distributed-optimizer checkpoint cannot load.
    If Transformer Engine or Apex is installed, Megatron uses their FusedAdam instead of this class.
    """

    def __init__(self, params, lr, weight_decay, betas, eps, adam_w_mode=True, capturable=False):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "betas": betas, "eps": eps})
        self.adam_w_mode = adam_w_mode

    @torch.no_grad()
    def step(self, closure=None):
        """Updates every parameter that has a gradient."""
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            params = [p for p in group["params"] if p.grad is not None]
            if params:
                self._update(group, params)

    def _update(self, group: dict, params: list):
        for p in params:
            self.create_moments(p)
        columns = [(p, p.grad, self.state[p]["exp_avg"], self.state[p]["exp_avg_sq"]) for p in params]
        # Each rank updates its own rows of a sharded parameter.
        weights, grads, first, second = [list(map(to_local_if_dtensor, c)) for c in zip(*columns, strict=True)]
        self._update_tensors(group, weights, grads, first, second)

    def _update_tensors(self, group: dict, weights: list, grads: list, first: list, second: list):
        decay = group["weight_decay"]
        if not self.adam_w_mode:
            grads, decay = [g.add(p, alpha=decay) for g, p in zip(grads, weights, strict=True)], 0.0
        self._apply(group, decay, weights, grads, first, second)

    def create_moments(self, parameter: Tensor):
        """Creates the moments of a parameter that has none, as zeros."""
        if not self.state[parameter]:
            self.state[parameter] = {"exp_avg": torch.zeros_like(parameter), "exp_avg_sq": torch.zeros_like(parameter)}

    def _apply(self, group: dict, decay: float, weights: list, grads: list, first: list, second: list):
        # One tensor for all: one for each would be as many copies to a device.
        steps = list(torch.full((len(weights),), group["step"] - 1.0, device=weights[0].device).unbind())
        adamw(
            weights, grads, first, second, [], steps, fused=True, amsgrad=False,
            beta1=group["betas"][0], beta2=group["betas"][1], lr=group["lr"], weight_decay=decay, eps=group["eps"],
            maximize=False,
        )  # fmt: skip


class SmallMomentsAdam(Adam):
    """Adam that keeps its moments in types of its own and computes in fp32: `--use-precision-aware-optimizer`.

    After each update the moments are rounded to the nearest number of their type. Their fp32 copies are of about
    `PIECE` elements at a time.
    """

    def __init__(self, params, *args, moments: dict[str, torch.dtype], **kwargs):
        """`moments`: types by name, "exp_avg" and "exp_avg_sq"; the other arguments are those of `Adam`."""
        super().__init__(params, *args, **kwargs)
        self.moments = moments

    def create_moments(self, parameter: Tensor):
        """Creates the moments of a parameter that has none, as zeros of their types."""
        if not self.state[parameter]:
            self.state[parameter] = {name: torch.zeros_like(parameter, dtype=t) for name, t in self.moments.items()}

    def create_all_moments(self):
        """Creates the moments of all parameters that have none."""
        for group in self.param_groups:
            for parameter in group["params"]:
                self.create_moments(parameter)

    def load_state_dict(self, state_dict: dict):
        """As torch's, which gives each state the type of its parameter, and then in the types of the moments."""
        super().load_state_dict(state_dict)
        for state in self.state.values():
            state |= {name: state[name].to(dtype) for name, dtype in self.moments.items() if name in state}

    def _apply(self, group: dict, decay: float, weights: list, grads: list, first: list, second: list):
        for of_weights, of_grads, *kept in pieces(weights, grads, first, second):
            computed = [[moment.float() for moment in moments] for moments in kept]
            super()._apply(group, decay, of_weights, of_grads, *computed)
            for moment, result in zip(chain(*kept), chain(*computed), strict=True):
                if moment is not result:  # fp32
                    moment.copy_(result)


def pieces(*columns: list[Tensor]) -> Iterator[list[list[Tensor]]]:
    """Cuts tensors by rows; yields columns of views of at most `PIECE` elements together, or of one row.

    Args:
        columns: lists of the same length; tensors at one place of them have one shape.
    """
    piece, size = [], 0
    for tensors in zip(*columns, strict=True):
        tensors = torch.atleast_1d(*tensors)
        rows = max(1, PIECE * len(tensors[0]) // max(1, tensors[0].numel()))
        for parts in zip(*(tensor.split(rows) for tensor in tensors), strict=True):
            if piece and size + parts[0].numel() > PIECE:
                yield [list(column) for column in zip(*piece, strict=True)]
                piece, size = [], 0
            piece.append(parts)
            size += parts[0].numel()
    if piece:
        yield [list(column) for column in zip(*piece, strict=True)]
