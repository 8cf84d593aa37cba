"""MiniMax-M2: norms of queries and keys over all heads, sigmoid gates with a bias, a rotation of half the channels."""

import functools

from megarl.mcore.weights.hf.experts import SIGMOID_GATES, expert_flags
from megarl.mcore.weights.hf.family import ALL_HEADS_NORMS, LAYERS, Family, expert_layers, model_flags
from megarl.mcore.weights.hf.mapping import rows
from megarl.mcore.weights.hf.model_config import ModelConfig
from megarl.mcore.weights.hf.rotary import rotary_flags


def flags(config: ModelConfig) -> dict[str, object]:
    """Adds experts and norms. Training-time jitter is not applied."""
    rotary = functools.partial(rotary_flags, rotates_part=True)
    found = model_flags(config, rotary=rotary) | expert_flags(config, config.whole("intermediate_size")) | SIGMOID_GATES
    return found | {"qk-layernorm-all-heads": True}


FAMILY = Family(
    model_type="minimax_m2",
    layers=LAYERS
    | ALL_HEADS_NORMS
    | expert_layers("block_sparse_moe.gate", "block_sparse_moe.experts", "w1", "w3", "w2")
    | {"mlp.router.expert_bias": rows("block_sparse_moe.e_score_correction_bias")},
    flags=flags,
)
