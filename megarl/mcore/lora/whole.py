"""Whole factors of a model in any layout: gathered to one rank, or distributed to all."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.mcore.model.value_head import has_value_head
from megarl.mcore.parallel import fsdp


def gather_factors(stages, pg_collection) -> tuple[dict[str, Tensor], Tensor | None] | None:
    """Whole factors on the host by key in a checkpoint, and a scalar head [1, H], on the role's first rank; else None.

    A collective of the role.
    """
    found = [(value, fsdp.whole(value.data).cpu()) for value in _factors(stages, pg_collection)]
    mine = [(v.key, v.global_shape, _box(v), data) for v, data in found if not any(v.replica_id)]
    heads = [fsdp.whole(chunk.output_layer.weight).cpu() for chunk in stages if has_value_head(chunk)]
    group = pg_collection.intra_dist_opt
    gathered: list[Any] = [None] * dist.get_world_size(group) if dist.get_rank(group) == 0 else None
    dist.gather_object((mine, heads), gathered, group=group, group_dst=0)
    if gathered is None:
        return None
    whole: dict[str, Tensor] = {}
    for key, shape, box, data in (item for items, _ in gathered for item in items):
        whole.setdefault(key, data.new_empty(shape))[box] = data
    return whole, next((head for _, found in gathered for head in found), None)


@torch.no_grad()
def fill_factors(stages, factors: dict[str, Tensor], head: Tensor | None, pg_collection):
    """Copies whole factors, and a scalar head, into a model; the caller merges.

    Factors of a lower rank fill the first ranks: the others keep their drawn A and get B = 0. Layers without factors
    keep theirs.
    """
    for value in _factors(stages, pg_collection):
        if value.key in factors:
            whole = torch.zeros(value.global_shape, dtype=value.data.dtype, device=value.data.device)
            if value.key.endswith("A"):
                whole[_box(value)] = fsdp.whole(value.data)
                whole[..., : factors[value.key].shape[-2], :] = factors[value.key]
            else:
                whole[..., : factors[value.key].shape[-1]] = factors[value.key]
            _copy_rows(value.data, whole[_box(value)].view(value.data.shape))
    for chunk in stages:
        if head is not None and has_value_head(chunk):
            _copy_rows(chunk.output_layer.weight, head)


def _copy_rows(parameter: Tensor, whole: Tensor):
    data, here = fsdp.rows_here(parameter)
    data.copy_(whole[here.start : here.stop])


def _factors(stages, pg_collection) -> list:
    """Descriptions of this rank's factors."""
    metadata = {"dp_cp_group": pg_collection.dp_cp}
    states = [chunk.adapter.trained_state(chunk, metadata) for chunk in stages]
    return [value for state in states for name, value in state.items() if name.startswith("adapter.")]


def _box(value) -> tuple[slice | int, ...]:
    stacked, shape = value.prepend_axis_num, value.data.shape
    starts = value.global_offset[stacked:]
    return (*value.global_offset[:stacked], *(slice(a, a + n) for a, n in zip(starts, shape, strict=True)))
