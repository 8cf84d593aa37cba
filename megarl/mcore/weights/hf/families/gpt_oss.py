"""GPT-OSS (2508.10925): attention sinks, windows in every second layer, experts with biases and clamped gates."""

from megarl.mcore.weights.hf.experts import expert_flags
from megarl.mcore.weights.hf.family import ATTENTION, LAYERS, Family, model_flags, window_flags
from megarl.mcore.weights.hf.mapping import rows, transposed_experts
from megarl.mcore.weights.hf.model_config import ModelConfig


def flags(config: ModelConfig) -> dict[str, object]:
    """Adds sinks, windows, biases of all linear layers, and experts; gates are softmaxes over the chosen ones."""
    config.require("attention_bias", True)
    config.require("swiglu_alpha", 1.702)
    found = model_flags(config, ("hidden_act", "silu", "quick-geglu")) | {"softmax-type": "learnable"}
    del found["disable-bias-linear"]
    found |= window_flags(config)
    found |= expert_flags(config, config.whole("intermediate_size"))
    return found | {"glu-linear-offset": 1.0, "activation-func-clamp-value": config.number("swiglu_limit")}


FAMILY = Family(
    model_type="gpt_oss",
    layers={
        **ATTENTION,
        "mlp.linear_fc1.layer_norm_weight": LAYERS["mlp.linear_fc1.layer_norm_weight"],
        "mlp.router.weight": rows("mlp.router.weight"),
        "mlp.router.bias": rows("mlp.router.bias"),
        "mlp.experts.experts.linear_fc1.weight": transposed_experts("mlp.experts.gate_up_proj", 2),
        "mlp.experts.experts.linear_fc1.bias": transposed_experts("mlp.experts.gate_up_proj_bias", 2),
        "mlp.experts.experts.linear_fc2.weight": transposed_experts("mlp.experts.down_proj"),
        "mlp.experts.experts.linear_fc2.bias": transposed_experts("mlp.experts.down_proj_bias"),
    },
    flags=flags,
)
