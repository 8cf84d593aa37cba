"""The gated delta rule by chunks on CUDA, with kernels of flash-linear-attention (2406.06484; the package fla-core).

They compute products of 16 bits and keep states in fp32 between calls, in 16 bits between the chunks of one. Which of
their variants runs is decided by times at the first call, so that two runs need not have the same bits.
"""

import functools
import importlib.metadata

import torch
from packaging.version import Version
from torch import Tensor

from megarl.mcore.recurrence.runs import NONE, Runs
from megarl.mcore.recurrence.states import States, chunk_memories, store_memories

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


def scan(
    queries: Tensor, keys: Tensor, values: Tensor, log_decays: Tensor, strengths: Tensor, runs: Runs,
    states: States | None,
) -> Tensor:  # fmt: skip
    """[T, H, V]: what the rows read, in their type; `states` get the memories after the runs. Has gradients without.

    Args:
        queries, keys: [T, G, K] before their norms, of 16 bits; each serves the values of H / G heads.
        values: [T, H, V], of the same type.
        log_decays, strengths: [T, H], fp32.
    """
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule  # takes seconds, and needs Triton

    kept, found = dict[int, Tensor](), []  # memories by the number of the state; results of levels
    zeros = log_decays.new_zeros(values.shape[1], keys.shape[2], values.shape[2])
    levels, order = runs.packed
    for level in levels:
        memory = None if {*level.before} == {NONE} else chunk_memories(zeros, level.before, kept, states)
        keeps = {*level.after} != {NONE}
        if len(level.chunks):
            rows = queries, keys, values, log_decays, strengths
            out, memory = chunk_gated_delta_rule(
                *((x if level.rows is None else x[level.rows]).unsqueeze(0) for x in rows), initial_state=memory,
                output_final_state=keeps, use_qk_l2norm_in_kernel=True, cu_seqlens=level.cu_rows,
                chunk_indices=level.chunks,
            )  # fmt: skip
            found.append(out.squeeze(0))
        if keeps:
            after = zip(level.after, torch.stack([zeros] * len(level.after)) if memory is None else memory, strict=True)
            kept |= {number: each for number, each in after if number != NONE}
    store_memories(kept, states)
    whole = torch.cat(found)
    return whole if order is None else whole[order]
