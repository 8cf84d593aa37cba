"""Sizes of a model's layers with a recurrent state."""

from megarl.mcore.recurrence.delta_rule import HeadSizes
from megarl.mcore.recurrence.state_space import SpaceSizes


def layer_sizes(config, ranks: int) -> HeadSizes | SpaceSizes:
    """Those on one of some tensor-parallel ranks; `config`: a model's, or a role's Megatron namespace."""
    if config.hybrid_layer_pattern is None:
        return HeadSizes.of(config, ranks)
    heads = config.mamba_num_groups // ranks, config.mamba_num_heads // ranks
    return SpaceSizes(*heads, config.mamba_state_dim, config.mamba_head_dim, config.mamba_dt_min)
