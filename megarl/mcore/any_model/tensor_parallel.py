"""Tensor parallelism of transformers' modules, by the plan that their class brings (`base_model_tp_plan`).

A plan names a style for modules and for parameters of experts. A style says along which axis a weight is split over the
ranks, and what happens to a module's input and output; the modules themselves compute with the heads and channels that
a rank has. The vocabulary is split over the ranks in embedding and head, as megarl's head wants it (1909.08053 §3).
"""

import functools
import re
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.tensor_parallel import mappings
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor, nn
from transformers import PreTrainedModel

from megarl.mcore.any_model.attention import Unsupported

FLAG = "--tensor-model-parallel-size"
Change = Callable[[Tensor], Tensor]
ROWS, COLUMNS = -2, -1  # axes of a matrix, of one expert or of a linear layer
WHOLE = None, "", ""  # as of `STYLES`


class Ranks:
    """This rank among those that share a module, and what they send each other: [..., H] each."""

    def __init__(self, group):
        self.group, self.rank, self.size = group, dist.get_rank(group), dist.get_world_size(group)

    def to_all(self, x: Tensor) -> Tensor:
        """x, whose gradient is summed over the ranks, if it has one."""
        if not x.is_floating_point():
            return x
        return mappings.copy_to_tensor_model_parallel_region(x, self.group)

    def summed(self, x: Tensor) -> Tensor:
        """The sum over the ranks."""
        out = mappings.reduce_from_tensor_model_parallel_region(x, self.group)
        # Autograd lets no module add in place to what a function of its own returns.
        return out.clone() if torch.is_grad_enabled() else out

    def gathered(self, x: Tensor) -> Tensor:
        """The columns of all ranks."""
        return mappings.gather_from_tensor_model_parallel_region(x, self.group)

    def own_columns(self, x: Tensor) -> Tensor:
        """This rank's columns of a whole x."""
        return mappings.scatter_to_tensor_model_parallel_region(x, self.group)

    def share(self, x: Tensor) -> Tensor:
        """x over the number of ranks, which will add it."""
        return x / self.size


class Split(NamedTuple):
    """How a weight is split: along an axis, counted from the first, in so many packed parts."""

    axis: int
    parts: int = 1

    def of(self, whole: Tensor, rank: int, ranks: int) -> Tensor:
        """A rank's share of a whole weight, as a view or a copy."""
        shares = [part.chunk(ranks, self.axis)[rank] for part in whole.chunk(self.parts, self.axis)]
        return shares[0] if self.parts == 1 else torch.cat(shares, self.axis)


# What a plan's word means: the axis along which weights are split, and the parts that they pack along it, or nothing;
# what happens to a module's inputs, and to its output, by names of methods of `Ranks`.
STYLES: dict[str, tuple[Split | None, str, str]] = {
    "colwise": (Split(ROWS), "to_all", ""),
    "colwise_gather_output": (Split(ROWS), "to_all", "gathered"),
    "packed_colwise": (Split(ROWS, parts=2), "to_all", ""),
    "rowwise": (Split(COLUMNS), "", "summed"),
    "rowwise_split_input": (Split(COLUMNS), "own_columns", "summed"),
    "packed_rowwise": (Split(COLUMNS, parts=2), "", "summed"),
    "moe_tp_experts": (None, "to_all", "summed"),
    "moe_identity_expert": (None, "", "share"),
    "all_reduce": (None, "", "summed"),
    "mla_kv_a_proj": WHOLE,
    "replicate": WHOLE,
    "local_params": WHOLE,  # of a module with shares that the plan names for themselves: sinks
    "replicated_with_grad_allreduce": WHOLE,  # `self_check` finds these, and others that plans do not name
}


def splits_of(module: PreTrainedModel, ranks: int) -> dict[str, Split]:
    """How the weights of a module are split over tensor-parallel ranks, by name; those that are not named are whole.

    Raises:
        Unsupported: no plan, a style that is not known, or a size that the ranks do not divide: of a weight, and if the
            module has its slots (`source.find_slots`) the number of its heads.
    """
    plan = module.tp_plan
    if not plan:
        raise Unsupported(f"{type(module).__name__} has no plan for tensor parallelism (base_model_tp_plan)")
    if unknown := sorted(set(plan.values()).difference(STYLES, ("embedding_rowwise",))):
        raise Unsupported(f"the plan of {type(module).__name__} for tensor parallelism has {unknown[0]}")
    for name, part in module.named_modules():
        styles = {_style(plan, f"{name}.{child}") for child, _ in part.named_children()}
        for slot in getattr(part, "attention_slots", ()) if "colwise" in styles else ():
            if slot.heads % ranks or slot.groups % ranks:
                raise Unsupported(f"{name} has {slot.heads} heads with {slot.groups} keys, which it does not divide")
    found = {}
    for name, weight in module.named_parameters(remove_duplicate=False):
        owner, _, last = name.rpartition(".")
        share, *_ = STYLES.get(_style(plan, name) or _style(plan, owner) or "", WHOLE)
        if share is None or share.axis == COLUMNS and last == "bias":
            continue
        found[name] = share._replace(axis=weight.dim() + share.axis if weight.dim() > 1 else 0)
    for part in (module.get_input_embeddings(), module.get_output_embeddings()):
        names = [name for name, each in module.named_modules() if each is part]
        found |= {f"{name}.{last}": Split(0) for name in names for last, _ in part.named_parameters()}
    for name, split in found.items():
        size = module.get_parameter(name).shape[split.axis]
        if size % (ranks * split.parts):
            raise Unsupported(f"{name} has {size} rows or columns, which {FLAG} {ranks} does not divide")
    return found


