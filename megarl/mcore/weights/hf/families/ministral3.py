"""Ministral 3 and Devstral Small 2: Mistral's layers; queries far from the beginning are longer."""

from megarl.mcore.weights.hf.family import LAYERS, Family, model_flags, window_flags
from megarl.mcore.weights.hf.model_config import ModelConfig
from megarl.mcore.weights.hf.rotary import check_query_scaling


def flags(config: ModelConfig) -> dict[str, object]:
    """Those of all families, for sequences in which no query is scaled."""
    check_query_scaling(config)
    return model_flags(config) | window_flags(config)


FAMILY = Family(
    model_type="ministral3",
    layers=LAYERS,
    flags=flags,
)
