"""GLM-4.7-Flash: DeepSeek-V3's layers, with a list of those that have experts."""

from megarl.mcore.weights.hf.families import deepseek_v3

FAMILY = deepseek_v3.FAMILY._replace(model_type="glm4_moe_lite")
