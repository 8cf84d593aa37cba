"""States of Megatron's optimizers in checkpoints: right where Megatron's description is wrong, and for each other.

An optimizer takes the state of any other: with and without `--use-distributed-optimizer`, FSDP, or 16 bits.
"""

import contextlib
from collections.abc import Container, Iterator
from itertools import chain

import torch
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace, merge, nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

SCALER = "grad_scaler"


@contextlib.contextmanager
def described(optimizer) -> Iterator[None]:
    """Context in which an optimizer describes all of its states rightly, to save or to load them."""
    with _with_padding(optimizer), _with_fp32_parameters(optimizer):
        yield


@contextlib.contextmanager
def _with_padding(optimizer) -> Iterator[None]:
    """Context in which a distributed optimizer describes its states with the padding between its buckets.

    Megatron gathers them without it, and then takes those of a parameter from where it is with it: the states after a
    bucket with padding would be those of other parameters, and the last ones zeros.
    """
    chained = getattr(optimizer, "chained_optimizers", [])
    buffers = [buffer for part in chained for buffer in getattr(part, "buffers", ())]
    sizes = [(buffer, buffer.numel) for buffer in buffers]
    sizes += [(bucket, bucket.grad_data.numel()) for buffer in buffers for bucket in buffer.buckets]
    unpadded = [part.numel_unpadded for part, _ in sizes]
    try:
        for part, size in sizes:
            part.numel_unpadded = size
        yield
    finally:
        for (part, _), size in zip(sizes, unpadded, strict=True):
            part.numel_unpadded = size


@contextlib.contextmanager
def _with_fp32_parameters(optimizer) -> Iterator[None]:
    """Context in which an optimizer for 16 bits also describes the states of its fp32 parameters.

    Megatron numbers the 16-bit parameters alone, so that each one after an fp32 parameter would get another's states.
    An fp32 parameter counts here as its own fp32 copy.
    """
    mixed = [part for part in getattr(optimizer, "chained_optimizers", []) if any(_fp32_groups(part))]
    own = [(part.float16_groups, part.fp32_from_float16_groups) for part in mixed]
    try:
        for part in mixed:
            mains, halves = map(chain.from_iterable, (part.fp32_from_float16_groups, part.float16_groups))
            model = {id(main): parameter for main, parameter in zip(mains, halves, strict=True)}
            groups = [list(group["params"]) for group in part.optimizer.param_groups]
            part.float16_groups = [[model.get(id(main), main) for main in group] for group in groups]
            part.fp32_from_float16_groups = groups
        yield
    finally:
        for part, (of_model, mains) in zip(mixed, own, strict=True):
            part.float16_groups, part.fp32_from_float16_groups = of_model, mains


def _fp32_groups(part) -> list[list]:
    """The fp32 parameters of an optimizer for 16 bits that is not distributed; none of another."""
    return getattr(part, "fp32_from_fp32_groups", []) if hasattr(part, "fp32_from_float16_groups") else []


_MAIN = ("param", "fp32_param")  # names of the fp32 weights: of a distributed optimizer, of one for 16 bits
_STATES = "optimizer.state."


def read_main_weights(state: dict, held: Container[str]):
    """Lets a role's state read its fp32 weights where a checkpoint has them, in place.

    An optimizer for fp32 weights keeps no copy of them, and the kinds that do name it differently. `state`: as of
    `dist_checkpoint.role_state`, for loading; `held`: the checkpoint's keys.
    """

    def redirect(entry):
        if not isinstance(entry, ShardedTensor | ShardedTensorFactory) or entry.data.dtype != torch.float32:
            return entry
        # A weight of several parts has a key of each, and all or none are there.
        part = next(iter(nested_values(entry.build()))).key if isinstance(entry, ShardedTensorFactory) else entry.key
        (role, name), suffix = entry.key.split(".", 1), part.removeprefix(entry.key)
        for kind in _MAIN:
            name = name.removeprefix(f"{_STATES}{kind}.")
        if not name.startswith(_STATES):  # no moment
            copies = [f"{role}.{_STATES}{kind}.{name}" for kind in _MAIN]
            entry.key = next((key for key in copies if key + suffix in held), f"{role}.{name}")
        return entry

    dict_list_map_inplace(redirect, {"model": state["model"], "optimizer": state["optimizer"]})


def restore(loaded: dict, optimizer):
    """Gives Megatron's optimizer the state that a checkpoint has of it. `loaded`: the role's loaded state."""
    with described(optimizer):
        optimizer.load_state_dict(_merged(loaded, optimizer))


def _merged(loaded: dict, optimizer) -> dict:
    """Merges the sharded and the plain part of a role's loaded optimizer state, for `optimizer.load_state_dict`.

    Megatron uses a separate optimizer for experts that are split over ranks, so a state saved by one optimizer may be
    loaded into two, or the reverse. Each param group takes what it lacks, such as the counter of updates, from the
    matching saved group; rates, decay and Adam's numbers are those of the run's flags. The form of the state is that
    of the optimizer that loads it, whatever kind saved it.
    """
    optimizers, state = optimizer.chained_optimizers, loaded["optimizer_form"]
    saved = _by_optimizer(loaded["optimizer_plain"])
    saved_groups = [group for state in saved for group in _param_groups(state).values()]
    for i, (own, chained) in enumerate(zip(_by_optimizer(state), optimizers, strict=True)):
        if SCALER in own:
            own[SCALER] = saved[min(i, len(saved) - 1)].get(SCALER, own[SCALER])
        groups = _param_groups(own)
        groups.update(enumerate(_matching_group(group, saved_groups) for group in chained.param_groups))
    merge(state, loaded["optimizer"])
    _restore_lists(state)
    return state


def _by_optimizer(plain: dict) -> list[dict]:
    """The plain states of a role's optimizers: Megatron numbers those of several."""
    return [plain[i] for i in sorted(plain)] if all(isinstance(key, int) for key in plain) else [plain]


def _param_groups(state: dict) -> dict[int, dict]:
    """The param groups of a plain state by index, at any depth, which depends on the kind of optimizer; {}: none."""
    found = (_param_groups(value) for value in state.values() if isinstance(value, dict))
    return state["param_groups"] if "param_groups" in state else next(filter(None, found), {})


def _matching_group(group: dict, saved: list[dict]) -> dict:
    """The group with the counters of a saved one of the same optimizer and kind of parameters, whatever its rates."""
    same = [other for other in saved if other.get("optimizer") == group.get("optimizer")] or saved
    match = next((other for other in same if other["wd_mult"] == group["wd_mult"]), same[0])
    own = {name: value for name, value in group.items() if name not in ("params", "step")}
    # The rank that saved them may have no parameter of this group, and FusedAdam counts no updates of an empty one.
    steps = [other["step"] for other in same if "step" in other]
    return match | own | ({"step": max(steps)} if steps else {})


def _restore_lists(state: dict):
    """Turns dictionaries by index, as which a checkpoint stores lists, back into lists, at any depth."""
    for key, value in state.items():
        if key == "param_groups" and isinstance(value, dict):
            state[key] = [value[i] for i in range(len(value))]
        elif key == "fp32_from_fp16_params":
            state[key] = [[group[i] for i in range(len(group))] for _, group in sorted(value.items())]
        elif isinstance(value, dict):
            _restore_lists(value)
