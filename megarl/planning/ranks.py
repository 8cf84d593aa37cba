"""How many ranks a training run on one node's CPUs has by default: one for each core, or one with all threads."""

import os

from megarl import arguments
from megarl.errors import UsageError

BYTES_PER_WEIGHT = 24  # of a trained model in fp32: weights, gradients, moments, and activations of the same order
MAX_SHARE = 0.4  # of the node's memory that all copies of the models may take


def ranks_for(flags: list[str], program: str, cores: int) -> int:
    """`cores` data-parallel ranks of one thread: they also divide what threads cannot. 1 rank for flags that place
    roles or split a model, for flags that are wrong, and for models whose copies would not fit into memory."""
    try:
        config = arguments.parse(flags, cores, program)
    except UsageError:
        return 1
    from megarl.mcore import device  # after the flags: they import torch
    from megarl.planning.parameters import parameter_totals

    if device.has_cuda() or config.settings.role_map:
        return 1
    weights = sum(parameter_totals(role.megatron, 1, value_head=False).total for role in config.with_models())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return cores if weights * BYTES_PER_WEIGHT * cores <= MAX_SHARE * memory else 1
