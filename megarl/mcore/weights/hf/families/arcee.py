"""AFM (Arcee): layers of Llama whose MLPs have squared ReLU without gates."""

from megarl.mcore.weights.hf.family import LAYERS, Family, model_flags
from megarl.mcore.weights.hf.mapping import rows
from megarl.mcore.weights.hf.model_config import ModelConfig


def flags(config: ModelConfig) -> dict[str, object]:
    """Those of all families, with another activation."""
    config.require("attention_bias", False)
    config.require("mlp_bias", False)
    return model_flags(config, ("hidden_act", "relu2", "squared-relu"))


FAMILY = Family(
    model_type="arcee",
    layers=LAYERS | {"mlp.linear_fc1.weight": rows("mlp.up_proj.weight")},
    flags=flags,
)
