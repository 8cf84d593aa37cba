"""GLM-5 (2602.15763): DeepSeek-V3.2's layers; some share the choice of tokens with the layer before."""

from megarl.mcore.weights.hf.families import deepseek_v32

FAMILY = deepseek_v32.FAMILY._replace(model_type="glm_moe_dsa")
