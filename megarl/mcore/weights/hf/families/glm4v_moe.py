"""GLM-4.5V (2507.01006): its language model is GLM-4.5's, whose rotation in three axes is the plain one in text."""

from megarl.mcore.weights.hf.families import glm4_moe
from megarl.mcore.weights.hf.family import QWEN_VL

FAMILY = glm4_moe.FAMILY._replace(model_type="glm4v_moe", config_type="glm4v_moe_text", multimodal=QWEN_VL)
