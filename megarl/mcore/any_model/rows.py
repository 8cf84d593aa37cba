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
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from megarl.mcore import device
from megarl.mcore.kernels import native
from megarl.mcore.kernels.batch_invariance import VECTOR
from megarl.mcore.kernels.linear import Product, at_least_rows, linear, matmul, prepacked
from megarl.mcore.kernels.norm import rms_norm

NAME = "megarl"
ROWS = 2 * VECTOR
SIZES = 1e-3, 1.0, 100.0  # of inputs: where an ε shows, and above what a part might clip
TOLERANCE = 2e-6  # beside the largest number
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


def prepacked_product(owner: Any, x: Tensor, width: int, bias: Tensor | None) -> Tensor | None:
    """x […, K] -> […, width] by the prepacked weight of its owner; None if it has none, and with gradients."""
    packed = None if torch.is_grad_enabled() else prepacked(owner)
    if packed is None:
        return None
    return native.ops.linear(x.contiguous(), x.new_empty(1).expand(width, x.shape[-1]), packed, bias)


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
        if bias.dim() > 1 or scales:
            return _addmm(bias, x, y, **scales)
        out = prepacked_product(y, x, len(bias), bias) if linear_function is product else None
        return linear_function(x, y.t(), bias) if out is None else out

    before = ALL_EXPERTS_FUNCTIONS[NAME]
    ALL_EXPERTS_FUNCTIONS.register(NAME, experts_function or before)
    try:
        own = [(functional, "linear", linear_function), (torch, "addmm", addmm)]
        with replaced(own + [(*place, matmul) for place in MATMUL]):
            yield
    finally:
        ALL_EXPERTS_FUNCTIONS.register(NAME, before)


# -- norms -------------------------------------------------------------------------------------------------------------


class ModuleNorm:
    """(x − m) · r · (offset + weight) + bias with r = (mean (x − m)² + ε)^−½, where m is the mean of x (1607.06450), or
    without a bias 0 (1910.07467 eq. 4)."""

    def __init__(self, part: Any, eps: float, offset: float):
        self.part, self.eps, self.offset = part, eps, offset

    def weight(self) -> Tensor:
        """What the norm multiplies by, [H]."""
        weight = self.part.weight
        return (self.offset + weight if self.offset else weight).contiguous()

    def bias(self) -> Tensor | None:
        """[H]."""
        return self.part._parameters.get("bias")

    def __call__(self, hidden_states: Tensor) -> Tensor:
        """[…, H] -> […, H], by the compiled kernels, of a norm without a bias."""
        return rms_norm(hidden_states, self.weight(), self.eps)

    def formula(self, x: Tensor) -> Tensor:
        """[…, H] -> […, H]."""
        bias = self.bias()
        x = x if bias is None else x - x.mean(-1, keepdim=True)
        normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight()
        return normed if bias is None else normed + bias


@torch.no_grad()
def norm_of(part: Any) -> ModuleNorm | None:
    """The norm that a module is; None for another module. It is called with inputs of several sizes."""
    own = dict(part._parameters)
    weight = own.get("weight")
    if weight is None or weight.dim() != 1 or own.keys() > {"weight", "bias"} or any(True for _ in part.buffers()):
        return None
    if len(inspect.signature(part.forward).parameters) != 1:  # such as a gate
        return None
    x = torch.linspace(-1, 2, 3 * len(weight)).sin().view(3, -1)
    try:
        part._parameters.update({name: None if each is None else x[0] for name, each in own.items()})
        pairs = [(size * x, part(size * x)) for size in SIZES]
        found = (ModuleNorm(part, eps, offset) for eps in floats_of(part) for offset in (0.0, 1.0))
        return next((norm for norm in found if all(agree(norm.formula(x), wanted) for x, wanted in pairs)), None)
    except Exception:  # it takes other inputs
        return None
    finally:
        part._parameters.update(own)


def agree(found: Tensor, wanted: Tensor, limit: float = TOLERANCE) -> bool:
    """Whether numbers differ by no more than `limit` beside the largest."""
    return bool((found - wanted).abs().max() <= limit * wanted.abs().max())


def floats_of(part: nn.Module) -> list[float]:
    """Numbers that a module has as attributes."""
    return [value for value in vars(part).values() if isinstance(value, float)]


def use_row_norms(module: nn.Module, compute: Callable | None = None):
    """Gives the norms of a module a kernel with one program for each row. `compute`: in place of it."""
    for each in module.modules():
        if (norm := norm_of(each)) is not None:
            each.forward = functools.partial(compute or _row_norm, norm)


def _row_norm(norm: ModuleNorm, x: Tensor) -> Tensor:
    from megarl.mcore.kernels.cuda.exact_rows import row_norm  # needs Triton

    bias = norm.bias()
    return row_norm(x, norm.offset + norm.part.weight.float(), None if bias is None else bias.float(), norm.eps)


# -- experts -----------------------------------------------------------------------------------------------------------


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
    """Whether grouped products compute a module's experts: on CUDA, in bf16, of sizes that are multiples of 8. Of other
    experts the host must know how many rows each has."""
    weights = [weight for name, weight in module.named_parameters(recurse=False) if name.endswith("_proj")]
    return all(w.is_cuda and w.dtype is torch.bfloat16 and not (w.shape[1] % 8 or w.shape[2] % 8) for w in weights)


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

    def one(x: Tensor, expert: int) -> Tensor:
        def with_expert(x: Tensor, weight: str, bias: str) -> Tensor:
            matrix = getattr(self, weight)[expert]
            added = getattr(self, bias)[expert] if self.has_bias else None
            return functional.linear(x, matrix.t().contiguous() if self.is_transposed else matrix, added)

        return _expert(self, x, with_expert)

    counts = numbers.bincount(minlength=self.num_experts).tolist()
    outputs = [
        at_least_rows(one, rows, expert) if expert < self.num_experts else torch.zeros_like(rows)
        for expert, rows in enumerate(x.split(counts))
        if len(rows)
    ]
    return torch.cat(outputs)


def _expert(self, x: Tensor, multiply: Callable[[Tensor, str, str], Tensor]) -> Tensor:
    """[n, H] -> [n, H], as transformers' own experts functions compute one expert; `multiply`: rows by weights, and
    biases added, of these names."""
    up, up_bias = ("gate_up_proj", "gate_up_proj_bias") if self.has_gate else ("up_proj", "up_proj_bias")
    inner = multiply(x, up, up_bias)
    inner = self._apply_gate(inner) if self.has_gate else self.act_fn(inner)
    out = multiply(inner, "down_proj", "down_proj_bias")
    return self.post_expert_norm(out) if getattr(self, "has_post_expert_norm", False) else out


ALL_EXPERTS_FUNCTIONS.register(NAME, experts)
