"""A model in a Hugging Face folder: its family, the Megatron flags that it needs, and its tensors."""

from typing import NamedTuple

from megarl.mcore.weights.hf.families import families
from megarl.mcore.weights.hf.family import Family
from megarl.mcore.weights.hf.folder import HFFolder
from megarl.mcore.weights.hf.model_config import ModelConfig

LANGUAGE_MODEL, CLASSIFIER = "ForCausalLM", "ForSequenceClassification"


class HFModel(NamedTuple):
    """A folder whose config.json was understood."""

    folder: HFFolder
    family: Family
    flags: dict[str, object]  # Megatron's, without dashes; True for a switch
    vocab_size: int  # rows of the embedding; a tokenizer may have fewer tokens
    has_scalar_head: bool  # a reward model or critic

    def tokens(self) -> list[str]:
        """The flags as command-line tokens."""
        pairs = ((f"--{name}", value) for name, value in self.flags.items())
        return [token for name, value in pairs for token in ([name] if value is True else [name, str(value)])]


def read_model(path: str, flag: str, longest: int) -> HFModel:
    """Reads a folder's config.json and, if it has weights, their headers.

    Args:
        flag: that gave the path, for messages.
        longest: maximum length of prompt and response together, in tokens.

    Raises:
        UsageError: not such a folder, or a model that megarl's layers do not compute.
    """
    folder = HFFolder(path, flag)
    family = _family(folder)
    config = ModelConfig(folder.config, family.defaults, longest, folder.error)
    if folder.config.get("quantization_config"):
        raise folder.error("quantized weights (quantization_config) are not supported; allowed are fp32, bf16 and fp16")
    flags, is_classifier = family.flags(config), _is_classifier(folder)
    if is_classifier or not _is_tied(folder):
        flags["untie-embeddings-and-output-weights"] = True
    return HFModel(folder, family, flags, config.whole("vocab_size"), is_classifier)


def _family(folder: HFFolder) -> Family:
    kind = folder.config.get("model_type")
    if not isinstance(kind, str) or kind not in families():
        raise folder.error(f"config.json: model_type {kind!r}: allowed are {', '.join(families())}")
    return families()[kind]


def _is_classifier(folder: HFFolder) -> bool:
    """Whether the head is scalar. UsageError for other heads, and for several labels."""
    names = folder.config.get("architectures") or [LANGUAGE_MODEL]
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise folder.error(f"config.json: architectures {names!r}: allowed is a list of names")
    if any(name.endswith(LANGUAGE_MODEL) for name in names):
        return False
    if not any(name.endswith(CLASSIFIER) for name in names):
        raise folder.error(
            f"config.json: architectures {', '.join(names)}: allowed are …{LANGUAGE_MODEL} and …{CLASSIFIER}"
        )
    id2label = folder.config.get("id2label") or {"0": "LABEL_0", "1": "LABEL_1"}  # transformers' default
    if not isinstance(id2label, dict):
        raise folder.error(f"config.json: id2label {id2label!r}: allowed is an object")
    labels = folder.config.get("num_labels") or len(id2label)
    if labels != 1:
        raise folder.error(f"config.json: {labels} labels: allowed is one, the score of a reward model or critic")
    return True


def _is_tied(folder: HFFolder) -> bool:
    """Whether the head is the embedding: as config.json says, otherwise if there is no tensor of the head."""
    is_tied = folder.config.get("tie_word_embeddings")
    if is_tied is None:
        return folder.has_weights and "lm_head.weight" not in folder.tensors
    if type(is_tied) is not bool:
        raise folder.error(f"config.json: tie_word_embeddings {is_tied!r}: allowed is true or false")
    return is_tied
