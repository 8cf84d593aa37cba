"""Trinity (AFMoE): gated attention, windows, norms before and after each part, sigmoid gates, shared experts."""

from megarl.mcore.weights.hf.experts import (
    SIGMOID_GATES,
    check_several,
    dense_then_experts,
    expert_flags,
    shared_experts,
)
from megarl.mcore.weights.hf.family import (
    SANDWICH,
    Family,
    expert_layers,
    model_flags,
    positions_of_windows,
    window_flags,
)
from megarl.mcore.weights.hf.mapping import heads, rows
from megarl.mcore.weights.hf.model_config import ModelConfig


def flags(config: ModelConfig) -> dict[str, object]:
    """Adds all of it; layers without a window have no positions."""
    config.require("attention_bias", False)
    check_several(config)
    found = model_flags(config) | window_flags(config) | positions_of_windows(config)
    found |= {"layernorm-position": "sandwich", "qk-layernorm": True, "attention-output-gate": True}
    if config.switch("mup_enabled"):
        found["embedding-multiplier"] = config.whole("hidden_size") ** 0.5
    found |= expert_flags(config, config.whole("moe_intermediate_size")) | SIGMOID_GATES
    found["moe-router-topk-scaling-factor"] = config.number("route_scale")
    return found | shared_experts(config) | dense_then_experts(config)


FAMILY = Family(
    model_type="afmoe",
    layers={
        **SANDWICH,
        "self_attention.linear_qkv.weight": heads(*(f"self_attn.{x}_proj.weight" for x in ("q", "gate", "k", "v"))),
        "mlp.linear_fc1.layer_norm_weight": rows("pre_mlp_layernorm.weight"),
        "post_mlp_layernorm.weight": rows("post_mlp_layernorm.weight"),
        **expert_layers("mlp.router.gate", "mlp.experts", "gate_proj", "up_proj", "down_proj"),
        "mlp.router.expert_bias": rows("mlp.expert_bias"),
    },
    flags=flags,
)
