"""Qwen3-Next: gated delta nets and gated attention, experts with a gated shared one, zero-centred norms."""

from megarl.mcore.weights.hf.experts import expert_flags, softmax_gates, sparse_layers
from megarl.mcore.weights.hf.family import (
    GATED,
    PREDICTION_MODULE,
    Family,
    delta_net_flags,
    delta_net_layers,
    expert_layers,
    model_flags,
)
from megarl.mcore.weights.hf.mapping import recurrent_parts
from megarl.mcore.weights.hf.model_config import ModelConfig

EXPERTS = expert_layers("mlp.gate", "mlp.experts", "gate_proj", "up_proj", "down_proj", "mlp.shared_expert")


def flags(config: ModelConfig) -> dict[str, object]:
    """Adds gated delta nets, experts and shared experts."""
    found = model_flags(config) | delta_net_flags(config) | softmax_gates(config) | sparse_layers(config)
    return found | shared_expert_flags(config)


def shared_expert_flags(config: ModelConfig) -> dict[str, object]:
    """Sizes of experts and of the shared one, which has a gate."""
    found = expert_flags(config, config.whole("moe_intermediate_size"))
    found["moe-shared-expert-intermediate-size"] = config.whole("shared_expert_intermediate_size")
    return found | {"moe-shared-expert-gate": True}


_QKVZ, _GATES = "linear_attn.in_proj_qkvz.weight", "linear_attn.in_proj_ba.weight"
FAMILY = Family(
    model_type="qwen3_next",
    layers=GATED
    | EXPERTS
    | delta_net_layers(
        recurrent_parts(_QKVZ, "query", "key", "value", "z", by_key_head=True)
        | recurrent_parts(_GATES, "beta", "alpha", by_key_head=True)
    ),
    flags=flags,
    prediction=PREDICTION_MODULE,
)
