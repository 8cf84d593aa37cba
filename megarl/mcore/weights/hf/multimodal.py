"""Folders of models that also read images: the language model in them is trained, all else stays as it is."""

import re
from collections.abc import Collection
from typing import NamedTuple

from megarl.mcore.weights.hf.family import Family
from megarl.mcore.weights.hf.folder import HFFolder
from megarl.mcore.weights.hf.model_config import ModelConfig

TEXT, ARCHITECTURE = "text_config", "ForConditionalGeneration"
MODEL_PREFIX, HEAD_NAME = "model.", "lm_head.weight"
PREDICTION_PREFIX = "mtp."  # of a module of multi-token prediction beside the language model


class Naming(NamedTuple):
    """Names of the language model's tensors in a folder: those of a folder of text alone are the defaults."""

    prefix: str = MODEL_PREFIX
    head: str = HEAD_NAME
    # (name with `model.`, name in the folder) of tensors with names of their own
    outer: tuple[tuple[str, str], ...] = ()

    def stored(self, name: str) -> str:
        """The name in the folder of a tensor of the language model."""
        if name in (own := dict(self.outer)):
            return own[name]
        if name.startswith(MODEL_PREFIX):
            return self.prefix + name.removeprefix(MODEL_PREFIX)
        return self.head if name == HEAD_NAME else name

    def plain(self, name: str) -> str | None:
        """The opposite; None for a tensor that is not the language model's."""
        for plain, own in self.outer:
            if name == own:
                return plain
        if name.startswith(self.prefix):
            return MODEL_PREFIX + name.removeprefix(self.prefix)
        has_own_name = self.prefix == MODEL_PREFIX or name.startswith(PREDICTION_PREFIX)
        return HEAD_NAME if name == self.head else name if has_own_name else None


def naming_of(family: Family, tensors: Collection[str]) -> Naming:
    """How a folder names its tensors."""
    if family.multimodal is None:
        prefixes, outer = family.names
        prefix = next((each for each in prefixes if any(name.startswith(each) for name in tensors)), prefixes[0])
        return Naming(prefix, outer=tuple((plain, prefix + own) for plain, own in outer.items()))
    names = family.multimodal.names
    prefix, head = next((each for each in names if f"{each[0]}embed_tokens.weight" in tensors), names[0])
    return Naming(prefix, HEAD_NAME if HEAD_NAME in tensors else head)


def is_kept(family: Family, name: str) -> bool:
    """Whether a tensor belongs to parts that the policy does not have."""
    patterns = family.kept, family.multimodal and family.multimodal.kept
    return any(re.fullmatch(pattern, name) for pattern in patterns if pattern)


def text_config(folder: HFFolder, family: Family, longest: int) -> ModelConfig:
    """The language model's part of a folder's config.json. UsageError for another kind of language model."""
    values, kind = folder.config.get(TEXT), family.config_type
    if values is None and family.multimodal is not None and family.multimodal.is_flat:
        values = ModelConfig(folder.config, family.model_type, longest, folder.error).get(TEXT).to_dict()
    if not isinstance(values, dict):
        raise folder.error(f"config.json: {TEXT} {values!r}: allowed is an object")
    if values.get("model_type", kind) != kind:
        kinds = ", ".join(map(repr, (kind, *(family.multimodal.texts if family.multimodal else ()))))
        raise folder.error(f"config.json: {TEXT}: model_type {values['model_type']!r}: allowed is {kinds}")
    names = folder.config.get("architectures") or [ARCHITECTURE]
    if not isinstance(names, list) or not any(str(name).endswith(ARCHITECTURE) for name in names):
        raise folder.error(f"config.json: architectures {names!r}: allowed is …{ARCHITECTURE}")
    return ModelConfig(values, str(kind), longest, folder.error)


def ties_head(folder: HFFolder, family: Family, longest: int, naming: Naming) -> bool:
    """Whether the head is the embedding: if the folder has none, or as transformers reads it from outside the text's
    part."""
    if folder.has_weights and naming.head not in folder.weights:
        return True
    whole = ModelConfig(folder.config, family.model_type, longest, folder.error)
    return whole.switch("tie_word_embeddings")
