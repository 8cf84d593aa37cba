"""Qwen3-VL with experts: its language model is Qwen3-MoE, with all experts of a layer in two transposed tensors."""

from megarl.mcore.weights.hf.experts import expert_flags, sparse_layers
from megarl.mcore.weights.hf.family import LAYERS, QWEN_VL, Family, model_flags
from megarl.mcore.weights.hf.mapping import rows, transposed_experts
from megarl.mcore.weights.hf.model_config import ModelConfig


def flags(config: ModelConfig) -> dict[str, object]:
    """Adds experts, whose gates are always normalized, and the norms of queries and keys."""
    config.require("attention_bias", False, None)
    found = model_flags(config) | expert_flags(config, config.whole("moe_intermediate_size"))
    return found | sparse_layers(config) | {"qk-layernorm": True}


FAMILY = Family(
    model_type="qwen3_vl_moe",
    layers={
        **LAYERS,
        "mlp.router.weight": rows("mlp.gate.weight"),
        "mlp.experts.experts.linear_fc1.weight": transposed_experts("mlp.experts.gate_up_proj"),
        "mlp.experts.experts.linear_fc2.weight": transposed_experts("mlp.experts.down_proj"),
    },
    flags=flags,
    config_type="qwen3_vl_moe_text",
    multimodal=QWEN_VL,
)
