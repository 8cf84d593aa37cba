"""A linear layer with low-rank factors: y = x·Wᵀ + s·(x·Aᵀ)·Bᵀ and its gradients, and the weight that contains them."""

import math
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from torch import Tensor
from torch.distributed.tensor import DTensor

from megarl.mcore.kernels import with_gradient
from megarl.mcore.kernels.linear import (
    Product,
    ReplicatedLinear,
    forward_product,
    gather_tokens,
    input_gradient,
    matmul,
    start_reduction,
    weight_gradient,
)
from megarl.mcore.lora.targets import ROW_PARALLEL, LoRASettings, Projection
from megarl.mcore.model.initialization import draw_uniform
from megarl.mcore.parallel.fsdp import range_here, rows_here


class LowRankProduct(NamedTuple):
    """How a layer multiplies; factors are passed as [(A [r, K], B [n, r])], one pair per projection.

    Under tensor parallelism a column-parallel layer holds its rows of B and the whole A; a row-parallel one its columns
    of A and the whole B; one whose ranks share query groups, and the first of Mamba-2, the whole A and the whole B, of
    which it uses rows.
    What is whole gets a part of its gradient on each rank; `group` adds them up.
    """

    rows: tuple[slice | Tensor, ...]  # of the output, for each projection
    scale: float
    is_merged: bool  # the weight is W + s·B·A; else the factors' product is added to the output
    is_row_parallel: bool
    group: Any  # tensor-parallel ranks of the layer; None: each has the whole layer
    multiply: Product = matmul  # in forward passes
    held: tuple[Tensor, ...] | None = None  # which rows of each B it uses, if each rank has the whole; None: all

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None, factors: list[tuple[Tensor, Tensor]]) -> Tensor:
        """[…, K] -> […, N]. Rollout and training call it, so their results are equal."""
        output = self.multiply(x, weight, bias)
        for rows, (a, b) in zip(self.rows, self.used(factors), strict=True) if not self.is_merged else ():
            if not len(b):
                continue
            change = self.multiply(self.multiply(x, a), b).mul_(self.scale)
            if isinstance(rows, slice):
                output[..., rows] += change
            else:
                output.index_add_(-1, rows, change)
        return output

    @property
    def has_whole_b(self) -> bool:
        """Whether each tensor-parallel rank has the whole B."""
        return self.is_row_parallel or self.group is None or self.held is not None

    def used(self, factors: list[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
        """The factors with those rows of B that this rank uses."""
        if self.held is None:
            return factors
        return [(a, b[held]) for (a, b), held in zip(factors, self.held, strict=True)]

    def projected_gradients(self, grad: Tensor, factors: list[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
        """Output gradient […, N] -> for each projection its columns g […, n], and s·g·B […, r]."""
        found = []
        for rows, (_, b) in zip(self.rows, self.used(factors), strict=True):
            g = grad[..., rows].contiguous()  # without columns on a rank that has no row of the projection
            gb = input_gradient(g, b).mul_(self.scale) if len(b) else g.new_zeros(*g.shape[:-1], b.shape[1])
            found.append((g, gb))
        return found

    def factor_gradients(
        self, projected: list[tuple[Tensor, Tensor]], x: Tensor, factors: list[tuple[Tensor, Tensor]]
    ) -> list[Tensor]:
        """[dA, dB, dA, dB, …]: dA = s·(g·B)ᵀ·x and dB = s·gᵀ·(x·Aᵀ), summed over tensor-parallel ranks if whole."""
        grads = []
        for i, ((g, gb), (a, b)) in enumerate(zip(projected, factors, strict=True)):
            of_b = weight_gradient(g, matmul(x, a)).mul_(self.scale) if g.shape[-1] else g.new_zeros(0, len(a))
            of_b = of_b if self.held is None else torch.zeros_like(b).index_copy_(0, self.held[i], of_b)
            grads += [weight_gradient(gb, x), of_b]
        whole = grads[1::2] if self.is_row_parallel else grads if self.has_whole_b else grads[::2]
        if self.group is not None and dist.get_world_size(self.group) > 1:
            flat = torch.cat([part.flatten() for part in whole])
            dist.all_reduce(flat, group=self.group)
            for part, total in zip(whole, flat.split([part.numel() for part in whole]), strict=True):
                part.copy_(total.view(part.shape))
        return grads


def _adapted_gradient(ctx, grad):
    """Overlaps the collective of the input gradient with the factors' gradients."""
    x, weight, *flat = ctx.saved_tensors
    product, factors = ctx.product, _pairs(flat)
    grad_x = handle = None
    projected = product.projected_gradients(grad, factors)
    if ctx.needs_input_grad[0]:
        whole = input_gradient(grad, weight)
        for (_, gb), (a, _) in zip(projected, factors, strict=True) if not product.is_merged else ():
            whole += input_gradient(gb, a)
        grad_x, handle = start_reduction(whole, product.group, ctx.sequence_parallel, ctx.sums_input_gradient)
    x = gather_tokens(x, product.group) if ctx.sequence_parallel else x
    grads = product.factor_gradients(projected, x, factors)
    if handle is not None:
        handle.wait()
    return grad_x, None, None, None, None, None, *grads


@with_gradient(_adapted_gradient)
def _adapted_linear(ctx, x, weight, bias, product, sums_input_gradient, sequence_parallel, *factors):
    """A linear layer whose weight gets no gradient, only its factors do.

    Arguments as of `kernels.linear`; `factors` are A, B, A, B, …
    """
    ctx.save_for_backward(x, weight, *factors)
    ctx.product, ctx.sums_input_gradient = product, sums_input_gradient
    ctx.sequence_parallel = sequence_parallel
    x = gather_tokens(x, product.group) if sequence_parallel else x
    return product.forward(x, weight, bias, _pairs(factors))


def _split_axis(layer, projection: Projection) -> int | None:
    """The axis along which tensor-parallel ranks share the layer's weight; None: each has the whole."""
    if hasattr(layer, "split_axis"):  # of transformers
        return layer.split_axis
    return None if type(layer) is ReplicatedLinear else int(projection.name in ROW_PARALLEL)


def _pairs(flat) -> list[tuple[Tensor, Tensor]]:
    return list(zip(flat[::2], flat[1::2], strict=True))


class AdaptedLinear(torch.nn.Module):
    """The factors of a column- or row-parallel linear layer; unless attached, the layer does not know of them."""

    def __init__(self, name: str, layer, projections: list[Projection], lora: LoRASettings, seed: int):
        """Draws A as PEFT does, from the seed and the layer's name, equally in every layout; B is 0.

        Args:
            name: of the layer in the whole model, experts numbered over all ranks.
            layer: Megatron's linear layer.
        """
        super().__init__()
        self._layer = (layer,)  # in a tuple: the model already has it as a module
        self._sharded: tuple[Tensor, ...] = ()
        self.whole_name, weight = name, layer.weight
        axis = _split_axis(layer, projections[0])
        self.is_row_parallel, self.is_replicated = axis == 1, axis is None
        self.product = LowRankProduct(
            rows=tuple(projection.rows for projection in projections),
            scale=lora.scale,
            is_merged=weight.dtype is torch.float32,
            is_row_parallel=self.is_row_parallel,
            group=None if self.is_replicated else layer.tp_group,
            multiply=forward_product(layer.config),
            held=tuple(projection.held for projection in projections) if projections[0].held is not None else None,
        )
        # W, where the layer's weight has the factors merged; under FSDP this rank's rows.
        self.base: torch.nn.Parameter | None = None
        self.factors = torch.nn.ModuleDict()  # by projection: a [r, K] and b [n, r] on this rank
        size, rank = dist.get_world_size(layer.tp_group), dist.get_rank(layer.tp_group)
        for projection in projections:
            columns = weight.shape[1] * (size if self.is_row_parallel else 1)
            bound = 1 / math.sqrt(columns)  # torch's kaiming_uniform_ with a = √5
            a = draw_uniform(f"{name}.{projection.name}.lora_A", seed, (lora.rank, columns), bound)
            a = a.chunk(size, 1)[rank] if self.is_row_parallel else a
            like = {"dtype": weight.dtype, "device": weight.device}
            b = torch.zeros(projection.height, lora.rank, **like)
            self.factors[projection.name] = torch.nn.ParameterDict({"a": a.to(**like).contiguous(), "b": b})
        self._mark_parallel(weight)

    def attach(self, is_used: bool = True):
        """Makes the layer train the factors, and in 16 bits use them; or makes it forget them."""
        if is_used:
            self.layer._forward_impl = self._forward_impl
        else:
            del self.layer._forward_impl
        self.layer.adds_product = is_used and not self.product.is_merged

    def keep_base(self):
        """Keeps a copy of W if the layer's weight will have the factors merged; after FSDP has sharded the weight."""
        self._sharded = (self.layer.weight,)
        if self.product.is_merged:
            self.base = torch.nn.Parameter(rows_here(self.layer.weight).clone(), requires_grad=False)

    @property
    def layer(self):
        """Megatron's linear layer."""
        return self._layer[0]

    @property
    def weight(self) -> Tensor:
        """The layer's weight; under FSDP the sharded one, also while a layer outside of the decoder is gathered."""
        return self._sharded[0] if self._sharded else self.layer.weight

    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        """(A, B) of each projection."""
        return [(factors.a, factors.b) for factors in self.factors.values()]

    def _mark_parallel(self, weight: Tensor):
        """Sets the marks by which Megatron reduces gradients and counts each factor once in their norm."""
        for a, b in self.pairs():
            if self.is_replicated:
                a.sequence_parallel = b.sequence_parallel = getattr(weight, "sequence_parallel", False)
                continue
            if self.is_row_parallel or not self.product.has_whole_b:
                split, axis = (a, 1) if self.is_row_parallel else (b, 0)
                split.tensor_model_parallel, split.partition_dim = True, axis
                split.partition_stride = 1
            a.allreduce = b.allreduce = getattr(weight, "allreduce", True)

    def _forward_impl(self, input, weight, bias, allreduce_dgrad, sequence_parallel, **_):
        """Replaces that of Megatron's layer: […, K], under sequence parallelism this rank's [T/t, …, K] -> […, N]; only
        the factors get gradients."""
        product, pairs = self.product, self.pairs()
        if torch.is_grad_enabled():
            flat = [tensor for pair in pairs for tensor in pair]
            return _adapted_linear(input, weight, bias, product, allreduce_dgrad, sequence_parallel, *flat)
        input = gather_tokens(input, product.group) if sequence_parallel else input
        return product.forward(input, weight, bias, pairs)

    @torch.no_grad()
    def change(self, here: range) -> list[tuple[slice | Tensor, Tensor]]:
        """Rows, counted from the first of `here`, and their s·B·A [n, K], for each projection with rows in `here`.

        The axis that tensor parallelism splits is that of `matmul`'s rows, whose results do not depend on their number:
        each layout gets the same weight. The factors must be whole.
        """
        changes, is_whole = [], len(here) == len(self.layer.weight)
        for rows, (a, b) in zip(self.product.rows, self.product.used(self.pairs()), strict=True):
            if not len(b):
                continue
            rows, held = (rows, slice(None)) if is_whole else _within(rows, here)
            if self.is_row_parallel:
                product = matmul(a.t().contiguous(), b).t()[held]
            else:
                product = matmul(b[held], a.t().contiguous())
            changes.append((rows, product.mul_(self.product.scale)))
        return changes

    @torch.no_grad()
    def merge(self):
        """Sets the layer's weight to W + s·B·A; does nothing in 16 bits, where they stay apart."""
        weight, here = rows_here(self.weight), range_here(self.weight)
        for rows, change in () if self.base is None else self.change(here):
            weight[rows] = self.base.data[rows] + change

    @torch.no_grad()
    def fold(self):
        """Adds s·B·A to a weight that does not contain it; in 16 bits with rounding."""
        weight, here = rows_here(self.weight), range_here(self.weight)
        for rows, change in self.change(here):
            weight[rows] += change

    def set_base(self):
        """Takes W from the layer's weight, which has no factors merged."""
        if self.base is not None:
            self.base.data.copy_(rows_here(self.layer.weight))

    @torch.no_grad()
    def swap_base(self):
        """Exchanges the memory of the layer's weight and of W; in 16 bits the layer stops or starts adding factors."""
        layer = self.layer
        if self.base is not None and isinstance(layer.weight, DTensor):  # FSDP gathers from the weight's own memory
            weight = rows_here(layer.weight)
            kept = weight.clone()
            weight.copy_(self.base)
            self.base.copy_(kept)
        elif self.base is not None:
            layer.weight.data, self.base.data = self.base.data, layer.weight.data
        else:
            self.attach(not layer.adds_product)

    def sharded_state(self, prefix: str, name: str, expert: tuple[int, int] | None, replica: int) -> dict:
        """Describes the factors to checkpoints, by parameter name.

        Args:
            prefix: of the parameters' names in the chunk.
            name: of the layer in the whole model, without the expert's number.
            expert: its number and the number of experts; keys stack the experts.
            replica: data-parallel rank, of the experts' if it is one.
        """
        size, rank = dist.get_world_size(self.layer.tp_group), dist.get_rank(self.layer.tp_group)
        stacked, state = () if expert is None else ((0, *expert),), {}
        for projection, factors in self.factors.items():
            a_axis, b_axis = 1 if self.is_row_parallel else None, None if self.product.has_whole_b else 0
            for factor, axis in (("a", a_axis), ("b", b_axis)):
                split = () if axis is None else ((axis + len(stacked), rank, size),)
                key, copy = f"lora.{name}.{projection}.lora_{factor.upper()}", (0, rank if axis is None else 0, replica)
                options = {"replica_id": copy, "prepend_axis_num": len(stacked)}
                described = ShardedTensor.from_rank_offsets(key, getattr(factors, factor), *stacked, *split, **options)
                state[f"{prefix}factors.{projection}.{factor}"] = described
        return state


def _within(rows: slice | Tensor, here: range) -> tuple[slice | Tensor, slice | Tensor]:
    """Those of a projection's rows that are in `here`: counted from its first, and from the projection's first."""
    if isinstance(rows, slice):
        start, stop = max(rows.start, here.start), min(rows.stop, here.stop)
        start = min(start, stop)
        return slice(start - here.start, stop - here.start), slice(start - rows.start, stop - rows.start)
    held = ((rows >= here.start) & (rows < here.stop)).nonzero().flatten()
    return rows[held] - here.start, held
