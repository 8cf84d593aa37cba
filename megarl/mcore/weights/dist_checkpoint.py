"""Megatron's distributed checkpoints: models and optimizers of all roles in one folder, loadable in any layout.

Saving is one collective of the whole world. Keys of a role's tensors are prefixed with the role's name. Everything else
(param groups, schedulers, counters) becomes one object per role, because Megatron saves plain objects of rank 0 only,
which may not belong to the role.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace, extract_matching_values
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedBase, ShardedObject
from megatron.core.dist_checkpointing.validation import StrictHandling
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from torch.distributed.checkpoint import CheckpointException

from megarl.errors import UsageError
from megarl.mcore.model.gpt import value_head_of
from megarl.mcore.model.weight_table import HEAD
from megarl.mcore.parallel.fsdp import local_rows
from megarl.mcore.weights import checkpoint_files, optimizer_states

checkpoint_files.install()

BALANCING = (".expert_bias", ".expert_share")  # buffers that training changes beside weights
PREDICTION = "prediction"  # the state of multi-token prediction in that of its role


def _metadata(pg_collection) -> dict:
    return {
        "distrib_optim_sharding_type": "fully_reshardable",
        "chained_optim_avoid_prefix": True,  # with expert parallelism Megatron has two optimizers, without it one
        "dp_cp_group": pg_collection.dp_cp,
    }


def _prefixed(state: dict, prefix: str) -> dict:
    """Prefixes the keys under which Megatron stores tensors and objects, in place."""

    def prefixed(value):
        if isinstance(value, ShardedBase):
            value.key = f"{prefix}.{value.key}"
        return value

    return dict_list_map_inplace(prefixed, state)


def plain_object(key: str, data, pg_collection) -> ShardedObject:
    """Wraps picklable data that the role's first rank writes and all of its ranks read, in any layout."""
    rank = dist.get_rank(pg_collection.intra_dist_opt)
    return ShardedObject(key, data, global_shape=(1,), global_offset=(0,), replica_id=rank)


def _weights(stages, pg_collection, by_layer: bool = False) -> dict:
    """Returns the sharded state of each chunk; its keys number layers over the whole model.

    `by_layer`: also where all layers are alike, which Megatron stacks: a stack must have all layers, of which some may
    have no optimizer states.
    """
    metadata = _metadata(pg_collection) | {"non_homogeneous_layers": by_layer}
    return {f"chunk{i}": chunk.sharded_state_dict(metadata=metadata) for i, chunk in enumerate(stages)}


def trained_weights(stages, pg_collection) -> dict:
    """Returns the state of what training changes of each chunk: low-rank factors if it has them, else all weights."""
    if not has_factors(stages):
        return _weights(stages, pg_collection)
    return _of_adapters(stages, [chunk.adapter for chunk in stages], pg_collection)


def _of_adapters(stages, adapters, pg_collection) -> dict:
    pairs, metadata = zip(stages, adapters, strict=True), _metadata(pg_collection)
    return {f"chunk{i}": adapter.trained_state(chunk, metadata) for i, (chunk, adapter) in enumerate(pairs)}


def has_factors(stages) -> bool:
    """Whether a model trains low-rank factors (`megarl.mcore.lora`), which are then all that its checkpoints hold."""
    return any(hasattr(chunk, "adapter") for chunk in stages)


def role_state(role: str, stages, optimizer, plain: dict, pg_collection, loading: bool = False) -> dict:
    """Returns one role's checkpoint state on this rank, ready for `plan_save` or `load`.

    Args:
        role: prefix of its keys.
        stages: the model's bare chunks.
        optimizer: None for the model alone.
        plain: picklable state such as scheduler and counters.
        loading: create the optimizer states that `load` will fill.
    """
    weights = trained_weights(stages, pg_collection)
    state = {"model": weights, "plain": plain_object("plain", plain, pg_collection)}
    if optimizer is not None:
        with optimizer_states.described(optimizer):
            has_stacks = stages[0].config.freezes_by_name and not has_factors(stages)  # of which some layers are frozen
            of_states = _weights(stages, pg_collection, by_layer=True) if has_stacks else weights
            whole = optimizer.sharded_state_dict(of_states, is_loading=loading, metadata=_metadata(pg_collection))
        kinds = (ShardedBase, LocalNonpersistentObject)
        sharded, rest = extract_matching_values(whole, lambda v: isinstance(v, kinds), return_lists_as_dicts=True)
        state |= {"optimizer": sharded, "optimizer_plain": plain_object("optimizer_plain", rest, pg_collection)}
        if loading:
            state["optimizer_form"] = LocalNonpersistentObject(rest)
    return _prefixed(local_rows(state), role)


