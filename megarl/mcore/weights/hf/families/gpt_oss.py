"""GPT-OSS (2508.10925): attention sinks, windows in every second layer, experts with biases and clamped gates."""

from megarl.mcore.weights.hf.experts import expert_flags
from megarl.mcore.weights.hf.family import (
    ATTENTION,
    LAYERS,
    Family,
    Flags,
    flags_of,
    model_flags,
    requires,
    window_flags,
)
from megarl.mcore.weights.hf.mapping import StackedExperts, rows
from megarl.mcore.weights.hf.model_config import ModelConfig


def _layer_flags(config: ModelConfig) -> Flags:
    """Those of all families, with biases of all linear layers."""
    found = model_flags(config, ("hidden_act", "silu", {"quick-geglu": True}))
    del found["disable-bias-linear"]
    return found


def _experts(projection: str, count: int = 1) -> StackedExperts:
    return StackedExperts((f"mlp.experts.{projection}",), count, is_transposed=True)


GPT_OSS = Family(
    model_type="gpt_oss",
    layers={
        **ATTENTION,
        "mlp.linear_fc1.layer_norm_weight": LAYERS["mlp.linear_fc1.layer_norm_weight"],
        "mlp.router.weight": rows("mlp.router.weight"),
        "mlp.router.bias": rows("mlp.router.bias"),
        "mlp.experts.experts.linear_fc1.weight": _experts("gate_up_proj", 2),
        "mlp.experts.experts.linear_fc1.bias": _experts("gate_up_proj_bias", 2),
        "mlp.experts.experts.linear_fc2.weight": _experts("down_proj"),
        "mlp.experts.experts.linear_fc2.bias": _experts("down_proj_bias"),
    },
    # Gates are softmaxes over the chosen experts.
    flags=flags_of(
        requires("attention_bias", True),
        requires("swiglu_alpha", 1.702),
        _layer_flags,
        {"softmax-type": "learnable"},
        window_flags,
        lambda config: expert_flags(config, "intermediate_size"),
        {"glu-linear-offset": 1.0},
        lambda config: {"activation-func-clamp-value": config.number("swiglu_limit")},
    ),
)
