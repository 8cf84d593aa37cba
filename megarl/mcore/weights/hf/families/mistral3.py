"""Mistral Small 3.1 and 3.2, Ministral 3, Devstral Small 2, Mistral Small 4, with a vision tower."""

from megarl.mcore.weights.hf.families import mistral
from megarl.mcore.weights.hf.family import LLAVA

FAMILY = mistral.FAMILY._replace(
    model_type="mistral3", config_type="mistral", multimodal=LLAVA._replace(texts=("ministral3", "mistral4"))
)
