"""Qwen3.5 with experts as published, with a vision tower: the rotation of its text in three axes is the plain one."""

from megarl.mcore.weights.hf.families import qwen3_5_moe_text
from megarl.mcore.weights.hf.family import PREDICTION_MODULE, QWEN_VL

FAMILY = qwen3_5_moe_text.FAMILY._replace(
    model_type="qwen3_5_moe", config_type="qwen3_5_moe_text", prediction=PREDICTION_MODULE, multimodal=QWEN_VL
)
