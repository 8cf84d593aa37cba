"""GPT-OSS (2508.10925): attention sinks, windows in every second layer, experts with biases and clamped gates."""

from megarl.mcore.weights.hf.experts import expert_flags
from megarl.mcore.weights.hf.family import ATTENTION, LAYERS, Family, model_flags, window_flags
from megarl.mcore.weights.hf.mapping import rows, stacked_experts
from megarl.mcore.weights.hf.model_config import ModelConfig

ROPE = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
        "original_max_position_embeddings": 4096}  # fmt: skip


def flags(config: ModelConfig) -> dict[str, object]:
    """Adds sinks, windows, biases of all linear layers, and experts; gates are softmaxes over the chosen ones."""
    config.require("attention_bias", True)
    config.require("swiglu_alpha", 1.702)
    found = model_flags(config, ("hidden_act", "silu", "quick-geglu")) | {"softmax-type": "learnable"}
    del found["disable-bias-linear"]
    found |= window_flags(config, lambda layer: layer % 2 == 0)
    found |= expert_flags(config, config.whole("intermediate_size"))
    return found | {"glu-linear-offset": 1.0, "activation-func-clamp-value": config.number("swiglu_limit")}


FAMILY = Family(
    model_type="gpt_oss",
    defaults={
        "vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 36,
        "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "hidden_act": "silu",
        "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 150000.0, "rope_scaling": ROPE,
        "sliding_window": 128, "num_local_experts": 128, "num_experts_per_tok": 4, "attention_bias": True,
        "swiglu_alpha": 1.702, "swiglu_limit": 7.0,
    },
    layers={
        **ATTENTION,
        "mlp.linear_fc1.layer_norm_weight": LAYERS["mlp.linear_fc1.layer_norm_weight"],
        "mlp.router.weight": rows("mlp.router.weight"),
        "mlp.router.bias": rows("mlp.router.bias"),
        "mlp.experts.experts.linear_fc1.weight": stacked_experts("mlp.experts.gate_up_proj", 2),
        "mlp.experts.experts.linear_fc1.bias": stacked_experts("mlp.experts.gate_up_proj_bias", 2),
        "mlp.experts.experts.linear_fc2.weight": stacked_experts("mlp.experts.down_proj"),
        "mlp.experts.experts.linear_fc2.bias": stacked_experts("mlp.experts.down_proj_bias"),
    },
    flags=flags,
)  # fmt: skip
