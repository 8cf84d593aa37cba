"""Sarvam 105B: DeepSeek-V3's layers under a `model_type` of its own."""

from megarl.mcore.weights.hf.families import deepseek_v3

FAMILY = deepseek_v3.FAMILY._replace(model_type="sarvam_mla")
