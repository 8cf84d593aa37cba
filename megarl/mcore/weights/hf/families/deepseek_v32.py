"""DeepSeek-V3.2 (2512.02556): DeepSeek-V3's layers, whose queries attend to the tokens that an indexer chooses."""

from megarl.mcore.weights.hf.deepseek import check_chosen_tokens, deepseek_flags
from megarl.mcore.weights.hf.experts import deepseek_gates
from megarl.mcore.weights.hf.families import deepseek_v3
from megarl.mcore.weights.hf.model_config import ModelConfig


def flags(config: ModelConfig) -> dict[str, object]:
    """DeepSeek-V3's, for sequences of which every token is chosen."""
    check_chosen_tokens(config)
    return deepseek_flags(config) | deepseek_gates(config)


FAMILY = deepseek_v3.FAMILY._replace(
    model_type="deepseek_v32",
    flags=flags,
    kept=r"model\.layers\.\d+\.self_attn\.indexer\..+",
)
