"""Gemma 3 with a vision tower (2503.19786): its language model is that of the folders of text."""

from megarl.mcore.weights.hf.families import gemma3_text
from megarl.mcore.weights.hf.family import LLAVA

FAMILY = gemma3_text.FAMILY._replace(model_type="gemma3", config_type="gemma3_text", multimodal=LLAVA)
