"""What makes the modules of transformers batch-invariant: a token's bits do not depend on the rows beside it.

Three rules for a CPU, in addition to `kernels.batch_invariance`. Every product with a weight is megarl's, also those
that a module makes by torch's `linear`, `matmul`, `bmm` and `addmm`. Experts are computed one after the other, and a
token adds its experts' outputs in ascending order. A pass has a multiple of `ROWS` rows: torch computes two vectors of
16 numbers at a time, and the rest of a tensor, or of a thread's share, by another exp or tanh.

On CUDA products have fixed tiles, and norms a program for each row, in an exact rollout alone. In other ones experts
are grouped products, for which the host need know no number.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from megarl.mcore import device
from megarl.mcore.kernels.batch_invariance import VECTOR, is_exact
from megarl.mcore.kernels.linear import Product, at_least_rows, exact_product, linear, matmul

NAME = "megarl"
ROWS = 2 * VECTOR
_of_torch, _matmul, _addmm = functional.linear, torch.matmul, torch.addmm
# Where modules find what multiplies matrices without `linear`.
MATMUL = ((torch, "matmul"), (torch, "bmm"), (Tensor, "matmul"), (Tensor, "__matmul__"), (Tensor, "bmm"))


def missing_rows(tokens: int) -> int:
    """Rows that fill up a pass of so many tokens."""
    return 0 if device.has_cuda() else -tokens % (ROWS * torch.get_num_threads())


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None, multiply: Product = matmul) -> Tensor:
    """`torch.nn.functional.linear` by megarl's kernels: x […, K], weight [N, K], bias [N] or None -> […, N]."""
    if x.dtype is not weight.dtype or x.numel() == 0:
        return _of_torch(x, weight, bias)
    rows = x.reshape(-1, x.shape[-1])
    return at_least_rows(linear, rows, weight.contiguous(), bias, multiply).view(*x.shape[:-1], len(weight))


def matrix_product(x: Tensor, y: Tensor) -> Tensor:
    """`torch.matmul`, by megarl's kernels if y is a matrix [K, N], as some modules multiply by their experts."""
    if y.dim() == 2 and x.dim() >= 2 and x.is_floating_point():
        return product(x, y.t())
    return _matmul(x, y)


def no_product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The first terms of a product's sums: of its shape, and made of the same tensors."""
    first = x[..., :1] * weight[:, 0].to(x.dtype)
    return first if bias is None else first + bias.to(x.dtype)


def no_matmul(x: Tensor, y: Tensor) -> Tensor:
    """As `no_product`, of `torch.matmul`."""
    return _matmul(x, y) if y.dim() < 2 else _matmul(x[..., :1], y[..., :1, :])


def product_of(config) -> Callable:
    """The `product` of a model with Megatron's config."""
    return functools.partial(product, multiply=exact_product()) if is_exact(config) else product


@contextlib.contextmanager
def replaced(functions: Sequence[tuple[Any, str, Callable]]) -> Iterator[None]:
    """Context in which attributes are other functions: (owner, name, function) of each."""
    before = [getattr(owner, name) for owner, name, _ in functions]
    for owner, name, function in functions:
        setattr(owner, name, function)
    try:
        yield
    finally:
        for (owner, name, _), function in zip(functions, before, strict=True):
            setattr(owner, name, function)


@contextlib.contextmanager
def installed(
    linear_function: Callable = product, matmul: Callable = matrix_product, experts_function: Callable | None = None
) -> Iterator[None]:
    """Context in which torch's products of matrices are these functions, which the layers of a module call.
    `experts_function`: in place of `experts`."""

    def addmm(bias: Tensor, x: Tensor, y: Tensor, **scales) -> Tensor:  # of `Conv1D`, a linear layer
        is_linear = bias.dim() == 1 and not scales
        return linear_function(x, y.t(), bias) if is_linear else _addmm(bias, x, y, **scales)

    if experts_function is not None:
        ALL_EXPERTS_FUNCTIONS[NAME] = experts_function
    try:
        own = [(functional, "linear", linear_function), (torch, "addmm", addmm)]
        with replaced(own + [(*place, matmul) for place in MATMUL]):
            yield
    finally:
        if experts_function is not None:
            ALL_EXPERTS_FUNCTIONS[NAME] = experts


def use_row_norms(module: nn.Module, compute: Callable | None = None):
    """Gives the norms of a module, those that compute a known formula, a kernel with one program for each row.
    `compute`: in place of it."""
    for each in module.modules():
        if (shift := _norm_of(each)) is not None:
            each.forward = functools.partial(compute or _row_norm, each, shift)


def _row_norm(norm: Any, shift: float, x: Tensor) -> Tensor:
    from megarl.mcore.kernels.cuda.row_norm import row_norm  # needs Triton

    bias = getattr(norm, "bias", None)
    return row_norm(x, shift + norm.weight.float(), None if bias is None else bias.float(), _epsilon(norm) or 0.0)


def _epsilon(norm: nn.Module) -> float | None:
    return getattr(norm, "variance_epsilon", getattr(norm, "eps", getattr(norm, "epsilon", None)))


