"""InternLM 3: Llama's layers under a `model_type` of its own."""

from megarl.mcore.weights.hf.families import llama

FAMILY = llama.FAMILY._replace(model_type="internlm3")
