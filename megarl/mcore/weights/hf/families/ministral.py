"""Ministral 8B: Mistral's layers, some with a window."""

from megarl.mcore.weights.hf.families import mistral

FAMILY = mistral.FAMILY._replace(model_type="ministral")
