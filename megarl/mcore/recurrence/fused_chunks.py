"""The gated delta rule by chunks (2406.06484), and the convolution before it, by kernels of flash-linear-attention on
CUDA: the package fla-core.

Their products are of 16 bits, with what a chunk reads of a state; states themselves are fp32. Which of their variants
runs is decided by times at the first call, so that two runs need not have the same bits.
"""

import functools
import importlib
import importlib.metadata

import torch
from packaging.version import Version
from torch import Tensor
from torch.nn import functional

from megarl.errors import UsageError
from megarl.mcore.recurrence.runs import NONE, Runs, States

BACKEND = "fla"  # the value of --delta-rule-backend that stands for it
PACKAGE, MIN_VERSION = "fla-core", "0.6"
MAX_KEYS = 256  # channels of a key that the kernels hold


@functools.cache
def version() -> str | None:
    """The installed version of the kernels' package; None: it is missing, or older than megarl calls it."""
    try:
        return supported(importlib.metadata.version(PACKAGE))
    except importlib.metadata.PackageNotFoundError:
        return None


def supported(version: str | None) -> str | None:
    """The version, if megarl calls it."""
    return version if version and Version(version) >= Version(MIN_VERSION) else None


def load():
    """Imports the kernels, which takes seconds and asks this process's device; UsageError if they do not load."""
    try:
        for name in ("fla.modules.causal_conv1d", "fla.ops.gated_delta_rule"):
            importlib.import_module(name)
    except Exception as error:  # the package and Triton raise what they like
        reason = " ".join(str(error).split())
        raise UsageError(f"--delta-rule-backend {BACKEND}: {PACKAGE} {version()} does not load: {reason}") from None


def convolved(x: Tensor, weight: Tensor, kind: torch.dtype, runs: Runs, states: States | None) -> Tensor:
    """[T, C] of a type, after the causal convolution and its SiLU; otherwise as `runs.convolved`."""
    from fla.modules.causal_conv1d import causal_conv1d

    plan, packed, before = runs.convolution, runs.in_order, None
    if {*packed.before} != {NONE}:
        # The kernel's states have as many rows as the convolution reads; it never reads the first.
        before = functional.pad(_inputs_of(x, plan.before, states).transpose(1, 2), (1, 0))
    mixed, _ = causal_conv1d(
        x.to(kind).unsqueeze(0),
        weight.squeeze(1),
        initial_state=before,
        activation="silu",
        cu_seqlens=packed.cu_rows,
        chunk_indices=packed.chunks,
    )
    if states is not None and len(plan.states):
        states.inputs.index_copy_(0, plan.states, _inputs_of(x, plan.last, states))
    return mixed.squeeze(0)


def _inputs_of(x: Tensor, rows: Tensor, states: States | None) -> Tensor:
    """[…, C] the inputs x [T, C] of a convolution, zeros and those of states, numbered as in `ConvolutionRows`."""
    found = x[rows.clamp_max(len(x) - 1)]
    if states is not None:
        stored = states.inputs.flatten(0, 1)[(rows - len(x) - 1).clamp_min(0)]
        found = torch.where((rows > len(x)).unsqueeze(-1), stored, found)
    return found.masked_fill((rows == len(x)).unsqueeze(-1), 0.0)


def scan(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    log_decays: Tensor,
    strengths: Tensor,
    runs: Runs,
    states: States | None,
) -> Tensor:
    """[T, H, V]: what the rows read, in their type; `states` get the memories after the runs. Has gradients without.
    `queries`, `keys`: [T, G, K] before their norms, of 16 bits; each serves the values of H / G heads. `values`:
    [T, H, V], of the same type. `log_decays`, `strengths`: [T, H], fp32."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    kept, found = dict[int, Tensor](), []  # memories by the number of the state; results of levels
    zeros = log_decays.new_zeros(values.shape[1], keys.shape[2], values.shape[2])
    levels, order = runs.packed
    for level in levels:
        memory = None if {*level.before} == {NONE} else _memories(zeros, level.before, kept, states)
        keeps = {*level.after} != {NONE}
        if len(level.chunks):
            rows = queries, keys, values, log_decays, strengths
            out, memory = chunk_gated_delta_rule(
                *((x if level.rows is None else x[level.rows]).unsqueeze(0) for x in rows),
                initial_state=memory,
                output_final_state=keeps,
                use_qk_l2norm_in_kernel=True,
                cu_seqlens=level.cu_rows,
                chunk_indices=level.chunks,
            )
            found.append(out.squeeze(0))
        if keeps:
            after = zip(level.after, torch.stack([zeros] * len(level.after)) if memory is None else memory, strict=True)
            kept |= {number: each for number, each in after if number != NONE}
    _store_memories(kept, states)
    whole = torch.cat(found)
    return whole if order is None else whole[order]


def _memories(zeros: Tensor, numbers: list[int], kept: dict[int, Tensor], states: States | None) -> Tensor:
    """[R, H, K, V] of the states with these numbers: those of `kept`, else of `states`; `NONE`: `zeros` [H, K, V]."""
    stored = None if states is None else states.memories
    found = (zeros if i == NONE else kept[i] if i in kept or stored is None else stored[i] for i in numbers)
    return torch.stack(list(found))


def _store_memories(kept: dict[int, Tensor], states: States | None):
    """Writes the memories that the runs left, by the numbers of their states."""
    if states is not None and kept:
        numbers = torch.tensor(list(kept), device=states.memories.device)
        states.memories.index_copy_(0, numbers, torch.stack(list(kept.values())))