def prediction_of(role: str) -> str:
    """The role under whose keys a checkpoint has the layer of multi-token prediction of another."""
    return f"{role}_mtp"


def average_of(role: str) -> str:
    """The role under whose keys a checkpoint has the moving average of another."""
    return f"{role}_ema"


def model_state(
    role: str, stages, pg_collection, held: Mapping[str, tuple[int, ...]] | None = None, adapters: Sequence = ()
) -> dict:
    """Returns the state of one role's weights only, under the keys of `role` in the checkpoint.

    Args:
        held: global shapes by the checkpoint's keys. A scalar head and buffers of expert balancing that it lacks are
            left out. None: it has all.
        adapters: a `megarl.mcore.lora.adapter.Adapter` for each chunk: only of what training them changes.
    """
    weights = _of_adapters(stages, adapters, pg_collection) if adapters else _weights(stages, pg_collection)
    weights = _prefixed(local_rows(weights), role)
    for chunk, state in zip(stages, weights.values(), strict=True) if held is not None else ():
        lacks_head = value_head_of(chunk) and held.get(f"{role}.{HEAD}", (0,))[0] != 1
        for name, entry in list(state.items()):
            is_lacking = name.endswith(BALANCING) and entry.key not in held
            if is_lacking or lacks_head and name.startswith("output_layer."):
                del state[name]
    return weights


def load_weights(stages, state: dict, strict: bool = True):
    """Loads a role's weights into its chunks; not strict: weights missing from the state keep their values."""
    for i, chunk in enumerate(stages):
        chunk.load_state_dict(state[f"chunk{i}"], strict=strict)


def rank_state() -> dict:
    """Returns this rank's random states, which can be restored only in a world of the same size."""
    data = {
        "torch": torch.get_rng_state(),
        "device": torch.cuda.get_rng_state(),
        "tracker": get_cuda_rng_tracker().get_states(),
    }
    return {"rng": ShardedObject("rng", data, (dist.get_world_size(),), (dist.get_rank(),), replica_id=0)}


def restore_rank_state(state: dict):
    """Restores the random states of `rank_state`."""
    torch.set_rng_state(state["torch"])
    torch.cuda.set_rng_state(state["device"])
    get_cuda_rng_tracker().set_states(state["tracker"])


def load(state: dict, folder: Path, group=None) -> dict:
    """Loads what `state` describes; a collective of the group (None: the world), with a non-empty state on each rank.

    Keys missing from the folder raise an exception. Raises UsageError for a file that holds more than data, and
    RuntimeError for one that cannot be read.
    """
    strict = StrictHandling.ASSUME_OK_UNEXPECTED
    try:
        with torch.no_grad():
            return dist_checkpointing.load(state, str(folder), strict=strict, process_group=group)
    except (checkpoint_files.UnsafeFile, CheckpointException) as failure:
        error = checkpoint_files.reason_of(failure)
        if error is not None or isinstance(failure, checkpoint_files.UnsafeFile):
            raise UsageError(f"unsafe or damaged checkpoint: {error}", reporting_rank=dist.get_rank()) from None
        # torch's error is no Exception: nobody would catch it, and no line would say which rank failed.
        rank, (cause, _) = min(failure.failures.items())
        raise RuntimeError(f"{folder}: rank {rank} cannot read it: {type(cause).__name__}: {cause}") from cause


def load_role(state: dict, folder: Path, pg_collection) -> dict:
    """Loads one role's state; a collective of that role's ranks only."""
    group = pg_collection.intra_dist_opt
    if "optimizer" not in state:
        return load(state, folder, group)
    optimizer_states.read_main_weights(state, tensor_shapes(folder))
    optimizer = {"optimizer": state.pop("optimizer")}  # apart: Megatron reads no tensor twice at once
    return {key: value for part in (state, optimizer) for key, value in load(part, folder, group).items()}


def load_if_held(state: dict, folder: Path, pg_collection, role: str) -> dict | None:
    """As `load_role`, of a state that a checkpoint need not have, or without its optimizer; None: it has none of it."""
    held = tensor_shapes(folder)
    if not any(key.startswith(f"{role}.") for key in held):
        return None
    if not any(key.startswith(f"{role}.optimizer.") for key in held):
        state = {key: value for key, value in state.items() if not key.startswith("optimizer")}
    return load_role(state, folder, pg_collection)


def tensor_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Returns the global shape of every tensor in a checkpoint from its metadata; needs no process group."""
    # Megatron's reader of this file passes properties to torch.empty that newer torch versions reject.
    entries = checkpoint_files.SafeReader(str(folder)).read_metadata().state_dict_metadata
    return {key: tuple(entry.size) for key, entry in entries.items() if hasattr(entry, "size")}
