"""Names of a folder's tensors: the language model's, those of multi-token prediction (MTP), and those of other parts.

The language model of a folder that also reads images is trained, all else stays as it is. Unless the tensors of MTP are
trained, an export has those of the folder.
"""

import re
from collections.abc import Collection, Iterable
from typing import NamedTuple

from megarl.mcore.weights.hf.family import Family, Prediction
from megarl.mcore.weights.hf.model_config import ModelConfig

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
        found = (each for each in family.prefixes if any(name.startswith(each) for name in tensors))
        prefix = next(found, family.prefixes[0])
        return Naming(prefix, outer=tuple((plain, prefix + own) for plain, own in family.outer.items()))
    names = family.multimodal.names
    prefix, head = next((each for each in names if f"{each[0]}embed_tokens.weight" in tensors), names[0])
    return Naming(prefix, HEAD_NAME if HEAD_NAME in tensors else head)


def is_kept(family: Family, name: str) -> bool:
    """Whether a tensor belongs to parts that the policy does not have."""
    patterns = family.kept, family.multimodal and family.multimodal.kept
    return any(re.fullmatch(pattern, name) for pattern in patterns if pattern)


class PredictionTensors(NamedTuple):
    """Which tensors of a folder belong to multi-token prediction."""

    described: Prediction
    layers: range  # numbers of the prediction layers
    is_kept: bool  # by exports (`--hf-mtp`)
    is_trained: bool = False  # `--mtp-train`

    def has(self, name: str) -> bool:
        """Whether a tensor is one of them."""
        return self._matches(self.described.pattern, name)

    def copied(self, name: str) -> str | None:
        """The model's tensor whose copy a tensor is, if the folder has it for both."""
        return next((of for pattern, of in self.described.copies.items() if self._matches(pattern, name)), None)

    def _matches(self, pattern: str, name: str) -> bool:
        match = re.fullmatch(pattern.replace("{layer}", r"(\d+)"), name)
        return match is not None and all(int(layer) in self.layers for layer in match.groups())

    def note(self, names: Iterable[str]) -> str | None:
        """What the user should know about the tensors of a folder; None: nothing."""
        if self.is_trained and self.is_kept:
            return None
        if not (count := sum(map(self.has, names))):
            return None if self.is_kept else "has no tensors of multi-token prediction: --hf-mtp drop changes nothing"
        kept = "exports of a language model have them (--hf-mtp drop: none)" if self.is_kept else "exports drop them"
        return f"{count} MTP tensors are those of the source folder, not trained; {kept}"

    def without(self, config: dict) -> dict:
        """config.json of a folder without these tensors."""
        counts = [name for name in self.described.counts if name in config] or self.described.counts[-1:]
        return config | dict.fromkeys(counts, 0)


def prediction_tensors(family: Family, config: ModelConfig, is_kept: bool, is_trained: bool) -> PredictionTensors:
    """Those of a folder of this family."""
    layers, described = config.whole("num_hidden_layers"), family.prediction
    count = next((value for value in map(config.get, described.counts) if value is not None), 0)  # classes lack some
    return PredictionTensors(described, range(layers, layers + count), is_kept, is_trained)
