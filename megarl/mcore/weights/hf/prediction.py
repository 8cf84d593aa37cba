"""Tensors of multi-token prediction (MTP) in a folder: unless they are trained, an export has those of the folder."""

import re
from collections.abc import Iterable
from typing import NamedTuple

from megarl.mcore.weights.hf.family import Family, Prediction
from megarl.mcore.weights.hf.model_config import ModelConfig


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
        count = sum(map(self.has, names))
        if self.is_trained and self.is_kept:
            return None
        if not count:
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
    named = map(config.get, described.counts)
    count = next((value for value in named if value is not None), 0)  # some classes lack the first
    return PredictionTensors(described, range(layers, layers + count), is_kept, is_trained)
