"""Kimi-K2 (2507.20534): DeepSeek-V3's layers under a `model_type` of its own."""

from megarl.mcore.weights.hf.families import deepseek_v3

FAMILY = deepseek_v3.FAMILY._replace(model_type="kimi_k2", config_type="deepseek_v3")
