"""The factors of one linear layer: their parameters, initial values, and the weight that contains them."""

import math

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from torch import Tensor
from torch.distributed.tensor import DTensor

from megarl.mcore.kernels.linear import ReplicatedLinear, forward_product, matmul
from megarl.mcore.lora.product import LowRankProduct, adapted_linear
from megarl.mcore.lora.projections import ROW_PARALLEL, Projection
from megarl.mcore.lora.settings import LoRASettings
from megarl.mcore.model.initialization import draw_uniform
from megarl.mcore.parallel.fsdp import rows_here


class Factors(torch.nn.Module):
    """A [r, K] and B [n, r] of one projection on this rank."""

    def __init__(self, a: Tensor, b: Tensor):
        super().__init__()
        self.a, self.b = torch.nn.Parameter(a), torch.nn.Parameter(b)


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
        self.whole_name, weight = name, layer.weight
        self.is_row_parallel, self.is_replicated = projections[0].name in ROW_PARALLEL, type(layer) is ReplicatedLinear
        self.product = LowRankProduct(
            rows=tuple(projection.rows for projection in projections), scale=lora.scale,
            is_merged=weight.dtype is torch.float32, is_row_parallel=self.is_row_parallel,
            group=None if self.is_replicated else layer.tp_group, multiply=forward_product(layer.config),
            held=tuple(projection.held for projection in projections) if projections[0].held is not None else None,
        )  # fmt: skip
        # W, where the layer's weight has the factors merged; under FSDP this rank's rows.
        self.base: torch.nn.Parameter | None = None
        self.factors = torch.nn.ModuleDict()
        size, rank = dist.get_world_size(layer.tp_group), dist.get_rank(layer.tp_group)
        for projection in projections:
            columns = weight.shape[1] * (size if self.is_row_parallel else 1)
            bound = 1 / math.sqrt(columns)  # torch's kaiming_uniform_ with a = √5
            a = draw_uniform(f"{name}.{projection.name}.lora_A", seed, (lora.rank, columns), bound)
            a = a.chunk(size, 1)[rank] if self.is_row_parallel else a
            like = {"dtype": weight.dtype, "device": weight.device}
            b = torch.zeros(projection.height, lora.rank, **like)
            self.factors[projection.name] = Factors(a.to(**like).contiguous(), b)
        self._mark_parallel(weight)

    def attach(self):
        """Makes the layer train the factors, and in 16 bits use them."""
        self.layer._forward_impl, self.layer.adds_product = self._forward_impl, not self.product.is_merged

    def keep_base(self):
        """Keeps a copy of W if the layer's weight will have the factors merged; after FSDP has sharded the weight."""
        if self.product.is_merged:
            self.base = torch.nn.Parameter(rows_here(self.layer.weight).data.clone(), requires_grad=False)

    @property
    def layer(self):
        """Megatron's linear layer."""
        return self._layer[0]

    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        """(A, B) of each projection."""
        return [(factors.a, factors.b) for factors in self.factors.values()]

    def _mark_parallel(self, weight: Tensor):
        """Sets the marks by which Megatron reduces gradients and counts each factor once in their norm."""
        for a, b in self.pairs():
            if self.is_replicated:
                a.sequence_parallel = b.sequence_parallel = weight.sequence_parallel
                continue
            if self.is_row_parallel or not self.product.has_whole_b:
                split, axis = (a, 1) if self.is_row_parallel else (b, 0)
                split.tensor_model_parallel, split.partition_dim = True, axis
                split.partition_stride = 1
            a.allreduce = b.allreduce = getattr(weight, "allreduce", True)

    def _forward_impl(
        self, input, weight, bias, allreduce_dgrad, sequence_parallel, gradient_accumulation_fusion=False,
        tp_group=None, grad_output_buffer=None, wgrad_deferral_limit=None, gtp_remat_size=1,
    ):  # fmt: skip
        """Replaces that of Megatron's layer, whose weight never gets a gradient."""
        return adapted_linear(input, weight, bias, self.product, self.pairs(), allreduce_dgrad, sequence_parallel)

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
        weight, here = rows_here(self.layer.weight)
        for rows, change in () if self.base is None else self.change(here):
            weight[rows] = self.base.data[rows] + change

    @torch.no_grad()
    def fold(self):
        """Adds s·B·A to a weight that does not contain it; in 16 bits with rounding."""
        weight, here = rows_here(self.layer.weight)
        for rows, change in self.change(here):
            weight[rows] += change

    def set_base(self):
        """Takes W from the layer's weight, which has no factors merged."""
        if self.base is not None:
            self.base.data.copy_(rows_here(self.layer.weight).data)

    @torch.no_grad()
    def swap_base(self):
        """Exchanges the memory of the layer's weight and of W; in 16 bits the layer stops or starts adding factors."""
        layer = self.layer
        if self.base is not None and isinstance(layer.weight, DTensor):  # FSDP gathers from the weight's own memory
            weight = rows_here(layer.weight).data
            kept = weight.clone()
            weight.copy_(self.base)
            self.base.copy_(kept)
        elif self.base is not None:
            layer.weight.data, self.base.data = self.base.data, layer.weight.data
        elif layer.adds_product:
            del layer._forward_impl
            layer.adds_product = False
        else:
            layer._forward_impl, layer.adds_product = self._forward_impl, True

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
                state[f"{prefix}factors.{projection}.{factor}"] = ShardedTensor.from_rank_offsets(
                    f"lora.{name}.{projection}.lora_{factor.upper()}", getattr(factors, factor), *stacked, *split,
                    replica_id=(0, rank if axis is None else 0, replica), prepend_axis_num=len(stacked),
                )  # fmt: skip
        return state


def _within(rows: slice | Tensor, here: range) -> tuple[slice | Tensor, slice | Tensor]:
    """Those of a projection's rows that are in `here`: counted from its first, and from the projection's first."""
    if isinstance(rows, slice):
        start, stop = max(rows.start, here.start), min(rows.stop, here.stop)
        start = min(start, stop)
        return slice(start - here.start, stop - here.start), slice(start - rows.start, stop - rows.start)
    held = ((rows >= here.start) & (rows < here.stop)).nonzero().flatten()
    return rows[held] - here.start, held
