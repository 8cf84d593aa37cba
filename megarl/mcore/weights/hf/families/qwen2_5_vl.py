"""Qwen2.5-VL (2502.13923): its language model is Qwen2, whose rotation in three axes is the plain one in text."""

from megarl.mcore.weights.hf.families import qwen2
from megarl.mcore.weights.hf.family import QWEN2_VL

FAMILY = qwen2.FAMILY._replace(model_type="qwen2_5_vl", config_type="qwen2_5_vl_text", multimodal=QWEN2_VL)
