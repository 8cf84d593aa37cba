"""A model in a Hugging Face folder: its family, the Megatron flags that it needs, and its tensors."""

import re
from typing import NamedTuple

from megarl.mcore.weights.hf.families import families
from megarl.mcore.weights.hf.family import Family
from megarl.mcore.weights.hf.folder import INDEX, HFFolder
from megarl.mcore.weights.hf.mapping import Mapping, Rows, rows, stacked_experts
from megarl.mcore.weights.hf.model_config import ModelConfig
from megarl.mcore.weights.hf.prediction import PredictionTensors, prediction_tensors
from megarl.mcore.weights.hf.quantized import method_of
from megarl.mcore.weights.hf.stored_tensors import StoredTensor

LANGUAGE_MODEL, CLASSIFIER = "ForCausalLM", "ForSequenceClassification"
ROTARY_BUFFER = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")  # old folders of Llama have it
LAYER_TENSOR = re.compile(r"model\.layers\.(\d+)\.(.+)")
# As transformers 5 keeps experts in memory, and stores them with `save_original_format=False`.
FUSED_EXPERTS: dict[str, Mapping] = {
    "mlp.router.weight": rows("mlp.gate.weight"),
    "mlp.experts.experts.linear_fc1.weight": stacked_experts("mlp.experts.gate_up_proj"),
    "mlp.experts.experts.linear_fc2.weight": stacked_experts("mlp.experts.down_proj"),
}


class HFModel(NamedTuple):
    """A folder whose config.json was understood."""

    folder: HFFolder
    family: Family
    flags: dict[str, object]  # Megatron's, without dashes; True for a switch
    vocab_size: int  # rows of the embedding; a tokenizer may have fewer tokens
    has_scalar_head: bool  # a reward model or critic
    prediction: PredictionTensors
    notes: tuple[str, ...] = ()  # for the user: tensors that are not used

    @property
    def stores_tied_head(self) -> bool:
        """Whether the folder has the tensor of a head that is the embedding."""
        is_tied = "untie-embeddings-and-output-weights" not in self.flags
        return is_tied and self.folder.has_weights and "lm_head.weight" in self.folder.weights

    def is_unused(self, name: str) -> bool:
        """Whether a tensor of the folder is known and has no part in the model: an export keeps it as it is."""
        return bool(ROTARY_BUFFER.fullmatch(name)) or self.prediction.has(name)

    def tokens(self) -> list[str]:
        """The flags as command-line tokens."""
        pairs = ((f"--{name}", value) for name, value in self.flags.items())
        return [token for name, value in pairs for token in ([name] if value is True else [name, str(value)])]


def read_model(path: str, flag: str, longest: int, keeps_prediction: bool = True) -> HFModel:
    """Reads a folder's config.json and, if it has weights, their headers.

    Args:
        flag: that gave the path, for messages.
        longest: maximum length of prompt and response together, in tokens.
        keeps_prediction: whether exports have the folder's tensors of multi-token prediction.

    Raises:
        UsageError: not such a folder, or a model that megarl's layers do not compute.
    """
    folder = HFFolder(path, flag)
    family = _family(folder)
    config = ModelConfig(folder.config, family.config_type or family.model_type, longest, folder.error)
    method_of(folder.config, folder.error)
    flags, is_classifier = family.flags(config), _is_classifier(config)
    if is_classifier or not config.switch("tie_word_embeddings"):
        flags["untie-embeddings-and-output-weights"] = True
    prediction = prediction_tensors(family, config, keeps_prediction)
    notes: tuple[str, ...] = ()
    if folder.has_weights:
        family = family._replace(layers=_stored_layers(family, folder))
        notes = _notes(folder, prediction)
    return HFModel(folder, family, flags, config.whole("vocab_size"), is_classifier, prediction, notes)


def _stored_layers(family: Family, folder: HFFolder) -> dict[str, Mapping]:
    """The family's layers; where transformers stored the experts of a layer in two tensors, these."""
    stored = {match[2] for match in map(LAYER_TENSOR.fullmatch, folder.weights) if match}
    has_single_experts = isinstance(family.layers.get("mlp.experts.experts.linear_fc1.weight"), Rows)
    if not has_single_experts or "mlp.experts.gate_up_proj" not in stored:
        return family.layers
    return family.layers | FUSED_EXPERTS


def _notes(folder: HFFolder, prediction: PredictionTensors) -> tuple[str, ...]:
    quantized = [tensor for tensor in folder.weights.values() if not isinstance(tensor, StoredTensor)]
    note, unnamed = prediction.note(folder.weights), sorted(folder.unnamed)
    found = [note] if note else []
    if quantized:
        method, dtype = method_of(folder.config, folder.error), quantized[0].dtype
        found.append(f"{len(quantized)} tensors are quantized ({method}): exports have them as {dtype}, not quantized")
    if unnamed:
        found.append(f"{len(unnamed)} tensors that {INDEX} does not name are not used; the first is {unnamed[0]}")
    return tuple(str(folder.error(text)) for text in found)


def _family(folder: HFFolder) -> Family:
    kind = folder.config.get("model_type")
    if not isinstance(kind, str) or kind not in families():
        raise folder.error(f"config.json: model_type {kind!r}: allowed are {', '.join(families())}")
    return families()[kind]


def _is_classifier(config: ModelConfig) -> bool:
    """Whether the head is scalar. UsageError for other heads, and for several labels."""
    names = config.items("architectures", str, "names") or [LANGUAGE_MODEL]
    if any(name.endswith(LANGUAGE_MODEL) for name in names):
        return False
    if not any(name.endswith(CLASSIFIER) for name in names):
        raise config.error("architectures", f"…{LANGUAGE_MODEL} and …{CLASSIFIER}")
    if config.get("num_labels") != 1:
        raise config.error("num_labels", "one, the score of a reward model or critic")
    return True
