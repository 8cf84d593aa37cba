"""Tiny models with low-rank factors for tests: factors equal in every layout, gathered weights and gradients."""

import torch
import torch.distributed as dist
import torch.distributed.checkpoint
from torch.distributed.checkpoint import FileSystemReader

from tests.helpers.models.tiny_models import VOCAB, join_actor, parse_roles
from tests.helpers.models.updates import batch_of, clipped_loss, forward_of, split_microbatches, whole_weights

LORA = "--lora-rank 4 --lora-alpha 6"
SCALE = 1.5


def trainable(flags: str, value_head: bool = False, shape: str = "llama"):
    """(the actor's TrainableModel, its role groups); biases and norms are Megatron's initial ones."""
    from megarl.roles.trainable_model import TrainableModel

    role = parse_roles(flags, dist.get_world_size(), shape)["actor"]
    _, place = join_actor(flags, shape)
    return TrainableModel(role, place, VOCAB, 1, value_head), place


def draw_factors(stages):
    """Fills B, which starts as 0, with numbers that are the same in every layout; merges."""
    from megarl.mcore.lora import adapter
    from megarl.mcore.model.initialization import draw_uniform
    from megarl.mcore.parallel.fsdp import range_here, rows_here

    for linear in adapter.adapted_linears(stages):
        size, rank = dist.get_world_size(linear.layer.tp_group), dist.get_rank(linear.layer.tp_group)
        for name, factors in linear.factors.items():
            is_whole = linear.product.has_whole_b
            rows = len(factors.b) * (1 if is_whole else size)
            whole = draw_uniform(f"{linear.whole_name}.{name}", 7, (rows, factors.b.shape[1]), 0.3)
            here = range_here(factors.b)
            rows_here(factors.b).copy_((whole if is_whole else whole.chunk(size)[rank])[here.start : here.stop])
    adapter.merge(stages)


def update_once(model, place, parts: int = 2, value_head: bool = False, apply: bool = True):
    """One update on `batch_of`; returns (loss, gradient norm before clipping)."""
    from megarl.algorithms.aggregation import token_mean

    batch = batch_of(place)
    count = place.dp_all_reduce(batch.response_mask.sum().double())

    def loss(out, part):
        terms = out * part.advantages if value_head else clipped_loss(out, part) - 0.1 * out.entropy
        value = token_mean(terms, part.response_mask, count)
        return value, value.detach().double()

    multiple = dist.get_world_size(place.pg_collection.pp) if len(model.model) > 1 else 1
    microbatches = split_microbatches(batch, parts, multiple)
    model.router_state.attach(batch, microbatches)
    losses, applied, norm = model.update(microbatches, forward_of(value_head), loss)
    assert applied
    return float(place.dp_all_reduce(torch.stack(losses).sum())), norm


def scores(model, place):
    """Log-probs of `batch_of` without gradients, [T]."""
    batch = batch_of(place)
    multiple = dist.get_world_size(place.pg_collection.pp) if len(model.model) > 1 else 1
    microbatches = split_microbatches(batch, 1, multiple)
    model.router_state.attach(batch, microbatches)
    (found,) = [out for out, at in model.forward_only(microbatches, forward_of(False)) if len(at)]
    return found.logprobs


def trained_state(chunk, metadata: dict) -> dict:
    """For `whole_weights`: what a checkpoint holds of a model with factors."""
    return chunk.adapter.trained_state(chunk, metadata)


def whole_gradients(stages, pg_collection, describe=None) -> dict:
    """As `whole_weights`, of the gradients of an update without clipping; the model cannot be used afterwards."""
    for chunk in stages:
        for parameter in chunk.parameters():
            parameter.detach().copy_(parameter.main_grad if parameter.requires_grad else torch.zeros_like(parameter))
    return whole_weights(stages, pg_collection, describe)


def stored_tensors(folder) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint by key."""
    reader = FileSystemReader(str(folder))
    entries = reader.read_metadata().state_dict_metadata.items()
    state = {key: torch.empty(item.size, dtype=item.properties.dtype) for key, item in entries if hasattr(item, "size")}
    torch.distributed.checkpoint.load(state, storage_reader=reader, no_dist=True)
    return state
