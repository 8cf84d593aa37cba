"""What makes the modules of transformers batch-invariant on a CPU: a token's bits do not depend on the rows beside it.

Three rules, in addition to `kernels.batch_invariance`. Every product with a weight is megarl's, also those that a
module makes by `torch.nn.functional.linear` and `torch.matmul`. Experts are computed one after the other, and a token
adds its experts' outputs in ascending order. A pass has a multiple of `ROWS` rows: torch computes two vectors of 16
numbers at a time, and the rest of a tensor, or of a thread's share, by another exp or tanh.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from megarl.mcore import device
from megarl.mcore.kernels.batch_invariance import VECTOR
from megarl.mcore.kernels.linear import at_least_rows, linear

NAME = "megarl"
ROWS = 2 * VECTOR
_of_torch, _matmul = functional.linear, torch.matmul
# Where modules find what multiplies matrices without `linear`.
MATMUL = ((torch, "matmul"), (torch, "bmm"), (Tensor, "matmul"), (Tensor, "__matmul__"), (Tensor, "bmm"))


def missing_rows(tokens: int) -> int:
    """Rows that fill up a pass of so many tokens."""
    return 0 if device.has_cuda() else -tokens % (ROWS * torch.get_num_threads())


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`torch.nn.functional.linear` by megarl's kernels: x […, K], weight [N, K], bias [N] or None -> […, N]."""
    if x.dtype is not weight.dtype or x.numel() == 0:
        return _of_torch(x, weight, bias)
    rows = x.reshape(-1, x.shape[-1])
    return at_least_rows(linear, rows, weight.contiguous(), bias).view(*x.shape[:-1], len(weight))


def matrix_product(x: Tensor, y: Tensor) -> Tensor:
    """`torch.matmul`, by megarl's kernels if y is a matrix [K, N], as some modules multiply by their experts."""
    if y.dim() == 2 and x.dim() >= 2 and x.is_floating_point():
        return product(x, y.t())
    return _matmul(x, y)


@contextlib.contextmanager
def replaced(functions: Sequence[tuple[Any, str, Callable]]) -> Iterator[None]:
    """Context in which attributes are other functions: (owner, name, function) of each."""
    before = [getattr(owner, name) for owner, name, _ in functions]
    for each in functions:
        setattr(*each)
    try:
        yield
    finally:
        for (owner, name, _), function in zip(functions, before, strict=True):
            setattr(owner, name, function)


def installed(linear_function: Callable = product, matmul: Callable = matrix_product):
    """Context in which torch's products of matrices are these functions, which the layers of a module call."""
    return replaced([(functional, "linear", linear_function), *((*place, matmul) for place in MATMUL)])


def experts(self, hidden: Tensor, chosen: Tensor, gates: Tensor) -> Tensor:
    """transformers' experts function: hidden states [T, H], experts and gates [T, k] -> [T, H].

    A number of an expert that a module does not have adds nothing: transformers means experts of other ranks by it.
    """
    count, k = chosen.shape
    order = chosen.argsort(dim=1, stable=True)
    flat, gates = chosen.gather(1, order).flatten(), gates.gather(1, order)
    by_expert = flat.argsort(stable=True)
    counts = flat.bincount(minlength=self.num_experts).tolist()
    outputs = [
        at_least_rows(_one_expert, rows, self, expert) if expert < self.num_experts else torch.zeros_like(rows)
        for expert, rows in enumerate(hidden[by_expert // k].split(counts))
        if len(rows)
    ]
    weighted = torch.cat(outputs) * gates.flatten()[by_expert].unsqueeze(-1)
    places = torch.empty_like(by_expert)
    places[by_expert] = torch.arange(len(by_expert), device=places.device)
    total, *others = weighted[places].view(count, k, -1).unbind(1)
    for each in others:
        total = total + each
    return total.to(hidden.dtype)


def _one_expert(x: Tensor, self, expert: int) -> Tensor:
    """[n, H] -> [n, H], as transformers' own experts functions compute one expert."""
    up, up_bias = ("gate_up_proj", "gate_up_proj_bias") if self.has_gate else ("up_proj", "up_proj_bias")
    inner = _with_expert(x, self, expert, up, up_bias)
    inner = self._apply_gate(inner) if self.has_gate else self.act_fn(inner)
    out = _with_expert(inner, self, expert, "down_proj", "down_proj_bias")
    return self.post_expert_norm(out) if getattr(self, "has_post_expert_norm", False) else out


def _with_expert(x: Tensor, self, expert: int, weight: str, bias: str) -> Tensor:
    matrix = getattr(self, weight)[expert]
    added = getattr(self, bias)[expert] if self.has_bias else None
    return functional.linear(x, matrix.t() if self.is_transposed else matrix, added)


ALL_EXPERTS_FUNCTIONS.register(NAME, experts)