@torch.no_grad()
def _norm_of(module: Any) -> float | None:
    """What a norm adds to its weight: 0 or 1. None: the module is none, or of another formula."""
    own, eps = dict(module._parameters), _epsilon(module)
    weight, bias = own.get("weight"), own.get("bias")
    if weight is None or weight.dim() != 1 or not isinstance(eps, float) or len(own) > 1 + (bias is not None):
        return None
    x = torch.linspace(-1, 2, 3 * len(weight)).sin().view(3, -1)
    try:
        module._parameters.update(dict.fromkeys(own, x[0]))
        found = module(x)
    except Exception:  # it takes other inputs
        return None
    finally:
        module._parameters.update(own)
    centred = x if bias is None else x - x.mean(-1, keepdim=True)
    normed = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    for shift in (0.0, 1.0):
        wanted = normed * (shift + x[0]) + (0 if bias is None else x[0])
        if torch.is_tensor(found) and found.shape == x.shape and torch.allclose(found, wanted, atol=1e-5):
            return shift
    return None


def experts(self, hidden: Tensor, chosen: Tensor, gates: Tensor) -> Tensor:
    """transformers' experts function: hidden states [T, H], experts and gates [T, k] -> [T, H].

    A number of an expert that a module does not have adds nothing: transformers means experts of other ranks by it.
    """
    count, k = chosen.shape
    order = chosen.argsort(dim=1, stable=True)
    flat, gates = chosen.gather(1, order).flatten(), gates.gather(1, order)
    by_expert = flat.argsort(stable=True)
    compute = _grouped if is_grouped(self) and functional.linear is product else _one_by_one
    weighted = compute(self, hidden[by_expert // k], flat[by_expert]) * gates.flatten()[by_expert].unsqueeze(-1)
    places = torch.empty_like(by_expert)
    places[by_expert] = torch.arange(len(by_expert), device=places.device)
    total, *others = weighted[places].view(count, k, -1).unbind(1)
    for each in others:
        total = total + each
    return total.to(hidden.dtype)


def is_grouped(module: nn.Module) -> bool:
    """Whether grouped products compute a module's experts: on CUDA, in bf16, of sizes that are multiples of 8."""
    weights = [weight for name, weight in module.named_parameters(recurse=False) if name.endswith("_proj")]
    return all(w.is_cuda and w.dtype is torch.bfloat16 and not (w.shape[1] % 8 or w.shape[2] % 8) for w in weights)


def reads_host(module: nn.Module) -> bool:
    """Whether a module has experts of which the host must know how many rows each has."""
    return any(hasattr(each, "is_transposed") and not is_grouped(each) for each in module.modules())


def _grouped(self, x: Tensor, numbers: Tensor) -> Tensor:
    """Rows [P, H] of experts with ascending numbers [P] -> [P, H], by products of all experts together."""
    ends = torch.searchsorted(numbers, torch.arange(self.num_experts, device=x.device), right=True).int()
    is_own, own = (numbers < self.num_experts).unsqueeze(-1), numbers.clamp(max=self.num_experts - 1)

    def with_experts(x: Tensor, weight: str, bias: str) -> Tensor:
        matrices = getattr(self, weight)
        matrices = matrices if self.is_transposed else matrices.transpose(1, 2)
        # What a product and its gradient have in rows of no expert is not defined.
        out = torch.where(is_own, functional.grouped_mm(torch.where(is_own, x, 0), matrices, offs=ends), 0)
        return out + getattr(self, bias)[own] if self.has_bias else out

    return torch.where(is_own, _expert(self, x, with_experts), 0)


def _one_by_one(self, x: Tensor, numbers: Tensor) -> Tensor:
    """As `_grouped`, expert by expert."""
    counts = numbers.bincount(minlength=self.num_experts).tolist()
    outputs = [
        at_least_rows(_one_expert, rows, self, expert) if expert < self.num_experts else torch.zeros_like(rows)
        for expert, rows in enumerate(x.split(counts))
        if len(rows)
    ]
    return torch.cat(outputs)


def _one_expert(x: Tensor, self, expert: int) -> Tensor:
    def with_expert(x: Tensor, weight: str, bias: str) -> Tensor:
        matrix = getattr(self, weight)[expert]
        added = getattr(self, bias)[expert] if self.has_bias else None
        return functional.linear(x, matrix.t().contiguous() if self.is_transposed else matrix, added)

    return _expert(self, x, with_expert)


def _expert(self, x: Tensor, multiply: Callable[[Tensor, str, str], Tensor]) -> Tensor:
    """[n, H] -> [n, H], as transformers' own experts functions compute one expert; `multiply`: rows by weights, and
    biases added, of these names."""
    up, up_bias = ("gate_up_proj", "gate_up_proj_bias") if self.has_gate else ("up_proj", "up_proj_bias")
    inner = multiply(x, up, up_bias)
    inner = self._apply_gate(inner) if self.has_gate else self.act_fn(inner)
    out = multiply(inner, "down_proj", "down_proj_bias")
    return self.post_expert_norm(out) if getattr(self, "has_post_expert_norm", False) else out


ALL_EXPERTS_FUNCTIONS.register(NAME, experts)