def starred(name: str) -> str:
    """A name as plans have it: with * for numbers."""
    return re.sub(r"\d+", "*", name)


def _style(plan: dict[str, str], name: str) -> str | None:
    return plan.get(starred(name))


def split(module: PreTrainedModel, splits: dict[str, Split], ranks: Ranks, partial: Collection[str] = ()):
    """Gives a module on the meta device this rank's shares, and its parts what their styles do.

    Args:
        partial: names, with * for numbers, of whole weights of whose gradients each rank has a part.
    """
    plan, config = module.tp_plan, module.config.get_text_config()
    for name, weight in module.named_parameters():  # a tied one once
        if name in splits:
            weight.data = splits[name].of(weight.data, ranks.rank, ranks.size)
    ends = module.get_input_embeddings(), module.get_output_embeddings()
    for name, part in module.named_modules():
        word = None if part in ends else _style(plan, name)
        _, *names = STYLES.get(word or "", WHOLE)
        before, after = (getattr(ranks, each, None) for each in names)
        after = functools.partial(_with_shared_key, config, ranks) if word == "mla_kv_a_proj" else after
        shared = [each for each in part._parameters if starred(f"{name}.{each}") in partial]
        if before or after or shared:
            _surround(part, before, after, dict.fromkeys(shared, ranks.to_all), names[1] == "summed")
    _split_embedding(ends[0], ranks)


def mark(module: PreTrainedModel, splits: dict[str, Split]):
    """Tells Megarl's and Megatron's optimizers which weights of a module with memory are shares: the norm of all
    gradients counts the others once."""
    for name, weight in module.named_parameters():  # a tied one once, by its first name
        if name in splits:
            set_tensor_model_parallel_attributes(weight, True, splits[name].axis, 1)


def _surround(part: nn.Module, before: Change | None, after: Change | None, shared: dict[str, Change], adds_bias: bool):
    """Changes a module's inputs, its own parameters of these names while it runs, and its output.

    Args:
        adds_bias: a bias is added once, after the output is changed.
    """
    changes: dict[str, Callable] = dict(shared)
    held: dict[str, nn.Parameter] = {}
    if adds_bias:
        changes["bias"] = lambda bias: None

    def enter(part, args):
        held.update({name: each for name, each in part._parameters.items() if name in changes and each is not None})
        part._parameters.update({name: changes[name](each) for name, each in held.items()})
        return tuple(before(x) if torch.is_tensor(x) else x for x in args) if before else None

    def leave(part, args, out):
        part._parameters.update(held)
        if out is None:  # an error
            return None
        out = after(out) if after else out
        return out + held["bias"] if adds_bias and "bias" in held else out

    part.register_forward_pre_hook(enter)
    part.register_forward_hook(leave, always_call=True)


def _with_shared_key(config, ranks: Ranks, out: Tensor) -> Tensor:
    """Latents and a key that all heads share: each rank's heads give a part of the key's gradient."""
    width = config.qk_rope_head_dim
    latent, key = out.split([out.shape[-1] - width, width], dim=-1)
    return torch.cat([latent, ranks.to_all(key)], dim=-1)


def _split_embedding(embedding: Any, ranks: Ranks):
    """Each rank looks up its rows of the vocabulary; the vectors of the others are 0 there."""
    rows, forward, padding = len(embedding.weight), embedding.forward, embedding.padding_idx
    if padding is not None:  # its row gets no gradient; each rank numbers its rows from 0
        embedding.padding_idx = padding - ranks.rank * rows if padding // rows == ranks.rank else None

    def look_up(tokens: Tensor) -> Tensor:
        own = tokens - ranks.rank * rows
        is_own = (own >= 0) & (own < rows)
        return ranks.summed(forward(own * is_own) * is_own.unsqueeze(-1))

    embedding.forward = look_up


def described(state: dict, splits: dict[str, Split], prefix: str, group, replicas) -> dict:
    """Megatron's description of weights for checkpoints and transfers: whole ones, shares, and packed shares.

    Args:
        state: this rank's tensors by name, without `prefix`.
        replicas: the ranks that hold the same shares.
    """
    axes = {name: splits[name].axis for name in state if name in splits}
    found = make_sharded_tensors_for_checkpoint(state, prefix, axes, (), tp_group=group, dp_cp_group=replicas)
    for name in axes:
        if splits[name].parts > 1:
            found[prefix + name] = _packed(found[prefix + name], splits[name], group)
    return found


def _packed(share: ShardedTensor, split: Split, group) -> ShardedTensorFactory:
    """The description of a share that packs several parts along its axis, each of which is split over the ranks."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)

    @torch.no_grad()
    def build(key: str, data: Tensor, replica_id, _) -> list[ShardedTensor]:
        built = []
        for number, part in enumerate(data.chunk(split.parts, split.axis)):
            offset = split.axis, number * ranks + rank, split.parts * ranks
            built.append(ShardedTensor.from_rank_offsets(key, part, offset, replica_id=replica_id))
        return built

    def merge(parts: list[Tensor]) -> Tensor:
        return torch.cat(parts, split.axis)

    return ShardedTensorFactory(share.key, share.data, build, merge, share.replica_id)


def gathered_whole(share: Tensor, split: Split | None, group) -> Tensor:
    """The whole weight of which each rank of the group has a share; a collective."""
    ranks = dist.get_world_size(group)
    if split is None or ranks == 1:
        return share
    shares = [torch.empty_like(share, memory_format=torch.contiguous_format) for _ in range(ranks)]
    dist.all_gather(shares, share.contiguous(), group=group)
    parts = zip(*(each.chunk(split.parts, split.axis) for each in shares), strict=True)
    return torch.cat([torch.cat(part, split.axis) for part in parts], split.axis)
