"""Trinity (AFMoE): gated attention, windows, norms before and after each part, sigmoid gates, shared experts."""

from megarl.mcore.weights.hf.experts import SIGMOID_GATES, expert_flags, layer_pattern
from megarl.mcore.weights.hf.family import FULL, SANDWICH, Family, expert_layers, model_flags, window_flags
from megarl.mcore.weights.hf.mapping import heads, rows
from megarl.mcore.weights.hf.model_config import ModelConfig


def flags(config: ModelConfig) -> dict[str, object]:
    """Adds all of it; layers without a window have no positions."""
    config.require("attention_bias", False)
    layers, dense = config.whole("num_hidden_layers"), config.whole("num_dense_layers", minimum=0)
    is_whole = [int(kind == FULL) for kind in config.items("layer_types", str, "names")]
    found = model_flags(config) | window_flags(config) | {
        "layernorm-position": "sandwich", "qk-layernorm": True, "attention-output-gate": True,
        **({"no-rope-freq": str(is_whole).replace(" ", "")} if any(is_whole) else {}),
        **({"embedding-multiplier": config.whole("hidden_size") ** 0.5} if config.switch("mup_enabled") else {}),
    }  # fmt: skip
    return found | _experts(config) | layer_pattern([i >= dense for i in range(layers)])


def _experts(config: ModelConfig) -> dict[str, object]:
    if config.whole("num_experts_per_tok") < 2:
        raise config.error("num_experts_per_tok", "2 or more: Megatron does not normalize a single gate")
    size = config.whole("moe_intermediate_size")
    return expert_flags(config, size) | SIGMOID_GATES | {
        "moe-router-topk-scaling-factor": config.number("route_scale"),
        "moe-shared-expert-intermediate-size": config.whole("num_shared_experts") * size,
    }  # fmt: skip


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
