"""Megatron's distributed checkpoints: every role's models and optimizers in one folder, loadable in another layout.

One collective save of the whole world. A role's tensors carry the role's name as prefix; what is not a tensor
(param groups, schedulers, counters) becomes one object a role, because Megatron keeps plain objects of rank 0 alone
and rank 0 need not belong to the role.
"""

import copy
import queue
from collections.abc import Container
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import extract_matching_values, merge
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedBase, ShardedObject
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.validation import StrictHandling
from megatron.core.optimizer.optimizer import param_group_identifier_keys
from torch.distributed.checkpoint import FileSystemReader

from megarl.mcore.model.value_head import ValueHead
from megarl.mcore.parallel.fsdp import local_rows


def _metadata(pg_collection) -> dict:
    return {
        "distrib_optim_sharding_type": "fully_reshardable",
        "chained_optim_avoid_prefix": True,  # with expert parallelism Megatron has two optimizers, without it one
        "dp_cp_group": pg_collection.dp_cp,
    }


def _prefixed(state: dict, prefix: str) -> dict:
    """Adds a prefix to the keys under which Megatron stores tensors and objects."""

    def visit(value):
        if isinstance(value, dict):
            for item in value.values():
                visit(item)
        elif isinstance(value, list):
            for item in value:
                visit(item)
        elif isinstance(value, ShardedBase):
            value.key = f"{prefix}.{value.key}"

    visit(state)
    return state


def _is_sharded(value) -> bool:
    return isinstance(value, (ShardedBase, LocalNonpersistentObject))


def _object(key: str, data, rank_in_role: int) -> ShardedObject:
    """Picklable data that the role's first rank writes and all of its ranks read, in any layout."""
    return ShardedObject(key, data, global_shape=(1,), global_offset=(0,), replica_id=rank_in_role)


def _weights(stages, pg_collection) -> dict:
    """Sharded state of each chunk; its keys number layers over the whole model."""
    return {f"chunk{i}": chunk.sharded_state_dict(metadata=_metadata(pg_collection)) for i, chunk in enumerate(stages)}


def role_state(role: str, stages, optimizer, plain: dict, pg_collection, ranks: range, loading: bool = False) -> dict:
    """What a checkpoint holds of one role on this rank, ready for `save` or `load`.

    Args:
        role: prefix of its keys.
        stages: the model's bare chunks.
        optimizer: Megatron's optimizer, or None for the model alone.
        plain: picklable state: scheduler, counters.
        loading: whether optimizer states must be created first, to be filled.
    """
    rank = dist.get_rank() - ranks.start
    weights = _weights(stages, pg_collection)
    state = {"model": weights, "plain": _object("plain", plain, rank)}
    if optimizer is not None:
        whole = optimizer.sharded_state_dict(weights, is_loading=loading, metadata=_metadata(pg_collection))
        sharded, rest = extract_matching_values(whole, _is_sharded, return_lists_as_dicts=True)
        state |= {"optimizer": sharded, "optimizer_plain": _object("optimizer_plain", rest, rank)}
    return _prefixed(local_rows(state), role)


def model_state(role: str, stages, pg_collection, with_value_head: bool = True) -> dict:
    """The weights of one role alone, under the keys of `role` in the checkpoint."""
    weights = _weights(stages, pg_collection)
    for chunk, state in zip(stages, weights.values(), strict=True):
        if not with_value_head and isinstance(getattr(chunk, "output_layer", None), ValueHead):
            for key in [key for key in state if key.startswith("output_layer.")]:
                del state[key]
    return _prefixed(local_rows(weights), role)


def drop_missing_balancing_buffers(weights: dict, held: Container[str]):
    """Takes buffers that balance experts, and that a folder does not hold by their keys, out of a role's weights."""
    for state in weights.values():
        for name in [name for name in state if name.endswith((".expert_bias", ".expert_share"))]:
            if state[name].key not in held:
                del state[name]


def load_weights(stages, state: dict, strict: bool = True):
    """Puts a role's loaded weights into its chunks; not strict: what the state lacks stays as it is."""
    for i, chunk in enumerate(stages):
        chunk.load_state_dict(state[f"chunk{i}"], strict=strict)


