"""Qwen3-VL: its language model is Qwen3, whose interleaved rotation in three axes is the plain one in text."""

from megarl.mcore.weights.hf.families import qwen3
from megarl.mcore.weights.hf.family import QWEN_VL

FAMILY = qwen3.FAMILY._replace(model_type="qwen3_vl", config_type="qwen3_vl_text", multimodal=QWEN_VL)