def rank_state() -> dict:
    """Random states of this rank; restored only into a world of the same size."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    data = {
        "torch": torch.get_rng_state(),
        "device": torch.cuda.get_rng_state(),
        "tracker": get_cuda_rng_tracker().get_states(),
    }
    return {"rng": ShardedObject("rng", data, (dist.get_world_size(),), (dist.get_rank(),), replica_id=0)}


def restore_rank_state(state: dict):
    """Puts back what `rank_state` saved."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    torch.set_rng_state(state["torch"])
    torch.cuda.set_rng_state(state["device"])
    get_cuda_rng_tracker().set_states(state["tracker"])


def save(state: dict, folder: Path):
    """Writes a folder; a collective of the whole world. The folder must exist and be empty."""
    # Megatron starts a process to hand results over, for asynchronous saves; this one stays in this process.
    filesystem_async._results_queue = filesystem_async._results_queue or queue.Queue()
    with torch.no_grad():
        dist_checkpointing.save(state, str(folder))


def load(state: dict, folder: Path, group=None) -> dict:
    """Reads what `state` describes; a collective of the group (None: the world); each of its ranks asks for something.

    Keys that the folder lacks raise an exception.
    """
    strict = StrictHandling.ASSUME_OK_UNEXPECTED
    with torch.no_grad():
        return dist_checkpointing.load(state, str(folder), strict=strict, process_group=group)


def load_role(state: dict, folder: Path, pg_collection) -> dict:
    """Reads one role's state; a collective of that role's ranks alone."""
    return load(state, folder, pg_collection.intra_dist_opt)


def optimizer_state(loaded: dict, optimizer) -> dict:
    """A role's loaded optimizer state, its sharded and its plain part put together again, for `optimizer`.

    Megatron has an optimizer of their own for experts that are split over ranks: what was saved by one optimizer may
    be for two, or the other way round. Every param group takes the counters and rates of the saved one of its kind.
    """
    plain, parts = loaded["optimizer_plain"], optimizer.chained_optimizers
    saved = [plain[i] for i in sorted(plain)] if all(isinstance(key, int) for key in plain) else [plain]
    groups = [group for part in saved for group in _param_groups(part).values()]
    states = [copy.deepcopy(saved[min(i, len(saved) - 1)]) for i in range(len(parts))]
    for state, part in zip(states, parts, strict=True):
        found = _param_groups(state)
        found.clear()
        found.update(enumerate(_of_kind(group, groups) for group in part.param_groups))
    state = states[0] if len(parts) == 1 else dict(enumerate(states))
    merge(state, loaded["optimizer"])
    _restore_lists(state)
    return state


def _param_groups(state: dict) -> dict[int, dict]:
    """The param groups by place in a plain state, at whatever depth the kind of optimizer has them."""
    if "param_groups" in state:
        return state["param_groups"]
    return next(_param_groups(value) for value in state.values() if isinstance(value, dict) and _has_groups(value))


def _has_groups(state: dict) -> bool:
    return "param_groups" in state or any(isinstance(v, dict) and _has_groups(v) for v in state.values())


def _of_kind(group: dict, saved: list[dict]) -> dict:
    """The saved group with this one's overrides, apart from whether its parameters are split experts."""
    keys = [key for key in param_group_identifier_keys if key != "is_expert_parallel"]
    alike = next(other for other in saved if all(other.get(key) == group.get(key) for key in keys))
    return {**alike, "is_expert_parallel": group["is_expert_parallel"]}


def _restore_lists(state: dict):
    """Lists became dictionaries by place on their way; they lie at different depths for each optimizer."""
    for key, value in state.items():
        if key == "param_groups" and isinstance(value, dict):
            state[key] = [value[place] for place in range(len(value))]
        elif key == "fp32_from_fp16_params":
            state[key] = [[group[place] for place in range(len(group))] for _, group in sorted(value.items())]
        elif isinstance(value, dict):
            _restore_lists(value)


def tensor_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Global shape of every tensor in a checkpoint, read from its metadata alone; needs no process group."""
    # Megatron's own reader of the same file passes properties to torch.empty that newer torch versions do not know.
    entries = FileSystemReader(str(folder)).read_metadata().state_dict_metadata
    return {key: tuple(entry.size) for key, entry in entries.items() if hasattr(entry, "size")}
